from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.models import Family
from core.tasks import TaskType
from miner.offers.history import Chances, History
from miner.offers.policies.schema import Success
from tests.miner.offers.builders import NOON, outcome

DAY = 86_400.0
TERMS = Success.model_validate(
    {
        "prior": 0.8,
        "prior_weight": 10,
        "half_life": "10d",
        "task": {"instruct": 0.9},
        "family": {"llama": 0.95},
        "size": {"<7B": 0.7, "7B-13B": 0.6},
    }
)


def chances(history: History, now: float = NOON, **changes: object) -> Chances:
    about: dict[str, object] = {"kinds": ("instruct",), "family": Family.LLAMA, "params": 8_000_000_000}
    return history.chances(**{**about, **changes}, terms=TERMS, now=now)  # type: ignore[arg-type]


def test_without_any_job_the_priors_hold() -> None:
    found = chances(History())
    assert (found.task.value, found.family.value, found.size.value) == (0.9, 0.95, 0.6)
    assert found.success == 0.6
    unknown = chances(History(), kinds=("grpo",), family=Family.UNKNOWN, params=None)
    assert {unknown.task.value, unknown.family.value, unknown.size.value} == {0.8}


def test_a_lucky_or_unlucky_job_moves_little() -> None:
    lucky = chances(History([outcome(published=True)]))
    unlucky = chances(History([outcome(published=False)]))
    assert lucky.task.value == pytest.approx((10 * 0.9 + 1) / 11)
    assert unlucky.task.value == pytest.approx(10 * 0.9 / 11)


def test_many_jobs_outweigh_the_prior() -> None:
    history = History(outcome(number, published=False) for number in range(200))
    assert chances(history).success < 0.05


def test_a_job_counts_half_at_its_half_life_and_next_to_nothing_in_a_year() -> None:
    history = History([outcome(published=False)])
    assert chances(history, NOON + 10 * DAY).task.jobs == pytest.approx(0.5)
    assert chances(history, NOON + 365 * DAY).task.value == pytest.approx(0.9, abs=1e-6)


def test_each_side_learns_from_its_own_jobs_alone() -> None:
    history = History([outcome(kind="flux", task_type=TaskType.IMAGE, family=Family.FLUX, params=12 * 10**9)])
    found = chances(history)
    assert (found.task.jobs, found.family.jobs, found.size.jobs) == (0, 0, 1)


def test_a_clock_that_went_backwards_makes_no_job_count_double() -> None:
    history = History([outcome(published=False, ended_at=NOON + 5 * DAY)])
    assert chances(history, NOON).task.jobs == 1


def test_the_order_in_which_jobs_are_told_does_not_matter() -> None:
    jobs = [outcome(number, ended_at=NOON - number * DAY, published=number % 3 > 0) for number in range(20)]
    there, back = chances(History(jobs)), chances(History(reversed(jobs)))
    assert there.task.value == pytest.approx(back.task.value)
    assert there.task.jobs == pytest.approx(back.task.jobs)


def test_a_job_told_twice_counts_once_and_its_last_word_counts() -> None:
    history = History([outcome(published=False)])
    chances(history)
    history.add(outcome(published=False))
    assert chances(history).task.jobs == 1
    assert history.published(TaskType.INSTRUCT) == 0
    history.add(outcome(published=True))
    assert (chances(history).task.jobs, chances(history).task.published) == (1, 1)
    assert history.published(TaskType.INSTRUCT) == 1
    assert len(history) == 1


def test_other_terms_add_up_the_same_jobs_anew() -> None:
    history = History([outcome(published=False, ended_at=NOON - 10 * DAY)])
    assert chances(history).task.jobs == pytest.approx(0.5)
    for days in range(1, 9):
        terms = TERMS.model_copy(update={"half_life": days * DAY})
        rate = history.chances(("instruct",), Family.LLAMA, None, terms, NOON).task
        assert rate.jobs == pytest.approx(0.5 ** (10 / days))
    assert chances(history).task.jobs == pytest.approx(0.5)


def test_a_rate_says_what_it_is_made_of() -> None:
    assert str(chances(History()).task) == "90%, the prior"
    history = History(outcome(number, published=number > 0) for number in range(10))
    assert str(chances(history).task) == "90%: prior 90%, 9.0 of 10.0 own jobs"


@given(
    st.lists(st.tuples(st.booleans(), st.floats(-1000, 1000)), max_size=30),
    st.floats(-2000, 2000),
)
def test_a_rate_stays_a_chance_whatever_the_clock_does(jobs: list[tuple[bool, float]], now: float) -> None:
    history = History(
        outcome(number, published=published, ended_at=NOON + at * DAY)
        for number, (published, at) in enumerate(jobs)
    )
    found = chances(history, NOON + now * DAY)
    assert 0 <= found.success <= 1
    assert 0 <= found.task.published <= found.task.jobs + 1e-9 <= len(jobs) + 1e-6


@given(st.lists(st.booleans(), max_size=20), st.integers(0, 19))
def test_one_more_success_never_lowers_a_chance(ends: list[bool], extra: int) -> None:
    history = History(outcome(number, published=end) for number, end in enumerate(ends))
    before = chances(history).success
    history.add(outcome(100 + extra, published=True))
    assert chances(history).success >= before - 1e-12
