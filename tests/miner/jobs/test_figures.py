"""What the events of a run come to, whatever it reports."""

from __future__ import annotations

import json
import sqlite3
from itertools import pairwise
from pathlib import Path

import pytest

from core.domain.hardware import CPU, GpuSet
from core.planning.plan import GoalPlan
from core.runs.progress import EvalEvent, ProgressEvent, StepEvent, encode_event
from core.runs.run_files import HeldOutScore, RunEnd, RunResult
from miner.api.jobs import LiveJob
from miner.api.samples import GpuSample
from miner.cli.render.jobs import sparkline
from miner.jobs.figures import (
    MAX_GROWING_POINTS,
    STORED_POINTS,
    RunFigures,
    loss_line,
    read_figures,
    relative_gain,
)
from miner.jobs.folder import AttemptFolder
from miner.store.attempts import StoredFigures, figures_of, mean_utilization
from tests.core.builders import plan
from tests.miner.jobs.harness import JobsHarness, Trainer


def step(number: int, loss: float = 1.0, **more: float | int | None) -> StepEvent:
    return StepEvent.model_validate({"t": 1000.0 + number, "step": number, "loss": loss, **more})


def scored(number: int, value: float, best: bool = False) -> EvalEvent:
    return EvalEvent(t=1000.0 + number, score=HeldOutScore(value=value, step=number), best=best)


def added(*events: ProgressEvent) -> RunFigures:
    figures = RunFigures(plan())
    for event in events:
        figures.add(event)
    return figures


def test_speed_memory_and_scores_of_a_run_are_set_beside_what_its_plan_expected() -> None:
    expected = 1024 * 32 / 9.1
    steps = [
        step(n, tokens_s=0.9 * expected, mfu=0.25, wait=0.02, memory_bytes=n * 10**9) for n in range(1, 41)
    ]
    run = added(scored(0, 2.0), *steps, scored(20, 1.5, best=True), scored(40, 1.6))
    found = run.snapshot(seconds=400.0, utilization=0.93).figures
    assert (found.steps, found.seconds, found.utilization) == (40, 400.0, 0.93)
    assert found.efficiency == pytest.approx(0.9)
    assert (found.mfu, found.wait) == (pytest.approx(0.25), pytest.approx(0.02))
    assert (found.memory_bytes, found.memory_estimate_bytes) == (40 * 10**9, 16_060_522_496)
    assert (found.base, found.best, found.metric, found.gain) == (2.0, 1.5, "eval_loss", 0.25)
    live = LiveJob(1, "t", "training")
    run.show(live)
    assert live.efficiency == pytest.approx(0.9)
    assert (live.base_score, live.memory_estimate_bytes) == (2.0, 16_060_522_496)


def test_what_a_backend_does_not_report_stays_unknown_and_its_own_gpus_say_how_much_memory() -> None:
    run = added(step(0), step(50))
    assert run.snapshot().figures.model_dump(exclude_none=True) == {
        "steps": 50,
        "memory_estimate_bytes": 16_060_522_496,
    }
    run.gpu_memory = 30 * 10**9
    run.add(step(51))
    assert run.snapshot().figures.memory_bytes == 30 * 10**9


def test_the_untouched_model_is_no_best_of_a_training() -> None:
    live = LiveJob(1, "t", "training")
    run = added(scored(0, 2.0))
    run.show(live)
    assert (live.base_score, live.best_score) == (2.0, None)
    run.add(scored(10, 2.5, best=True))
    run.show(live)
    assert (live.base_score, live.best_score) == (2.0, 2.5)


def test_a_plan_for_a_cpu_is_no_measure_of_its_speed() -> None:
    run = RunFigures(plan(gpus=GpuSet(kind=CPU, count=1)))
    for number in range(20):
        run.add(step(number, tokens_s=10.0))
    live = LiveJob(1, "t", "training")
    run.show(live)
    assert (live.tokens_s, live.efficiency, run.snapshot().figures.efficiency) == (10.0, None, None)


