from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.domain.job_states import EndReason, JobState
from core.domain.tasks import TaskType
from core.domain.wire import MinerTaskOffer
from core.models.facts import Family
from miner.offers.history import JobOutcome, SuccessChances, SuccessHistory, job_outcomes
from miner.offers.parsed_offer import parse_offer
from miner.offers.policies.schema import SuccessTerms
from tests.miner.offers.builders import HOUR, NOON, decided, offer, outcome, picture_offer, policy
from tests.miner.offers.filled import answer, job, store

LATER = NOON + 100 * HOUR
DAY = 86_400.0
TERMS = SuccessTerms.model_validate(
    {
        "prior": 0.8,
        "prior_weight": 10,
        "half_life": "10d",
        "task": {"instruct": 0.9},
        "family": {"llama": 0.95},
        "size": {"<7B": 0.7, "7B-13B": 0.6},
    }
)


def chances(history: SuccessHistory, now: float = NOON, **changes: object) -> SuccessChances:
    about: dict[str, object] = {"kinds": ("instruct",), "family": Family.LLAMA, "params": 8_000_000_000}
    return history.chances(**{**about, **changes}, terms=TERMS, now=now)


def test_without_any_job_the_priors_hold() -> None:
    rates = chances(SuccessHistory())
    assert (rates.task.value, rates.family.value, rates.size.value) == (0.9, 0.95, 0.6)
    assert rates.success == 0.6
    unknown = chances(SuccessHistory(), kinds=("grpo",), family=Family.UNKNOWN, params=None)
    assert {unknown.task.value, unknown.family.value, unknown.size.value} == {0.8}


def test_one_job_moves_little_and_many_outweigh_the_prior() -> None:
    lucky = chances(SuccessHistory([outcome(published=True)]))
    unlucky = chances(SuccessHistory([outcome(published=False)]))
    assert lucky.task.value == pytest.approx((10 * 0.9 + 1) / 11)
    assert unlucky.task.value == pytest.approx(10 * 0.9 / 11)
    assert chances(SuccessHistory(outcome(number, published=False) for number in range(200))).success < 0.05


def test_a_job_counts_half_at_its_half_life_and_almost_nothing_in_a_year() -> None:
    history = SuccessHistory([outcome(published=False)])
    assert chances(history, NOON + 10 * DAY).task.jobs == pytest.approx(0.5)
    assert chances(history, NOON + 365 * DAY).task.value == pytest.approx(0.9, abs=1e-6)


def test_task_family_and_size_each_learn_from_their_own_jobs() -> None:
    history = SuccessHistory(
        [outcome(kind="flux", task_type=TaskType.IMAGE, family=Family.FLUX, params=12 * 10**9)]
    )
    rates = chances(history)
    assert (rates.task.jobs, rates.family.jobs, rates.size.jobs) == (0, 0, 1)


def test_a_clock_that_went_backwards_makes_no_job_count_double() -> None:
    history = SuccessHistory([outcome(published=False, ended_at=NOON + 5 * DAY)])
    assert chances(history, NOON).task.jobs == 1


def test_the_order_in_which_jobs_are_added_does_not_matter() -> None:
    jobs = [outcome(number, ended_at=NOON - number * DAY, published=number % 3 > 0) for number in range(20)]
    there, back = chances(SuccessHistory(jobs)), chances(SuccessHistory(reversed(jobs)))
    assert there.task.value == pytest.approx(back.task.value)
    assert there.task.jobs == pytest.approx(back.task.jobs)


def test_a_job_added_again_counts_once_with_its_last_outcome() -> None:
    history = SuccessHistory([outcome(published=False)])
    chances(history)
    history.add(outcome(published=False))
    assert chances(history).task.jobs == 1
    assert history.published(TaskType.INSTRUCT) == 0
    history.add(outcome(published=True))
    assert (chances(history).task.jobs, chances(history).task.published) == (1, 1)
    assert history.published(TaskType.INSTRUCT) == 1
    assert len(history) == 1


def test_other_terms_add_up_the_same_jobs_again() -> None:
    history = SuccessHistory([outcome(published=False, ended_at=NOON - 10 * DAY)])
    assert chances(history).task.jobs == pytest.approx(0.5)
    for days in range(1, 9):
        terms = TERMS.model_copy(update={"half_life": days * DAY})
        rate = history.chances(("instruct",), Family.LLAMA, None, terms, NOON).task
        assert rate.jobs == pytest.approx(0.5 ** (10 / days))
    assert chances(history).task.jobs == pytest.approx(0.5)


