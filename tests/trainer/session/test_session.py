"""Whole trainings in simulated time: the end, the rate, the evaluations, the submission."""

# Once: it needs nothing of the training stack.

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.domain.evaluation import RewardScore
from core.planning.budget import TimelinePhase
from core.planning.plan import PlateauPlan, StepsPlan
from core.runs.progress import EvalEvent, NoteEvent, SubmissionEvent
from core.runs.run_files import HeldOutScore, RunEnd
from tests.trainer.session.simulated import START, Simulation, plan_of
from trainer.session.failures import NotANumber
from trainer.session.ranks import Communicator
from trainer.session.submission import submission_kind


def simulation(folder: Path, **changes: Any) -> Simulation:
    given = {"plan": plan_of(500, 500, 1.0), "seconds": 2000.0, "step_s": lambda step: 1.0, **changes}
    return Simulation(folder, **given)


def test_with_time_enough_every_step_of_the_wish_is_done(tmp_path: Path) -> None:
    run = simulation(tmp_path)
    outcome = run.run()
    assert (outcome.end, outcome.steps) == (RunEnd.FINISHED, 500)
    assert outcome.best is not None
    assert outcome.best.step == 500


@pytest.mark.parametrize("slower", [1.5, 3.0, 10.0])
def test_a_slow_machine_does_fewer_steps_and_the_rate_has_decayed_at_the_end(
    tmp_path: Path, slower: float
) -> None:
    run = simulation(tmp_path, step_s=lambda step: slower)
    run.seconds = 500.0
    run.session.clock.end_by = START + 500
    outcome = run.run()
    assert outcome.end is RunEnd.CLOCK
    assert run.left >= 0
    assert run.left < 40
    assert run.rates[-1] < 0.05
    assert max(run.rates) == pytest.approx(1.0)


def test_a_fast_machine_does_more_than_the_plan_dared_up_to_the_wish(tmp_path: Path) -> None:
    run = simulation(tmp_path, plan=plan_of(50, 400, 10.0), step_s=lambda step: 0.5, seconds=600.0)
    assert run.run().steps == 400
    assert run.rates[-1] < 0.02


@given(st.integers(0, 2**32), st.floats(20, 3000), st.floats(0.01, 20))
def test_the_last_save_is_over_in_time_however_unsteady_the_steps_are(
    tmp_path_factory: pytest.TempPathFactory, seed: int, seconds: float, step_s: float
) -> None:
    chance = random.Random(seed)
    plan = plan_of(chance.randint(1, 2000), 3000, step_s * chance.uniform(0.1, 10))
    run = simulation(
        tmp_path_factory.mktemp("run"),
        plan=plan,
        seconds=seconds,
        step_s=lambda step: step_s * chance.uniform(0.7, 1.3),
        eval_s=chance.uniform(0.01, 0.02 * seconds),
        submit_s=chance.uniform(0.01, 0.01 * seconds),
        curve=lambda step: chance.random(),
    )
    outcome = run.run(most=20_000)
    # A step that is longer than what is left cannot be cut in two.
    assert outcome.steps > 0
    assert run.left >= -1.5 * step_s - 1e-6
    assert submission_kind(run.folder / "submission") == "adapter"
    assert run.session.submission.score == outcome.best


def test_evaluations_take_a_tenth_of_the_time_at_most(tmp_path: Path) -> None:
    run = simulation(tmp_path, plan=plan_of(2000, 2000, 1.0), seconds=3000.0, eval_s=30.0)
    run.run()
    assert 2 <= len(run.scored) * 30 / 30 <= 0.12 * 3000 / 30 + 2


def test_a_finish_that_was_guessed_far_too_long_does_not_end_a_training_before_it_began(
    tmp_path: Path,
) -> None:
    """The plan reckons with minutes for saving; a little model takes milliseconds, and seconds are left."""
    plan = plan_of(100, 100_000, 0.1)
    slow = plan.time.model_copy(
        update={"phases": (*plan.time.phases, TimelinePhase(name="save", seconds=3000.0))}
    )
    run = simulation(
        tmp_path,
        plan=plan.model_copy(update={"time": slow}),
        seconds=20.0,
        step_s=lambda step: 0.1,
        eval_s=0.01,
        submit_s=0.01,
    )
    assert run.run().steps > 120
    assert run.left >= 0
    assert run.rates[-1] < 0.1


def test_the_first_submission_comes_early(tmp_path: Path) -> None:
    run = simulation(tmp_path)
    run.run()
    assert run.submitted[0] - START < 0.05 * 500


