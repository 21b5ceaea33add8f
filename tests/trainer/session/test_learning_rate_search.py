"""The search for a learning rate: which rate it ends with, what it costs, what it leaves behind."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from core.domain.evaluation import RewardScore
from core.domain.tasks import TaskType
from core.planning.plan import LrSearchPlan
from core.runs.progress import NoteEvent, SubmissionEvent
from tests.doubles.each import each
from tests.trainer.session.simulated import Simulation, Time, plan_of
from trainer.session.learning_rate import (
    MAX_STEPS,
    MIN_STEPS,
    RUNG,
    TUNED_FIRST,
    LrSearch,
    Probe,
    choose_rate,
    is_tuned,
    lowered_by,
    probe_rate_factor,
)
from trainer.session.ranks import Communicator

#: Where the slope's training ends, and how far away it begins.
AIM = 3.0


@dataclass
class Slope:
    """A model of one weight that is to reach `AIM`, by steps down a parabola; a tenth of a second each."""

    time: Time = field(default_factory=Time)
    #: The planned rate: a step of 1/2 reaches the bottom at once, one of more than 1 runs away.
    rate: float = 0.01
    weight: float = 0.0
    taken: list[float] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    ended: bool = False

    room: bool = True

    def begin(self) -> bool:
        self.kept = self.weight
        return self.room

    def step(self, factor: float, place: int) -> float:
        self.time.pass_by(0.1)
        self.taken.append(factor)
        self.places.append(place)
        loss = (self.weight - AIM) ** 2
        self.weight -= self.rate * factor * 2 * (self.weight - AIM)
        return loss

    def restore(self) -> None:
        self.weight = self.kept

    def end(self) -> None:
        self.ended = True

    def score(self) -> float:
        self.time.pass_by(0.5)
        return (self.weight - AIM) ** 2


def search(slope: Slope, most: float = 10.0, score: Callable[[], float] | None = None) -> LrSearch:
    return LrSearch(
        LrSearchPlan(share=0.2, most=most),
        slope,
        Communicator(),
        slope.time,
        score=score or slope.score,
        lower_is_better=True,
        score_s=0.5,
    )


def factors(lr_search: LrSearch) -> list[float]:
    return [probe.factor for probe in lr_search.probes]


def test_a_rate_that_is_too_low_is_raised_as_long_as_it_helps() -> None:
    slope = Slope(rate=0.01)
    lr_search = search(slope)
    assert lr_search.run(AIM**2, 20.0) == pytest.approx(10.0)
    assert factors(lr_search)[:3] == pytest.approx([1.0, math.sqrt(10), 10.0])
    assert max(factors(lr_search)) == pytest.approx(10.0)


def test_a_rate_that_is_too_high_is_lowered_and_no_higher_one_is_tried() -> None:
    slope = Slope(rate=9.0)
    lr_search = search(slope)
    chosen = lr_search.run(AIM**2, 60.0)
    assert chosen is not None
    assert chosen < 0.4
    assert lr_search.probes[0] == Probe(1.0, None)
    assert max(factors(lr_search)) == 1.0


def test_no_rate_above_the_profiles_limit_is_tried_for_a_training_as_short_or_chosen() -> None:
    slope = Slope(rate=0.01)
    lr_search = search(slope)
    lr_search.plan = LrSearchPlan(share=0.2, most=10.0, highest=3.125)
    chosen = lr_search.run(AIM**2, 30.0)
    assert chosen == pytest.approx(math.sqrt(10), rel=0.02)
    assert chosen <= 3.125
    assert max(slope.taken) < 3.2


@dataclass
class Landscape(Slope):
    """A model whose score after a candidate is a function of the candidate's rate alone."""

    scores: Callable[[float], float] = lambda factor: 1.0
    #: Of a step at this rate.
    losses: Callable[[float], float] = lambda factor: 1.0

    def step(self, factor: float, place: int) -> float:
        super().step(factor, place)
        return self.losses(max(self.taken))

    def restore(self) -> None:
        self.tried = max(self.taken, default=0.0)
        self.taken = []

    def score(self) -> float:
        self.time.pass_by(0.5)
        return self.scores(max(self.taken))


def valley(best: float, depth: float, base: float = 2.0) -> Callable[[float], float]:
    """The score falls to the best rate and rises again after it, over the logarithm of the rate."""
    return lambda factor: base - depth + depth * math.log10(factor / best) ** 2


