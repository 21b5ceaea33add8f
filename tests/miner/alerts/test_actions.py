"""A played training is asked for smaller passes and pauses, answers, and gets better or worse by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.planning.budget import Concession, conceded
from core.planning.conditions import LearnedBounds
from core.planning.plan import TrainingPlan
from core.runs.progress import ControlEvent
from core.runs.run_files import RunControl, read_control
from miner.alerts.actions import LEAST_DUTY, larger_micro, smaller_micro
from miner.alerts.metrics import LiveMeasurements
from miner.alerts.request_watch import RequestWatch
from miner.alerts.rules import LiveAlertRules
from miner.alerts.service import AlertService
from miner.api.jobs import LiveJob
from miner.api.samples import GpuSample
from miner.fleet.sampler import SampleHistory
from miner.jobs.folder import AttemptFolder
from miner.jobs.progress import RunProgress
from miner.jobs.running_training import RunningTraining
from miner.observe.metrics import Metrics
from miner.store import alerts as store_alerts
from miner.store.actions import ActionOutcome, ActionRow, actions_of_job, micro_of_next_attempt
from miner.store.events import EventFilter, list_events
from miner.store.jobs import record_start
from miner.store.store import Store
from tests.core.builders import plan
from tests.miner.store.rows import start_request

QUICK = "settle: 30s"
RULES = f"""
rules:
  gpu-memory: {{for: 0s, when: {{over: 4s}}, act: {{{QUICK}}}}}
  gpu-hot: {{for: 0s, when: {{over: 5s}}, act: {{{QUICK}, times: 4}}}}
  slow-training: {{for: 0s, when: {{over: 10s, least: 1}}, act: {{{QUICK}}}}}
"""
Obeys = Callable[[RunControl], ControlEvent | None]


def plan_with(micro: int, accumulation: int) -> TrainingPlan:
    made = plan()
    batch = made.batch.model_copy(update={"micro": micro, "accumulation": accumulation})
    return made.model_copy(update={"batch": batch})


class Stage:
    """A job with one training on the GPU g0, and the service that watches it."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store, self.folder, self.now = store, folder, 10_000.0
        self.memory, self.temperature, self.tokens_s, self.loss = 0.8, 60.0, 1000.0, 2.0
        self.efficiency: float | None = 0.95
        self.samples = SampleHistory()
        file = folder / "alerts.yaml"
        file.write_text(RULES)
        self.plan = plan_with(16, 4)
        self.progress = RunProgress(self.now, first_step_at=self.now)
        self.live = LiveJob(1, "t1", "training", stage="train", attempt=1, gpus=("g0",))
        self.attempt = AttemptFolder(folder / "attempt_1")
        self.attempt.path.mkdir(exist_ok=True)
        self.training: RunningTraining | None = self.running()
        self.rules = LiveAlertRules(file, folder / "last-good.json", lambda *_: None)
        self.service = self.restarted()
        #: How the training answers; None: not at all.
        self.obeys: Obeys = self.answer
        self._answered = 0

    def begin(self, made: TrainingPlan) -> None:
        self.plan, self.training = made, None
        self.training = self.running()

    def running(self) -> RunningTraining:
        return RunningTraining(self.live, 1, self.now, self.plan, self.attempt, self.progress)

    def restarted(self) -> AlertService:
        live = LiveMeasurements(
            self.samples, RequestWatch(), lambda: [self.training] if self.training else []
        )
        return AlertService(self.store, Metrics(), self.rules, live, clock=lambda: self.now)

    def answer(self, control: RunControl, **changes: Any) -> ControlEvent:
        micro = control.micro or self.plan.batch.micro
        answer = {"applied": True, "micro": micro, "duty": control.duty, **changes}
        return ControlEvent(t=self.now, number=control.number, **answer)

    async def play(self, seconds: float, then: Callable[[], None] = lambda: None) -> None:
        for _ in range(int(seconds / 5)):
            self.now += 5.0
            self.samples.add(
                [
                    GpuSample(
                        self.now,
                        "g0",
                        memory_used=round(self.memory * 1000),
                        memory_total=1000,
                        temperature=self.temperature,
                    )
                ]
            )
            self.live.tokens_s, self.live.loss, self.live.efficiency = (
                self.tokens_s,
                self.loss,
                self.efficiency,
            )
            await self.service.evaluate()
            control = read_control(self.attempt.control)
            if control is not None and control.number > self._answered and (event := self.obeys(control)):
                self._answered = control.number
                self.progress.add(event, self.now)
                then()

    def rows(self) -> list[ActionRow]:
        return self.store.read_now(actions_of_job, 1)

    def outcomes(self) -> list[ActionOutcome]:
        return [row.outcome for row in self.rows()]