def test_only_better_models_replace_the_submission(tmp_path: Path) -> None:
    run = simulation(tmp_path, curve=lambda step: abs(step - 200) / 200 + 1)
    outcome = run.run()
    assert outcome.best is not None
    kept = run.session.submission.score
    assert kept == outcome.best
    assert abs(kept.step - 200) <= 40
    said = [event.score for event in run.events if isinstance(event, SubmissionEvent)]
    values = [score.value for score in said if score is not None]
    assert values == sorted(values, reverse=True)


def test_the_base_is_scored_before_the_first_step_and_never_submitted(tmp_path: Path) -> None:
    run = simulation(tmp_path, stop_at=0)
    run.session.begin()
    assert run.session.best.base is not None
    assert run.session.best.base.step == 0
    assert not run.session.submission.exists
    first = next(event for event in run.events if isinstance(event, EvalEvent))
    assert not first.best


def test_without_held_out_rows_the_newest_model_is_submitted(tmp_path: Path) -> None:
    run = simulation(tmp_path, curve=None, plan=plan_of(200, 200, 1.0, eval_rows=0))
    outcome = run.run()
    assert outcome.best is None
    assert len(run.submitted) >= 5
    assert run.session.submission.exists


def test_asked_to_stop_it_saves_what_it_has_and_ends_soon(tmp_path: Path) -> None:
    run = simulation(tmp_path, stop_at=77)
    outcome = run.run()
    assert outcome.end is RunEnd.STOPPED
    assert outcome.steps <= 77 + 1
    assert run.session.submission.score is not None
    assert run.session.submission.score.step == outcome.steps


@pytest.mark.parametrize(("stop_at", "scored"), [(3000, True), (3, False)])
def test_asked_to_stop_a_long_evaluation_is_left_out(tmp_path: Path, stop_at: int, scored: bool) -> None:
    """What was submitted before stays; before the first evaluation the state is submitted without a score."""
    run = simulation(tmp_path, eval_s=60.0, seconds=20_000.0, plan=plan_of(5000, 5000, 1.0), stop_at=stop_at)
    outcome = run.run()
    assert (outcome.end, outcome.steps) == (RunEnd.STOPPED, pytest.approx(stop_at, abs=1))
    assert run.session.step not in run.scored
    assert run.session.submission.exists
    assert (run.session.submission.score is not None) is scored


def test_patience_ends_a_training_that_no_longer_improves(tmp_path: Path) -> None:
    plan = plan_of(500, 500, 1.0)
    steps = StepsPlan(**{**plan.steps.model_dump(), "early_stopping_patience": 3})
    run = simulation(tmp_path, plan=plan.model_copy(update={"steps": steps}), curve=lambda step: 1 + step)
    outcome = run.run()
    assert outcome.end is RunEnd.EARLY
    assert outcome.steps < 300


def test_a_plateau_lowers_the_rate_of_the_steps_that_follow(tmp_path: Path) -> None:
    plan = plan_of(500, 500, 1.0).model_copy(update={"plateau": PlateauPlan(factor=0.5, patience=1)})
    flat = simulation(tmp_path / "flat", plan=plan, curve=lambda step: 1.0)
    falls = simulation(tmp_path / "falls", plan=plan)
    flat.run()
    falls.run()
    assert flat.rates[250] < 0.5 * falls.rates[250]


@pytest.mark.parametrize(
    ("losses", "end"),
    [([1.0] * 100 + [math.nan] * 3, RunEnd.NAN), ([1.0, math.inf, 1.0, math.nan, 1.0], None)],
    ids=["a broken model", "one bad batch"],
)
def test_losses_that_are_no_numbers_in_a_row_end_the_run_and_keep_the_submission(
    tmp_path: Path, losses: list[float], end: RunEnd | None
) -> None:
    run = simulation(tmp_path)
    run.session.begin()
    for loss in losses:
        run.time.pass_by(1.0)
        run.session.optimizer_stepped()
        run.session.logged(loss, 1.0)
        run.session.stepped(1.0)
    assert (run.session.stop and run.session.stop.end) is end
    if end is not None:
        assert run.session.finish().end is end
        assert run.session.submission.exists


def test_a_model_whose_score_is_no_number_is_broken(tmp_path: Path) -> None:
    run = simulation(tmp_path, curve=lambda step: math.nan if step > 50 else 1.0)
    with pytest.raises(NotANumber, match="score is nan"):
        run.run()


def test_a_second_attempt_does_not_replace_a_better_submission_of_the_first(tmp_path: Path) -> None:
    simulation(tmp_path, curve=lambda step: 1.0 / (1 + step)).run()
    second = simulation(tmp_path, curve=lambda step: 5.0)
    second.run()
    assert second.submitted == []
    assert second.session.submission.score is not None
    assert second.session.submission.score.value < 0.01