@each(
    ("best", "tried"),
    [(1.0, [1, 10**0.5, 10**-0.5]), (4.0, [1, 10**0.5, 10]), (0.2, [1, 10**0.5, 10**-0.5, 0.1])],
)
def test_around_the_best_of_the_coarse_candidates_finer_ones_follow(best: float, tried: list[float]) -> None:
    lr_search = search(Landscape(scores=valley(best, 1.0)))
    chosen = lr_search.run(2.0, 100.0)
    coarse, fine = factors(lr_search)[: len(tried)], factors(lr_search)[len(tried) :]
    assert coarse == pytest.approx(tried)
    assert all(0.4 < factor / best < 3 for factor in fine)
    assert len(fine) >= 2
    assert chosen == pytest.approx(best, rel=0.05)


def test_the_finer_candidates_begin_on_the_side_of_the_better_neighbour() -> None:
    for best, side in ((1.5, 10**0.25), (0.7, 10**-0.25)):
        lr_search = search(Landscape(scores=valley(best, 1.0)))
        lr_search.run(2.0, 100.0)
        assert factors(lr_search)[3] == pytest.approx(side)


def test_a_first_candidate_that_leaves_a_worse_model_than_the_base_is_followed_by_lower_ones() -> None:
    lr_search = search(Landscape(scores=valley(0.09, 0.3)))
    lr_search.run(2.0, 100.0)
    assert factors(lr_search)[:3] == pytest.approx([1.0, 10**-0.5, 0.1])


def test_the_search_begins_where_the_plan_says_and_lower_with_a_tuned_base() -> None:
    lr_search = search(Landscape(scores=valley(2.0, 1.0)))
    lr_search.plan = LrSearchPlan(share=0.2, first=2.0)
    lr_search.run(2.0, 100.0)
    assert factors(lr_search)[0] == 2.0
    again = search(Landscape(scores=valley(2.0, 1.0)))
    again.tuned = True
    chosen = again.run(2.0, 100.0)
    assert factors(again)[0] == TUNED_FIRST
    assert chosen == pytest.approx(2.0, rel=0.1), "it walks up from there as long as that helps"


@each(
    ("task", "base", "tuned"),
    [
        (TaskType.INSTRUCT, 0.4, True),
        (TaskType.CHAT, 0.4, True),
        (TaskType.INSTRUCT, 1.3, False),
        (TaskType.DPO, 0.693, False),
        (TaskType.GRPO, 0.0, False),
    ],
)
def test_a_low_loss_shows_a_tuned_base_of_tasks_that_are_scored_by_it(
    task: TaskType, base: float, tuned: bool
) -> None:
    assert is_tuned(task, base) is tuned