def test_a_rate_says_what_it_is_made_of() -> None:
    assert str(chances(SuccessHistory()).task) == "90%, the prior"
    history = SuccessHistory(outcome(number, published=number > 0) for number in range(10))
    assert str(chances(history).task) == "90%: prior 90%, 9.0 of 10.0 own jobs"


@given(
    st.lists(st.tuples(st.booleans(), st.floats(-1000, 1000)), max_size=30),
    st.floats(-2000, 2000),
)
def test_a_rate_stays_a_chance_whatever_the_clock_does(jobs: list[tuple[bool, float]], now: float) -> None:
    history = SuccessHistory(
        outcome(number, published=published, ended_at=NOON + at * DAY)
        for number, (published, at) in enumerate(jobs)
    )
    rates = chances(history, NOON + now * DAY)
    assert 0 <= rates.success <= 1
    assert 0 <= rates.task.published <= rates.task.jobs + 1e-9 <= len(jobs) + 1e-6


# Outcomes of the store's jobs


def test_jobs_that_ended_are_read_oldest_first_with_the_size_that_was_offered(tmp_path: Path) -> None:
    with store(tmp_path) as connection:
        second = offer(task_id="b", model="someone/no-size", model_params_count=13 * 10**9)
        answer(connection, second, NOON + HOUR)
        failed = job(connection, second, NOON + HOUR, state=JobState.FAILED, reason=EndReason.OOM)
        done = job(connection, offer(task_id="a"), NOON)
        task, kind, params = TaskType.INSTRUCT, "instruct", 13 * 10**9
        newest = JobOutcome(failed, task, kind, Family.UNKNOWN, params, False, NOON + 2 * HOUR)
        assert job_outcomes(connection, LATER) == [
            JobOutcome(done, task, kind, Family.LLAMA, 8 * 10**9, True, NOON + HOUR),
            newest,
        ]
        assert job_outcomes(connection, LATER, since=NOON + 1.5 * HOUR) == [newest]
        early = job_outcomes(connection, NOON + 1.5 * HOUR)  # nothing ended in the future
        assert [outcome.ended_at for outcome in early] == [NOON + HOUR, NOON + 1.5 * HOUR]


@pytest.mark.parametrize(
    "asked",
    [
        offer(),
        offer(model="a/tiny-1b", model_params_count=70 * 10**9),
        offer(model="a/mystery"),
        picture_offer(),
        picture_offer(model="a/stable-diffusion-v1-5"),
    ],
    ids=lambda asked: asked.model,
)
def test_a_job_counts_where_a_decision_looks_for_it(tmp_path: Path, asked: MinerTaskOffer) -> None:
    parsed = parse_offer(asked)
    about = (parsed.kinds, parsed.model.family, parsed.params)
    with store(tmp_path) as connection:
        answer(connection, asked)
        job(connection, asked, request={"model_type": parsed.image_type} if parsed.image_type else None)
        history = SuccessHistory(job_outcomes(connection, LATER))
    rates = history.chances(*about, policy().terms.success, LATER)
    assert min(rates.task.jobs, rates.family.jobs, rates.size.jobs) > 0.5


@pytest.mark.parametrize(
    ("request_body", "kind"),
    [({"model_type": "qwen-image"}, "qwen-image"), ({"model_type": "unheard-of"}, "flux"), ([1], "flux")],
)
def test_the_image_type_is_the_start_s_or_else_the_name_s(
    tmp_path: Path, request_body: object, kind: str
) -> None:
    with store(tmp_path) as connection:
        job(connection, picture_offer(), request=request_body)
        assert [outcome.kind for outcome in job_outcomes(connection, LATER)] == [kind]


def test_jobs_that_say_nothing_about_our_chances_are_left_out(tmp_path: Path) -> None:
    with store(tmp_path) as connection:
        job(connection, offer(task_id="a"), state=JobState.CANCELLED, reason=EndReason.CANCELLED)
        job(connection, offer(task_id="b"), state=JobState.TRAINING)
        job(connection, offer(task_id="c"), state=JobState.FAILED, reason=EndReason.INFEASIBLE)
        refused = offer(task_id="d")
        answer(connection, refused, decision=decided(refused, policy(rules__max_jobs=0)))
        job(connection, refused, state=JobState.FAILED, reason=EndReason.INFEASIBLE)
        assert job_outcomes(connection, LATER) == []
        answer(connection, offer(task_id="e"))
        accepted = job(connection, offer(task_id="e"), state=JobState.FAILED, reason=EndReason.INFEASIBLE)
        assert [outcome.job_id for outcome in job_outcomes(connection, LATER)] == [accepted]