def test_on_other_held_out_rows_what_counts_is_the_gain_over_the_base(tmp_path: Path) -> None:
    """A second attempt has less time, so it may hold out fewer rows: another split."""

    def attempt(base: float, trained: float) -> Simulation:
        run = simulation(tmp_path, curve=lambda step: trained if step else base)
        run.run()
        return run

    attempt(2.0, 1.0)
    assert attempt(1.0, 0.5).submitted == [], "a lower loss, but less gained"
    assert len(attempt(3.0, 1.5).submitted) == 1, "a higher loss, but more gained"
    notes = [event for event in attempt(3.0, 1.6).events if isinstance(event, NoteEvent)]
    moved = [note.text for note in notes if note.kind == "score"]
    assert len(moved) == 2, "the last attempt had the rows of the one before"
    assert moved[0].endswith("had 1 on rows of which the base had 2: 0 on these")


def test_a_second_attempt_that_is_never_better_ends_all_the_same(tmp_path: Path) -> None:
    simulation(tmp_path, curve=lambda step: 0.1).run()
    second = simulation(
        tmp_path, curve=lambda step: 5.0, plan=plan_of(10, 100_000, 0.01), seconds=30.0, eval_s=0.1
    )
    outcome = second.run(most=1000)
    assert outcome.end is RunEnd.CLOCK
    assert second.left >= -1.5


def test_a_resumed_training_keeps_the_schedule(tmp_path: Path) -> None:
    whole = simulation(tmp_path / "whole")
    whole.run()
    first = simulation(tmp_path / "first")
    first.run(most=200)
    second = simulation(tmp_path / "second")
    second.session.restore(first.session.state())
    second.time.now = first.time.now
    outcome = second.run()
    assert outcome.steps == 500
    assert outcome.base == first.session.best.base
    joined = first.rates + second.rates
    assert len(joined) == len(whole.rates)
    assert joined == [pytest.approx(rate, abs=0.02) for rate in whole.rates]


def test_checkpoints_fall_on_evaluations_and_never_eat_up_the_finish(tmp_path: Path) -> None:
    run = simulation(tmp_path, save_s=2.0)
    run.run()
    assert run.saved
    assert set(run.saved) <= set(run.scored)


def test_a_long_warm_up_of_the_first_evaluation_is_expected_of_none_that_follows(tmp_path: Path) -> None:
    """Else a short training hardly evaluates, and keeps ten seconds free for an end that takes one."""
    run = Simulation(tmp_path, plan_of(200, 200, 0.1), seconds=30, step_s=lambda step: 0.1, eval_s=0.3)
    run.warm_s = 8.0
    outcome = run.run()
    assert len(run.scored) >= 5
    assert run.left < 3
    assert outcome.steps > 130


PARTS = RewardScore(means=(3.0, 0.5), base=(1.0, 0.25), weights=(0.7, 0.3), kl=0.2)


@dataclass(frozen=True)
class First(Communicator):
    """The first of several ranks; keeps what it sends to the others."""

    sent: list[float] = field(default_factory=list)

    def from_first(self, values: Sequence[float]) -> list[float]:
        self.sent[:] = values
        return list(values)


@dataclass(frozen=True)
class Second(Communicator):
    """A rank that receives what the first one has read."""

    sent: list[float] = field(default_factory=list)

    def from_first(self, values: Sequence[float]) -> list[float]:
        assert len(values) == len(self.sent)
        return self.sent


@pytest.mark.parametrize("parts", [PARTS, None])
def test_all_ranks_know_what_an_earlier_attempts_score_was_made_of(tmp_path: Path, parts: Any) -> None:
    """A rank that compared by the value alone would order something else, and the others wait for ever."""
    first = simulation(tmp_path)
    first.run()
    assert first.session.host.scorer is not None
    first.session.host.scorer.rewarded = parts and parts.model_copy(update={"means": (2.0, 0.1), "kl": 0.0})
    earlier = HeldOutScore(value=0.4, metric="eval_loss", step=7, rewarded=parts)
    first.session.ranks = ranks = First()
    assert first.session._agree_on_score(earlier) == earlier
    first.session.ranks = Second(1, 2, sent=ranks.sent)
    assert first.session._agree_on_score(None) == earlier


def test_a_score_of_other_rewards_is_not_compared(tmp_path: Path) -> None:
    run = simulation(tmp_path)
    run.run()
    assert run.session.host.scorer is not None
    run.session.host.scorer.rewarded = PARTS.model_copy(
        update={"means": (1.0,), "base": (1.0,), "weights": (1.0,)}
    )
    earlier = HeldOutScore(value=0.4, metric="eval_loss", step=7, rewarded=PARTS)
    assert run.session._agree_on_score(earlier) is None
    assert run.session._agree_on_score(HeldOutScore(value=0.4, metric="eval_loss", step=7)) is None