def test_a_curve_is_bounded_while_it_grows_and_keeps_its_spikes() -> None:
    run = added(*(step(n, loss=9.0 if n == 5_123 else 1 + n % 7 / 7) for n in range(1, 12_000)))
    assert len(run.curves.steps) <= MAX_GROWING_POINTS
    shown = run.snapshot(points=STORED_POINTS).curves["steps"]
    assert len(shown["step"]) <= STORED_POINTS
    assert shown["loss"][shown["step"].index(5_123)] == 9.0
    assert (shown["step"][0], shown["step"][-1]) == (1, 11_999)
    assert max(after - before for before, after in pairwise(shown["step"])) < 12_000 / 20


def test_a_training_that_goes_back_to_a_checkpoint_continues_its_curve_from_there() -> None:
    run = added(step(1), step(2), scored(2, 1.0), step(3), step(4), scored(4, 0.5), step(3, loss=7.0))
    assert run.curves.steps == [1, 2, 3]
    assert run.curves.columns["loss"][-1] == 7.0
    assert [event.score.step for event in run.curves.evals] == [2]


def test_the_first_steps_after_every_start_do_not_count_as_speed() -> None:
    def started_at(first: int) -> list[StepEvent]:
        return [step(first + n, tokens_s=1.0 if n < 5 else 1000.0) for n in range(20)]

    run = added(*started_at(101), *started_at(111))  # resumed, and once more within the attempt
    assert run.snapshot().figures.tokens_s == 1000.0


def test_a_gain_is_relative_to_the_base_in_the_direction_of_its_metric() -> None:
    def score(value: float, lower: bool = True) -> HeldOutScore:
        return HeldOutScore(value=value, step=1, lower_is_better=lower)

    assert relative_gain(score(2.0), score(1.6)) == pytest.approx(0.2)
    assert relative_gain(score(2.0, lower=False), score(2.5, lower=False)) == pytest.approx(0.25)
    assert relative_gain(score(-1.0, lower=False), score(-0.5, lower=False)) == pytest.approx(0.5)
    assert relative_gain(score(0.0), score(1.0)) is None
    assert relative_gain(score(-1e308), score(1e308)) is None
    assert relative_gain(None, score(1.0)) is None


@pytest.mark.parametrize(
    ("goal", "base", "best", "lower", "missed"),
    [
        (GoalPlan(loss=0.064), 0.1, 0.05, True, False),
        (GoalPlan(loss=0.064), 0.1, 0.064, True, True),
        (GoalPlan(gain=0.15), 2.0, 1.7, True, False),
        (GoalPlan(gain=0.15), 2.0, 1.8, True, True),
        (GoalPlan(loss=0.064, gain=0.15), 2.0, 1.0, True, True),
        (GoalPlan(loss=0.064), 1.0, 2.0, False, None),  # a reward is no loss
        (GoalPlan(gain=0.15), 1.0, 2.0, False, False),
        (GoalPlan(gain=0.15), 0.0, 2.0, False, None),
        (GoalPlan(loss=0.064), None, None, True, None),
    ],
)
def test_a_run_reaches_or_misses_the_goal_of_its_plan(
    goal: GoalPlan, base: float | None, best: float | None, lower: bool, missed: bool | None
) -> None:
    run = RunFigures(plan(goal=goal))
    for number, value in ((0, base), (5, best)):
        if value is not None:
            score = HeldOutScore(value=value, step=number, lower_is_better=lower)
            run.add(EvalEvent(t=1.0, score=score))
    figures = run.snapshot().figures
    assert figures.target_missed is missed
    ends = {True: "not reached", False: "reached", None: "not measured"}
    assert figures.target_text == f"{goal}: {ends[missed]}"
    assert RunFigures(plan()).snapshot().figures.target_text == ""