@pytest.fixture
async def stage(store: Store, tmp_path: Path) -> Stage:
    await store.write(record_start, "v1", start_request(), 9_000.0)
    return Stage(store, tmp_path)


async def test_memory_that_fills_makes_passes_smaller_and_the_alert_is_resolved(stage: Stage) -> None:
    await stage.play(20)
    assert stage.rows() == []
    stage.memory = 0.95
    await stage.play(30, then=lambda: setattr(stage, "memory", 0.84))
    await stage.play(60)
    (row,) = stage.rows()
    assert (row.outcome, row.before["micro"], row.after["micro"]) == (ActionOutcome.KEPT, 16, 13)
    assert (row.before["value"], row.after["value"]) == (0.95, 0.84)
    assert row.detail == "it helped, tokens per second +0 %"
    (alert,) = stage.store.read_now(store_alerts.newest_alerts, 9)
    assert alert.resolved_at is not None
    texts = [event.text for event in stage.store.read_now(list_events, EventFilter(kinds=["rule_action"]))]
    assert texts[0] == "attempt 1, gpu-memory: micro 16 → 13: asked"
    assert texts[-1].endswith("micro 16 → 13: kept, it helped, tokens per second +0 %")
    assert stage.live.gpus == ("g0",)


async def test_what_made_things_worse_is_undone_and_not_tried_again(stage: Stage) -> None:
    await stage.play(60)
    stage.memory = 0.95
    await stage.play(15, then=lambda: setattr(stage, "tokens_s", 600.0))
    await stage.play(600)
    (row,) = stage.rows()
    assert (row.outcome, row.detail) == (
        ActionOutcome.UNDONE,
        "tokens per second -40 %, more than the action should cost",
    )
    assert stage.progress.control.micro == 16


async def test_smaller_passes_that_do_not_help_are_kept_and_not_repeated(stage: Stage) -> None:
    stage.memory = 0.95
    await stage.play(300)
    stage.training, stage.service = stage.running(), stage.restarted()
    await stage.play(300)
    assert [(row.outcome, row.detail) for row in stage.rows()] == [
        (ActionOutcome.KEPT, "it did not help, tokens per second +0 %")
    ]


async def test_a_loss_that_rises_undoes_an_action_although_it_helped(stage: Stage) -> None:
    await stage.play(60)
    stage.memory = 0.95

    def helped_and_harmed() -> None:
        stage.memory, stage.loss = 0.85, 4.0

    await stage.play(90, then=helped_and_harmed)
    assert [(row.outcome, row.detail) for row in stage.rows()] == [
        (ActionOutcome.UNDONE, "the loss rose from 2 to 4")
    ]


@pytest.mark.parametrize(
    ("answers", "detail"), [(True, "kohya cannot"), (False, "the training does not answer")]
)
async def test_smaller_passes_that_an_engine_does_not_make_are_left_to_the_next_attempt(
    stage: Stage, answers: bool, detail: str
) -> None:
    def refuse(control: RunControl) -> ControlEvent | None:
        return stage.answer(control, applied=False, micro=16, text=detail) if answers else None

    stage.obeys, stage.memory = refuse, 0.95
    await stage.play(900)
    assert [(row.outcome, row.detail) for row in stage.rows()] == [(ActionOutcome.NEXT_ATTEMPT, detail)]
    assert stage.store.read_now(micro_of_next_attempt, 1) == 13


