"""What follows the last evaluation, in simulated time: means of the best states, and held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from core.planning.plan import LastStretchPlan, SoupPlan
from core.runs.progress import EvalEvent, NoteEvent, StageEvent, SubmissionEvent
from core.runs.run_files import RunEnd
from tests.doubles.each import each
from tests.trainer.session.simulated import FakeStore, FakeStretcher, Simulation, plan_of, scored
from trainer.session.last_stretch import divided
from trainer.session.soup import BestStates, Soup, greedy_soup

SOUP, STRETCH = SoupPlan(members=4, share=0.05), LastStretchPlan(rate=0.25, share=0.1)


@dataclass
class Kept:
    """Where states are put aside; says which are there."""

    room: int = 100
    there: list[int] = field(default_factory=list)

    def keep(self, number: int) -> bool:
        if len(self.there) >= self.room:
            return False
        self.there.append(number)
        return True

    def drop(self, number: int) -> None:
        self.there.remove(number)

    def load(self, numbers: Sequence[int]) -> None:
        """Only a session loads."""

    def clear(self) -> None:
        self.there.clear()


def best_of(values: Sequence[float], most: int = 3, room: int = 100) -> BestStates:
    best = BestStates(Kept(room), most)
    for value in values:
        best.offer(scored(value))
    return best


def values_of(best: BestStates) -> list[float]:
    return [state.score.value for state in best.states]


def test_the_best_states_are_kept_and_no_more_of_them_than_asked() -> None:
    best = best_of([5, 3, 4, 6, 1, 2])
    assert values_of(best) == [1, 2, 3]
    assert isinstance(best.store, Kept)
    assert sorted(best.store.there) == sorted(state.number for state in best.states)


def test_where_there_is_no_room_for_more_a_better_state_takes_the_place_of_the_worst() -> None:
    best = best_of([5, 3], room=2)
    assert best.offer(scored(4)) is True
    assert best.offer(scored(9)) is None
    assert values_of(best) == [3, 4]
    assert best_of([5, 3], room=0).states == []


def soup_of(best: BestStates, scores: dict[tuple[int, ...], float], candidates: int = 100) -> Soup:
    left = iter(range(candidates))
    return greedy_soup(
        best.states,
        lambda numbers: scored(scores[numbers]),
        goes_on=lambda states: next(left, None) is not None,
    )


def test_a_state_joins_the_mean_only_if_that_scores_better_for_it() -> None:
    best = best_of([1.0, 1.1, 1.2, 1.3], most=4)
    soup = soup_of(best, {(1, 2): 0.9, (1, 2, 3): 0.95, (1, 2, 4): 0.8})
    assert (soup.numbers, soup.score.value) == ((1, 2, 4), 0.8)


def test_the_best_state_stays_where_no_mean_is_better_by_more_than_rounding() -> None:
    soup = soup_of(best_of([1.0, 1.1, 1.2]), {(1, 2): 0.99995, (1, 3): 1.0})
    assert (soup.numbers, soup.score.value) == ((1,), 1.0)


def test_of_a_mean_that_scores_nothing_and_of_those_without_time_nothing_is_taken() -> None:
    states, answers = best_of([1.0, 1.1, 1.2]).states, iter([None, scored(0.5)])
    assert greedy_soup(states, lambda numbers: next(answers), goes_on=lambda states: True).numbers == (1, 3)
    assert soup_of(best_of([1.0, 1.1, 1.2]), {(1, 2): 0.9, (1, 2, 3): 0.5}, candidates=1).numbers == (1, 2)


def test_every_few_rows_one_stays_out_with_its_near_duplicates() -> None:
    alone = divided(range(200), range(200))
    assert alone is not None
    assert alone.judges == list(range(0, 200, 5))
    doubled = [place // 2 for place in range(400)]
    read = range(0, 400, 2)  # an evaluation reads one of each two
    parts = divided(read, doubled)
    assert parts is not None
    assert len(parts.judges) == 40
    assert not {doubled[place] for place in parts.judges} & {doubled[place] for place in parts.trained}
    assert len(parts.trained) == 400 - 2 * 40


def test_a_cluster_too_large_to_stay_out_is_trained_on() -> None:
    parts = divided(range(300), [0] * 100 + list(range(100, 300)))
    assert parts is not None
    assert set(range(100)) <= set(parts.trained)
    assert len(parts.judges) == pytest.approx(60, abs=1), "the others make up for it"
    assert divided(range(300), [0] * 250 + list(range(250, 300))) is not None
    assert divided(range(300), [0] * 280 + list(range(280, 300))) is None, "twenty rows are no judges"
    assert divided(range(63), range(63)) is None


# — in a session


def simulation(folder: Path, soup: bool = True, stretch: bool = True, **changes: Any) -> Simulation:
    plan = plan_of(100, 100, 1.0).model_copy(
        update={"soup": SOUP if soup else None, "last_stretch": STRETCH if stretch else None}
    )
    run = Simulation(folder, **{"plan": plan, "seconds": 2000.0, "step_s": lambda step: 1.0, **changes})
    run.store, run.stretcher = FakeStore(run), FakeStretcher(run) if stretch else None
    return run


def notes(run: Simulation, kind: str) -> list[str]:
    return [event.text for event in run.events if isinstance(event, NoteEvent) and event.kind == kind]


def last_two(run: Simulation) -> tuple[int, int]:
    """The steps of the last two evaluations of the training itself."""
    return 100, max(step for step in run.scored if step < 100)


def last_two_are_better(steps: tuple[int, ...]) -> float:
    """Whatever a mean of more states gives, the last two together are the best."""
    return 0.001 if len(steps) == 2 else 0.002


def test_a_better_mean_is_submitted_and_is_what_the_outcome_says(tmp_path: Path) -> None:
    run = simulation(tmp_path, stretch=False, mean_score=last_two_are_better)
    outcome = run.run()
    assert outcome.best is not None
    assert (outcome.end, outcome.best.value) == (RunEnd.FINISHED, 0.001)
    assert run.session.submission.score == outcome.best
    assert run.store is not None
    assert run.written == run.store.loaded == last_two(run)
    assert len(run.store.kept) == SOUP.members
    before, after = run.recorded
    assert after == outcome
    assert before.best is not None
    assert before.best.step == 100
    assert before.best.value == pytest.approx(1 / 101)
    kinds = [event for event in run.events if isinstance(event, EvalEvent | SubmissionEvent)]
    written, last = kinds[-2:]
    assert isinstance(written, SubmissionEvent), "nobody hears of a model that is not there"
    assert isinstance(last, EvalEvent)
    assert (last.score, last.best) == (outcome.best, True)
    assert run.store.cleared
    assert len(notes(run, "soup")) == 3
    assert "soup" in [event.stage for event in run.events if isinstance(event, StageEvent)]


def test_without_a_better_mean_the_best_state_stays_the_submission(tmp_path: Path) -> None:
    run = simulation(tmp_path, stretch=False, mean_score=lambda steps: 1.0)
    outcome = run.run()
    assert outcome == run.recorded[0]
    assert run.session.submission.score == outcome.best
    assert run.written == ()


def test_a_mean_is_no_match_for_a_better_submission_of_an_earlier_attempt(tmp_path: Path) -> None:
    simulation(tmp_path, soup=False, stretch=False, curve=lambda step: 0.0001 if step else 1.0).run()
    run = simulation(tmp_path, mean_score=last_two_are_better)
    outcome = run.run()
    assert outcome.best is not None
    assert outcome.best.value == 0.0001
    assert run.submitted == []
    assert notes(run, "last-stretch") == [
        "held-out rows are not trained on: the best model is from an earlier launch"
    ]


@each("stop_at", [35, 100])
def test_asked_to_stop_nothing_follows(tmp_path: Path, stop_at: int) -> None:
    run = simulation(tmp_path / str(stop_at), stop_at=stop_at, mean_score=last_two_are_better)
    outcome = run.run()
    assert outcome.end is RunEnd.STOPPED
    assert run.recorded == []
    assert run.store is not None
    assert run.store.loaded == ()


def test_asked_to_stop_in_the_middle_the_mean_found_so_far_is_submitted_and_the_rest_left_out(
    tmp_path: Path,
) -> None:
    run = simulation(tmp_path, mean_score=last_two_are_better)
    run.session.stop_requested = lambda: bool(run.store and run.store.loaded)
    outcome = run.run()
    assert outcome.end is RunEnd.FINISHED
    assert outcome.best is not None
    assert outcome.best.value == 0.001
    assert len(notes(run, "soup")) == 1
    assert run.stretcher is not None
    assert run.stretcher.factors == []


def test_the_time_for_means_and_held_out_rows_is_kept_free_by_the_clock(tmp_path: Path) -> None:
    """Of 400 seconds the training takes fewer than it would; all candidates and the whole pass fit."""
    many, step = plan_of(5000, 5000, 0.5), {"step_s": lambda step: 0.5, "seconds": 400.0}
    update = {"soup": SOUP, "last_stretch": STRETCH}
    run = simulation(tmp_path / "with", plan=many.model_copy(update=update), eval_s=2.0, **step)
    run.mean_score = last_two_are_better
    outcome = run.run()
    plain = simulation(tmp_path / "without", plan=many, eval_s=2.0, **step).run()
    assert outcome.end is plain.end is RunEnd.CLOCK
    assert outcome.steps < plain.steps
    assert run.left >= 0
    assert len(notes(run, "soup")) == SOUP.members - 1
    assert run.stretcher is not None
    assert len(run.stretcher.factors) == run.stretcher.pass_steps


@each(("load_s", "writes"), [(3.0, True), (8.0, False)])
def test_states_that_load_slowly_make_the_end_no_later(tmp_path: Path, load_s: float, writes: bool) -> None:
    """What they take is only known when the first mean is there; then there may be no time to write it."""
    plan = plan_of(5000, 5000, 0.5).model_copy(update={"soup": SOUP})
    run = simulation(tmp_path / str(load_s), stretch=False, plan=plan, seconds=400.0, step_s=lambda step: 0.5)
    assert run.store is not None
    run.store.load_s, run.submit_s, run.mean_score = load_s, 4.0, last_two_are_better
    outcome = run.run()
    assert run.left >= 0
    assert bool(run.written) is writes
    assert run.session.submission.score == outcome.best


def test_evaluations_that_keep_nothing_leave_what_a_copy_takes_as_it_is(tmp_path: Path) -> None:
    run = simulation(tmp_path, soup=False, curve=lambda step: 1 + step / 100)
    assert run.store is not None
    run.store.keep_s = 5.0
    run.run()
    assert run.session.clock.load_s(1) == 5.0


def test_no_time_is_kept_for_what_there_is_no_room_for(tmp_path: Path) -> None:
    run = simulation(tmp_path)
    assert run.store is not None
    run.session.begin()
    before = run.session.clock.finish_s
    run.store.room = 0
    run.session.step = 1
    run.session.evaluate()
    assert run.session.clock.finish_s < before - 4
    assert notes(run, "soup") == ["there is room for 0 states of the weights beside the training"]


def test_the_last_stretch_begins_at_the_best_weights_and_is_submitted_with_their_score(
    tmp_path: Path,
) -> None:
    run = simulation(tmp_path, mean_score=last_two_are_better)
    run.session.peak = 2.0
    outcome = run.run()
    assert run.stretcher is not None
    assert run.stretcher.began == last_two(run)
    assert run.stretcher.factors == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1])
    assert outcome.best is not None
    assert outcome.best.value == 0.001
    assert run.session.submission.score == outcome.best
    [said] = notes(run, "last-stretch")
    assert said == (
        "5 steps on held-out rows; the rows that stayed out 1 → 0.99: submitted with the score from before"
    )


def test_asked_to_stop_after_the_last_evaluation_no_held_out_rows_are_trained_on(tmp_path: Path) -> None:
    run = simulation(tmp_path, soup=False)
    run.session.stop_requested = lambda: bool(run.recorded)
    assert run.run().end is RunEnd.FINISHED
    assert run.store is not None
    assert run.store.loaded == (), "not even the weights are read again"


def test_without_a_soup_it_begins_at_the_best_state_and_no_other_is_kept(tmp_path: Path) -> None:
    run = simulation(tmp_path, soup=False)
    writes = len(run.submitted)
    run.run()
    assert run.store is not None
    assert run.stretcher is not None
    assert run.stretcher.began == (100,)
    assert list(run.store.kept.values()) == [100]
    assert len(run.submitted) > writes


def test_a_stretch_that_is_worse_for_the_rows_that_stayed_out_is_not_submitted(tmp_path: Path) -> None:
    run = simulation(tmp_path, soup=False)
    assert run.stretcher is not None
    run.stretcher.gain = -0.001
    run.run()
    assert run.written == ()
    assert notes(run, "last-stretch")[0].endswith("not submitted")


@each(("best_at", "stretches"), [(100, True), (92, True), (70, False)])
def test_held_out_rows_are_trained_on_only_where_the_loss_fell_to_the_end(
    tmp_path: Path, best_at: int, stretches: bool
) -> None:
    run = simulation(tmp_path / str(best_at), soup=False, curve=lambda step: 1 + abs(step - best_at) / 100)
    run.run()
    assert run.stretcher is not None
    assert bool(run.stretcher.factors) is stretches
    assert bool(notes(run, "last-stretch")[0].startswith("held-out rows are not")) is not stretches


def test_a_pass_that_cannot_be_made_by_half_is_not_begun(tmp_path: Path) -> None:
    run = simulation(tmp_path, soup=False)
    assert run.stretcher is not None
    run.stretcher.pass_steps = 500
    run.run()
    assert run.stretcher.factors == []
    run = simulation(tmp_path / "more", soup=False)
    assert run.stretcher is not None
    run.stretcher.pass_steps = 300
    run.run()
    assert 150 <= len(run.stretcher.factors) < 200
    assert "submitted with the score from before" in notes(run, "last-stretch")[-1]