def test_a_candidate_that_learns_nothing_of_the_same_batches_is_given_up_halfway() -> None:
    hill = Landscape(scores=valley(1.0, 1.0), losses=lambda factor: 1.0 if factor < 2 else 1.8)
    lr_search = search(hill)
    given_up: list[int] = []
    lr_search.on_probe = lambda probe, steps: (
        given_up.append(len(hill.taken)) if probe.score is None else None
    )
    chosen = lr_search.run(2.0, 60.0)
    assert [probe.factor for probe in lr_search.probes if probe.score is None] == [pytest.approx(10**0.5)]
    assert given_up == [lr_search.steps // 2]
    assert chosen == pytest.approx(1.0, rel=0.1)


def test_a_diverging_candidate_is_cut_short_and_never_scored() -> None:
    slope = Slope(rate=0.5)
    lr_search = search(slope)
    lr_search.run(AIM**2, 40.0)
    [diverged] = [probe for probe in lr_search.probes if probe.score is None]
    assert diverged.factor == pytest.approx(math.sqrt(10))
    steps = [place for place in slope.places if place == lr_search.steps - 1]
    assert len(steps) == len(lr_search.probes) - 1


def test_every_candidate_sees_the_same_batches_and_the_model_is_left_as_it_was() -> None:
    slope = Slope(rate=0.02)
    lr_search = search(slope)
    lr_search.run(AIM**2, 20.0)
    once = list(range(lr_search.steps))
    assert slope.places == [0, 1, 2, *once * len(lr_search.probes)]
    assert (slope.weight, slope.ended) == (0.0, True)


@each("seconds", [3.0, 8.0, 20.0, 100.0, 1000.0])
def test_it_is_over_in_the_time_that_it_was_given(seconds: float) -> None:
    slope = Slope(rate=0.01)
    began = slope.time()
    lr_search = search(slope, most=100.0)
    assert lr_search.run(AIM**2, seconds) is not None
    assert slope.time() - began <= seconds
    assert MIN_STEPS <= lr_search.steps <= MAX_STEPS


def test_without_time_for_candidates_the_planned_rate_is_kept() -> None:
    slope = Slope()
    lr_search = search(slope)
    assert lr_search.run(AIM**2, 2.0) is None
    assert (lr_search.probes, slope.weight) == ([], 0.0)


def test_without_room_to_remember_the_weights_no_step_is_made() -> None:
    slope = Slope(room=False)
    assert search(slope).run(AIM**2, 100.0) is None
    assert slope.taken == []


def test_a_broken_score_is_a_diverged_candidate() -> None:
    slope = Slope(rate=0.01)
    lr_search = search(slope, score=lambda: math.nan if max(slope.taken) > 2 else slope.score())
    assert lr_search.run(AIM**2, 30.0) == 1.0
    assert lr_search.probes[1].score is None


@each(
    ("probes", "chosen"),
    [
        ([(1, 5.0), (3, 4.0), (9, 5.0)], 3),
        ([(1, 5.0), (3, 4.0), (9, 4.0)], 3 * 3**0.5),  # between two that are alike
        ([(1, 5.0), (3, 4.0), (9, None)], 3),
        ([(1, 5.0), (3, 4.0)], 3),
        ([(1, None), (0.3, None), (0.1, 9.9)], 0.1),
        ([(1, None), (0.3, None)], 0.3),
        ([], None),
    ],
)
def test_the_choice_is_the_top_of_the_gains(
    probes: list[tuple[float, float | None]], chosen: float | None
) -> None:
    found = choose_rate([Probe(*one) for one in probes], 9.0, lower_is_better=True)
    assert found == (None if chosen is None else pytest.approx(chosen))


@each(
    ("probes", "chosen"),
    [
        # A tuned model of the benchmark: 0.1 is the best after 12 steps, 3.2 after 300.
        ([(1, 1.03), (0.316, 1.007), (0.1, 1.006)], 1.0),
        ([(1, 1.1), (0.316, 1.009)], 0.52),
        ([(1, 1.002), (3.16, 1.001), (10, 1.003)], 10.0),
        ([(1, 1.2), (0.316, 1.1), (0.1, 1.05)], 0.1),
    ],
)
def test_where_no_candidate_gains_anything_the_highest_that_does_no_harm_is_taken(
    probes: list[tuple[float, float]], chosen: float
) -> None:
    found = choose_rate(
        [Probe(*one) for one in probes], 1.008, lower_is_better=True, lowered=lowered_by(10, False, False)
    )
    assert found == pytest.approx(chosen, rel=0.03)
    pairs = choose_rate(
        [Probe(*one) for one in probes], 1.008, True, lowered=lowered_by(2, True, False), pairs=True
    )
    assert pairs == pytest.approx(min(chosen / 2**0.4, RUNG), rel=0.03), "preferences: near the plan"


def test_the_longer_the_training_the_lower_the_rate() -> None:
    chosen = []
    for steps in (1, 1_000, 10_000):
        lr_search = search(Landscape(scores=valley(1.0, 1.0)))
        lr_search.whole_steps = lambda step_s, steps=steps: steps  # type: ignore[misc]
        chosen.append(lr_search.run(2.0, 1000.0))
        assert lr_search.steps == MAX_STEPS
    assert chosen == pytest.approx([1.0, 10**-0.3, 10**-0.6], rel=0.01)
    one = choose_rate([Probe(1, 0.5)], 2.0, lower_is_better=True, lowered=lowered_by(100, False, False))
    assert one == 1, "of one there is no choice"


def test_the_less_the_candidates_gain_the_less_a_longer_training_lowers_their_rate() -> None:
    """A tuned start shows a part of what an untouched model shows in a few steps."""
    chosen = []
    for gain in (1.5, 0.8, 0.55, 0.3):
        probes = [Probe(0.3, 2.0 - 0.9 * gain), Probe(1, 2.0 - gain), Probe(10 / 3, 2.0 - 0.9 * gain)]
        chosen.append(choose_rate(probes, 2.0, lower_is_better=True, lowered=lowered_by(100, False, False)))
    assert chosen == pytest.approx([10**-0.6, 10**-0.6, 10**-0.3, 1.0], rel=0.01)
    probes = [Probe(0.3, 0.65), Probe(1, 0.5), Probe(10 / 3, 0.65)]
    for pairs, adapter, decades in ((False, True, 0.45), (True, False, 0.4), (True, True, 0.55)):
        lowered = choose_rate(probes, 2.0, True, lowered=lowered_by(100, pairs, adapter), pairs=pairs)
        assert lowered == pytest.approx(100**-decades, rel=0.01)


@each("planned", [0.2, 1.0, 5.0])
def test_preferences_end_where_a_longer_training_is_best_wherever_the_plan_begins(planned: float) -> None:
    """Candidates that are kept below ten times the planned rate would not find it."""
    best_of_candidates = 100**0.4
    lr_search = search(Landscape(scores=valley(best_of_candidates / planned, 1.0)))
    lr_search.pairs = True
    lr_search.whole_steps = lambda step_s: 100.0 * MAX_STEPS
    chosen = lr_search.run(2.0, 1000.0)
    assert lr_search.probes[0].factor == pytest.approx(best_of_candidates)
    assert chosen is not None
    assert planned * chosen == pytest.approx(1.0, rel=0.1)


def test_candidates_of_preferences_go_down_until_one_holds() -> None:
    well = valley(1.5, 1.0)
    lr_search = search(Landscape(scores=lambda factor: math.nan if factor > 3 else well(factor)))
    lr_search.pairs, lr_search.adapter = True, True
    lr_search.whole_steps = lambda step_s: 500.0 * MAX_STEPS
    chosen = lr_search.run(2.0, 1000.0)
    assert [probe.score is None for probe in lr_search.probes[:3]] == [True, True, False]
    assert chosen == pytest.approx(1.5 / 100**0.55, rel=0.2), "of 500 times as many steps as of 100"


def test_of_preferences_that_all_diverge_the_planned_rate_is_kept() -> None:
    probes = [Probe(10, None), Probe(3, None)]
    assert choose_rate(probes, 0.693, True, lowered=lowered_by(10, True, False), pairs=True) == 1
    assert (
        choose_rate([*probes, Probe(0.9, None)], 0.693, True, lowered=lowered_by(10, True, False), pairs=True)
        == 0.9
    )


def test_the_rate_found_keeps_to_the_profiles_limit_which_candidates_may_exceed() -> None:
    lr_search = search(Landscape(scores=valley(100.0, 1.0)))
    lr_search.plan = LrSearchPlan(share=0.2, most=10.0, highest=3.125)
    lr_search.whole_steps = lambda step_s: 100.0 * MAX_STEPS
    assert lr_search.run(2.0, 1000.0) == pytest.approx(3.125)
    assert max(factors(lr_search)) > 3.2


def test_a_candidate_may_exceed_the_bound_as_far_as_a_longer_training_lowers_it() -> None:
    lr_search = search(Landscape(scores=valley(100.0, 1.0)))
    lr_search.whole_steps = lambda step_s: 100.0 * MAX_STEPS
    chosen = lr_search.run(2.0, 1000.0)
    assert chosen == pytest.approx(10.0, rel=0.1), "kept below 10, the candidates would speak for 2.5"
    assert 30 < max(factors(lr_search)) < 10 * 100**0.3 * 1.03


def test_differences_within_the_noise_are_none() -> None:
    """Sampled rewards after a few steps: what has not hurt is too gentle rather than too rough."""
    probes = [Probe(1, -0.001), Probe(3, 0.02), Probe(10, -0.03), Probe(30, -0.2)]
    assert choose_rate(probes, 0.0, lower_is_better=False, noise=0.05) == 10
    assert choose_rate(probes[:1], 0.0, lower_is_better=False, noise=0.05) == 1


@pytest.mark.parametrize(
    ("base", "probes", "chosen"),
    [
        (0.02, [(1, 0.5, 0.02), (3, 0.4, 0.03), (10, 0.25, 0.05)], 1),
        (-5.0, [(1, -1.0, 0.02), (3, -2.0, 0.03), (10, -4.9, 0.06)], 1),
        (0.0, [(1, 0.5, 0.02), (10, 0.01, 0.05)], 1),
        (1.0, [(1, 1.01, 0.0), (3, 1.02, 0.0), (10, 0.99, 0.01)], 10),  # no more than noise
    ],
)
def test_rewards_are_compared_among_the_candidates(
    base: float, probes: list[tuple[float, float, float]], chosen: float
) -> None:
    """Against the base alone, anything over a base of nothing is all there is to win."""
    scores = [RewardScore(means=(mean,), base=(base,), weights=(1.0,), kl=kl) for _, mean, kl in probes]
    candidates = [Probe(factor, one.margin, one) for (factor, _, _), one in zip(probes, scores, strict=True)]
    assert choose_rate(candidates, 0.0, lower_is_better=False, noise=0.05) == chosen


def test_the_climb_ends_where_rewards_fall_though_all_are_far_above_the_base() -> None:
    means = iter([0.5, 0.4, 0.6, 0.3])
    said: list[RewardScore] = []

    def score() -> float:
        said.append(RewardScore(means=(next(means),), base=(0.001,), weights=(1.0,), kl=0.0))
        return said[-1].margin

    lr_search = search(Slope(rate=0.01), score=score)
    lr_search.lower_is_better, lr_search.noise, lr_search.rewarded = False, 0.05, lambda: said[-1]
    assert lr_search.run(0.0, 30.0) == pytest.approx(1 / math.sqrt(10))


def test_a_candidate_that_has_hardly_moved_does_not_end_the_climb() -> None:
    slope = Slope(rate=0.01)
    values = iter([0.0, -0.01, 0.01])
    lr_search = search(slope, score=lambda: next(values))
    lr_search.lower_is_better, lr_search.noise = False, 0.05
    assert lr_search.run(0.0, 30.0) == pytest.approx(10.0)


def test_a_probe_is_a_training_in_small() -> None:
    shape = [probe_rate_factor(place, 50) for place in range(50)]
    assert shape[4] == 1.0 == max(shape)
    assert shape[0] == pytest.approx(0.2)
    assert 0 < shape[-1] < 0.05


# — in a session


def searched(tmp_path: Path, slope: Slope, seconds: float = 200.0) -> Simulation:
    plan = plan_of(500, 500, 0.1).model_copy(update={"lr_search": LrSearchPlan(share=0.15)})
    run = Simulation(tmp_path, plan, seconds=seconds, step_s=lambda step: 0.1, time=slope.time)
    run.prober = slope
    assert run.scorer is not None
    plain = run.scorer.curve
    # While the slope is stepped on, its own score counts; afterwards the simulation's.
    run.scorer.curve = lambda step: (
        slope.score() if step == 0 and slope.taken and not slope.ended else plain(step)
    )
    return run


def test_the_found_rate_is_trained_with_from_the_first_step_on(tmp_path: Path) -> None:
    slope = Slope(rate=0.01)
    run = searched(tmp_path, slope)
    run.run()
    assert 3 < run.session.peak <= 10
    assert max(run.rates) == pytest.approx(run.session.peak, rel=0.02)
    notes = [event.text for event in run.events if isinstance(event, NoteEvent)]
    assert sum("after" in note for note in notes) == 5
    assert notes[-1].endswith("is trained with")


def test_a_candidate_that_beats_the_base_is_the_first_submission(tmp_path: Path) -> None:
    """A search may take a fifth of the time: whoever is killed right after it has submitted something."""
    run = searched(tmp_path, Slope(rate=0.1))
    run.session.begin()
    assert run.session.submission.exists
    first = next(event for event in run.events if isinstance(event, SubmissionEvent))
    assert first.step >= MIN_STEPS
    assert first.score is not None


def test_another_launch_takes_the_rate_that_was_found_and_spends_no_time(tmp_path: Path) -> None:
    first = searched(tmp_path, Slope(rate=0.01))
    first.session.begin()
    again = Slope(rate=0.01)
    second = searched(tmp_path, again)
    second.session.begin()
    assert second.session.peak == first.session.peak > 3
    assert again.taken == []


def test_a_smaller_batch_gets_a_lower_rate_and_another_training_none(tmp_path: Path) -> None:
    run = searched(tmp_path, Slope(rate=0.01))
    run.session.begin()
    plan, found = run.plan, run.session._found_rate
    half = plan.batch.model_copy(update={"micro": plan.batch.micro // 2})
    assert found.factor(plan.model_copy(update={"batch": half})) == pytest.approx(
        run.session.peak / math.sqrt(2)
    )
    other = plan.optimizer.model_copy(update={"name": "lion_8bit"})
    assert found.factor(plan.model_copy(update={"optimizer": other})) == 0.0
    (tmp_path / ".submission.rate.json").write_text(json.dumps(["nonsense"]))
    assert found.factor(plan) == 0.0


def test_a_resumed_training_keeps_its_rate(tmp_path: Path) -> None:
    first = searched(tmp_path / "first", Slope(rate=0.01))
    first.run(most=20)
    second = searched(tmp_path / "second", Slope(rate=0.01))
    second.session.restore(first.session.state())
    second.session.begin()
    assert second.session.peak == first.session.peak > 3
    assert second.prober is not None