def test_numbers_that_overflow_are_no_figures() -> None:
    run = added(step(10**300), step(5, memory_bytes=10**300))
    assert run.snapshot().figures.steps == 0
    events = [step(n, tokens_s=1.7e308, samples_s=1.7e308, mfu=1.7e308) for n in range(10, 20)]
    found = added(*events).snapshot().figures
    assert (found.tokens_s, found.efficiency, found.mfu) == (None, None, None)
    assert json.loads(found.model_dump_json())["steps"] == 19
    extreme = added(*(step(n, loss=(-1) ** n * 1.7e308) for n in range(200))).snapshot()
    assert len(sparkline(loss_line(extreme.curves))) <= 40
    reported = RunResult(end=RunEnd.FINISHED, submission=True, memory_bytes=10**300, tokens_s=1.7e308)
    assert added().snapshot(result=reported).figures.memory_bytes is None


def test_a_progress_file_is_read_again_only_when_it_has_changed(tmp_path: Path) -> None:
    folder = AttemptFolder(tmp_path / "attempt_1")
    folder.create()
    folder.progress.write_bytes(b"".join(encode_event(step(n)) for n in range(1, 100)))
    first = read_figures(folder)
    assert first.snapshot().figures.steps == 99
    assert read_figures(folder) is first
    with folder.progress.open("ab") as file:
        file.write(encode_event(step(100)))
    assert read_figures(folder).snapshot().figures.steps == 100


async def stored(harness: JobsHarness, job: int) -> list[StoredFigures]:
    return list((await harness.store.read(figures_of, job)).values())


async def test_figures_and_curves_of_an_attempt_are_stored_at_its_end(harness: JobsHarness) -> None:
    harness.services.samples.add([GpuSample(at=2e10, gpu="0", utilization=0.8, memory_used=123)])
    job = await harness.start()
    await harness.over_within(job)
    (kept,) = await stored(harness, job)
    figures, curves = json.loads(kept.figures), json.loads(kept.curves)
    assert (figures["steps"], figures["utilization"], figures["memory_bytes"]) == (5, 0.8, 123)
    assert curves["steps"]["step"] == [1, 2, 3, 4, 5]
    assert curves["steps"]["loss"] == [1.0] * 5


async def test_an_attempt_that_nobody_watched_to_its_end_is_read_from_its_progress_file(
    harness: JobsHarness,
) -> None:
    async def trains(trainer: Trainer) -> None:
        trainer.step(7)
        await trainer.wait_for_stop()

    harness.backend.scripts = [trains]
    job = await harness.start()
    live = harness.jobs.live(job)
    assert live is not None
    await harness.until(lambda: live.step == 7)
    await harness.jobs.cancel(job)
    await harness.over_within(job)
    (kept,) = await stored(harness, job)
    assert json.loads(kept.figures)["steps"] == 7


async def test_utilisation_is_the_mean_of_its_own_gpus_while_it_ran(harness: JobsHarness) -> None:
    def rollup(
        db: sqlite3.Connection, period: int, at: int, gpu: str, samples: int, share: float | None
    ) -> None:
        db.execute(
            "INSERT INTO gpu_rollups (period, at, gpu, busy, samples, utilization) VALUES (?, ?, ?, 1, ?, ?)",
            (period, at, gpu, samples, share),
        )

    for row in (
        (60, 0, "0", 12, 0.1),  # before it began
        (60, 600, "0", 12, 0.9),
        (60, 660, "0", 4, 0.5),
        (60, 660, "1", 12, None),
        (60, 660, "2", 12, 0.0),  # of another job
        (3600, 7200, "1", 100, 0.7),
    ):
        await harness.store.write(rollup, *row)
    assert await harness.store.read(mean_utilization, ("0", "1"), 600.0, 720.0) == pytest.approx(0.8)
    # The minutes are pruned by now: the hours are there.
    assert await harness.store.read(mean_utilization, ("1",), 7200.0, 10_800.0) == pytest.approx(0.7)
    assert await harness.store.read(mean_utilization, ("1",), 20_000.0, 30_000.0) is None
