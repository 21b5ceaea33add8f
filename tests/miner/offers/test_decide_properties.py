"""What holds for any offer, fleet and policy."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from core.domain.decisions import Decision
from core.domain.keys import GpuReservation, ReservationKind, TaskKey
from core.domain.tasks import OFFERED_TASKS
from core.domain.wire import MAX_COUNT, MinerTaskOffer
from miner.fleet.base import FleetSnapshot
from miner.offers.history import SuccessHistory
from tests.miner.offers.builders import HOUR, NOON, decided, fleet, offer, outcome, policy

NAMES = st.sampled_from(
    [
        "meta-llama/Llama-3.1-8B",
        "unsloth/Llama-3.3-70B-Instruct",
        "Qwen/Qwen2.5-0.5B",
        "someone/mystery",
        "someone/tiny-1b-of-70b",
        "mistralai/Mixtral-8x7B-v0.1",
        "rayonlabs/FLUX.1-dev",
        "a",
    ]
)
WORDS = st.from_regex(r"\A[A-Za-z0-9_]{1,20}/[A-Za-z0-9_]{1,20}\Z")
OFFERS = st.builds(
    MinerTaskOffer,
    model=NAMES | WORDS,
    hours_to_complete=st.floats(0, 10_000) | st.sampled_from([0.0, 0.1, 1.0, 3.0, 6.0]),
    task_id=st.just("task-1"),
    task_type=st.sampled_from(OFFERED_TASKS),
    ds_size=st.none() | st.integers(0, MAX_COUNT),
    model_params_count=st.none() | st.integers(0, MAX_COUNT) | st.sampled_from([8 * 10**9, 70 * 10**9]),
)
SENSIBLE = st.builds(
    offer,
    model=NAMES,
    hours_to_complete=st.floats(0.5, 10),
    task_type=st.sampled_from(OFFERED_TASKS),
    model_params_count=st.none() | st.sampled_from([10**9, 8 * 10**9, 34 * 10**9]),
)
POLICIES = st.sampled_from(["h100x4", "h100x8", "conservative", "everything-feasible"])
PROFILES = st.sampled_from(["h100x4-strategy", "h100x8", "steady", "h100x4"])


@st.composite
def holds(draw: st.DrawFn, gpus: int = 8) -> tuple[GpuReservation, ...]:
    """Windows that do not overlap on any GPU, as a fleet keeps them."""
    reservations, free_from = [], [-3.0] * gpus
    for number in range(draw(st.integers(0, 12))):
        chosen = draw(st.sets(st.integers(0, gpus - 1), min_size=1, max_size=gpus))
        start = max(free_from[gpu] for gpu in chosen) + draw(st.floats(0, 3))
        end = start + draw(st.floats(0.05, 6))
        for gpu in chosen:
            free_from[gpu] = end
        reservations.append(
            GpuReservation(
                TaskKey("v", f"t{number}"),
                draw(st.sampled_from(ReservationKind)),
                tuple(str(gpu) for gpu in sorted(chosen)),
                NOON + start * HOUR,
                NOON + end * HOUR,
                draw(st.floats(-1, 5)),
            )
        )
    return tuple(reservations)


@st.composite
def fleets(draw: st.DrawFn) -> FleetSnapshot:
    return fleet(draw(st.sampled_from(["8xH100", "8xA100-PCIE-40GB", "8xL4"])), *draw(holds()))


def assert_no_gpu_is_held_twice(decision: Decision, on: FleetSnapshot, now: float = NOON) -> None:
    place = decision.placement
    if place is None:
        return
    assert place.gpus
    assert len(set(place.gpus)) == len(place.gpus)
    assert set(place.gpus) <= {gpu.id for gpu in on.usable}
    assert now <= place.starts_at < place.ends_at
    for taken in on.reservations:
        if set(taken.gpus) & set(place.gpus):
            assert taken.ends_at <= place.starts_at or place.ends_at <= taken.starts_at


@given(OFFERS, POLICIES, PROFILES, fleets())
def test_any_offer_gets_the_same_decision_again_which_holds_no_gpu_twice(
    asked: MinerTaskOffer, name: str, plan_by: str, on: FleetSnapshot
) -> None:
    decision = decided(asked, policy(name), on, plan_by=plan_by)
    assert decided(asked, policy(name), on, plan_by=plan_by) == decision
    assert decision.accepted is not bool(decision.failed)
    assert all(reason.way for reason in decision.failed)
    assert not decision.accepted or decision.placement is not None
    assert_no_gpu_is_held_twice(decision, on)


@settings(suppress_health_check=[HealthCheck.filter_too_much])  # many fleets are full
@given(SENSIBLE, fleets(), PROFILES)
def test_what_is_accepted_fits_between_its_start_and_its_deadline(
    asked: MinerTaskOffer, on: FleetSnapshot, plan_by: str
) -> None:
    decision = decided(asked, on=on, plan_by=plan_by)
    assume(decision.accepted)
    seconds = asked.hours_to_complete * HOUR
    assert decision.plan.wait_s + decision.plan.busy_s <= seconds
    delay = policy().terms.fitting.start_delay
    assert decision.placement.ends_at - NOON <= seconds + delay + 1e-6
    held = decision.placement.ends_at - decision.placement.starts_at
    assert held >= decision.plan.busy_s


@given(SENSIBLE, st.data(), PROFILES)
def test_one_more_reservation_never_turns_a_refusal_into_an_acceptance(
    asked: MinerTaskOffer, data: st.DataObject, plan_by: str
) -> None:
    taken = data.draw(holds())
    assume(taken)
    fewer = decided(asked, on=fleet("8xH100", *taken[:-1]), plan_by=plan_by)
    more = decided(asked, on=fleet("8xH100", *taken), plan_by=plan_by)
    assert more.accepted <= fewer.accepted


LIMITS: dict[str, st.SearchStrategy[tuple[Any, Any]]] = {
    "rules.max_hours": st.tuples(st.floats(0.5, 12), st.floats(0, 12)).map(lambda it: (it[0], sum(it))),
    "rules.max_jobs": st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda it: (it[0], sum(it))),
    "rules.min_value": st.tuples(st.floats(-1, 3), st.floats(0, 3)).map(lambda it: (sum(it), it[0])),
    "rules.min_success": st.tuples(st.floats(0, 1), st.floats(0, 1)).map(lambda it: (max(it), min(it))),
    "score.threshold": st.tuples(st.floats(0, 1), st.floats(0, 1)).map(lambda it: (max(it), min(it))),
}


@given(SENSIBLE, fleets(), st.sampled_from(sorted(LIMITS)), st.data())
def test_a_kinder_limit_never_turns_an_acceptance_into_a_refusal(
    asked: MinerTaskOffer, on: FleetSnapshot, key: str, data: st.DataObject
) -> None:
    strict, kind = data.draw(LIMITS[key])
    # A longer limit makes a task look shorter, never longer, so the score can only rise.
    stricter = decided(asked, policy("h100x8", **{key.replace(".", "__"): strict}), on)
    kinder = decided(asked, policy("h100x8", **{key.replace(".", "__"): kind}), on)
    assert stricter.accepted <= kinder.accepted


@given(SENSIBLE, st.lists(st.booleans(), max_size=12))
def test_one_more_success_never_lowers_score_or_value(asked: MinerTaskOffer, ends: list[bool]) -> None:
    history = SuccessHistory(outcome(number, published=end) for number, end in enumerate(ends))
    before = decided(asked, policy("h100x8"), history=history)
    history.add(outcome(1000, published=True))
    after = decided(asked, policy("h100x8"), history=history)
    assert after.score >= before.score - 1e-12
    assert after.value.points >= before.value.points - 1e-12