async def test_a_hot_gpu_is_paused_within_bounds_and_gets_its_time_back(stage: Stage) -> None:
    stage.temperature = 92.0
    await stage.play(600)
    duties = [row.after.get("duty") for row in stage.rows()]
    assert duties == [0.97, 0.94, 0.91, 0.88]  # so often for an attempt
    assert LEAST_DUTY < 0.88
    stage.temperature = 70.0
    await stage.play(600)
    assert stage.outcomes()[4:] == [ActionOutcome.RETURNED] * 4
    assert stage.progress.control.duty == 1.0


async def test_larger_passes_are_asked_for_until_the_target_is_reached(stage: Stage) -> None:
    stage.begin(plan_with(2, 8))
    stage.efficiency, stage.memory = 0.6, 0.5

    def faster() -> None:
        stage.efficiency, stage.tokens_s = 0.9, 1300.0

    await stage.play(60, then=faster)
    stage.tokens_s = 1400.0
    await stage.play(900)
    assert [row.after["micro"] for row in stage.rows()] == [3, 4]


async def test_a_training_that_is_slow_because_of_pauses_does_not_get_larger_passes(stage: Stage) -> None:
    stage.begin(plan_with(2, 8))
    stage.temperature = 92.0
    await stage.play(60)
    stage.efficiency, stage.memory, stage.temperature = 0.6, 0.5, 83.0
    await stage.play(60)
    assert {row.rule for row in stage.rows()} == {"gpu-hot"}


SMALLER = conceded("micro_batch_size", 4, 2, "out of memory in train")


@pytest.mark.parametrize(
    ("memory", "oom_steps", "outcome", "detail"),
    [
        (0.86, (), ActionOutcome.REFUSED, "86 % of the memory is in use"),
        (
            0.5,
            (conceded("micro_batch_size", 4, 2, ""),),
            ActionOutcome.REFUSED,
            "memory ran out in an attempt before",
        ),
        (0.5, (), ActionOutcome.UNDONE, "tokens per second +0 %: a larger pass is not faster"),
    ],
)
async def test_larger_passes_are_not_for_a_full_gpu_nor_kept_where_they_are_not_faster(
    stage: Stage, memory: float, oom_steps: tuple[Concession, ...], outcome: ActionOutcome, detail: str
) -> None:
    plan = plan_with(2, 8)
    conditions = replace(plan.conditions, learned=LearnedBounds(steps=oom_steps))
    stage.begin(plan.model_copy(update={"conditions": conditions}))
    stage.efficiency, stage.memory = 0.6, memory
    await stage.play(300)
    assert [(row.outcome, row.detail) for row in stage.rows()] == [(outcome, detail)]


async def test_a_restart_goes_on_with_an_action_that_is_not_judged(stage: Stage) -> None:
    stage.memory = 0.95
    await stage.play(15)
    assert stage.outcomes() == [ActionOutcome.APPLIED]
    stage.training, stage.service = stage.running(), stage.restarted()
    stage.memory = 0.8
    await stage.play(90)
    assert stage.outcomes() == [ActionOutcome.KEPT]
    stage.memory = 0.95
    await stage.play(30)
    control = read_control(stage.attempt.control)
    assert control.number == 2


async def test_an_attempt_that_ends_closes_its_action(stage: Stage) -> None:
    stage.memory = 0.95
    await stage.play(15)
    stage.training = None
    await stage.play(60)
    (row,) = stage.rows()
    assert (row.outcome, row.detail) == (ActionOutcome.KEPT, "the attempt ended before it was judged")


def test_passes_are_shared_out_evenly() -> None:
    assert [smaller_micro(16, micro, -0.1) for micro in (16, 8, 2)] == [8, 6, 1]
    assert [larger_micro(64, micro, 0.2) for micro in (1, 8, 16, 64)] == [2, 10, 22, None]
