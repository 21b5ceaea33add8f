from __future__ import annotations

from core.hardware import Hardware, parse_gpus
from miner.offers.decision import Decision
from miner.offers.offered import Known, Offered
from miner.offers.replay import Entry, idle_fleet, replay
from miner.offers.stream import stream
from tests.benchmarks.test_policy import overlapping
from tests.miner.offers.builders import HOUR, NOON, offer, outcome, policy, profile

FOUR = Hardware(gpus=parse_gpus("4xH100"))


def played(*offers: Offered, plan_by: str = "all", **how: object) -> list[Entry]:
    return replay(offers, policy(), profile(plan_by), FOUR, **how)  # type: ignore[arg-type]


def accepted(entries: list[Entry]) -> list[bool]:
    return [entry.decision.accepted for entry in entries]


def at(hours: float, known: Known | None = None, **changes: object) -> Offered:
    return Offered(NOON + hours * HOUR, offer(task_id=f"t{hours * 10:.0f}", **changes), None, known)


def test_an_accepted_offer_holds_its_gpus_until_its_window_ends() -> None:
    first, second, third = played(at(0), at(0.1), at(2.9))
    assert accepted([first, second, third]) == [True, False, True]
    assert first.decision.placement is not None
    assert first.decision.placement.ends_at < NOON + 2.9 * HOUR


def test_an_offer_whose_start_never_came_frees_its_gpus_soon() -> None:
    assert accepted(played(at(0, Known.LAPSED), at(0.1), at(0.3))) == [True, True, False]


def test_history_grows_as_it_did_and_knows_nothing_of_the_future() -> None:
    ended = [outcome(number, published=False, ended_at=NOON + HOUR) for number in range(50)]
    before, after = played(at(0), at(9), outcomes=ended)

    def success(decision: Decision) -> float:
        return decision.factors["success"].value

    assert success(before.decision) == 0.95
    assert success(after.decision) < 0.3


def test_value_is_reckoned_by_the_judge_of_all() -> None:
    (own,) = played(at(0))
    assert own.value == own.decision.value
    rich = policy(value__win_points=30).terms
    (judged,) = played(at(0), judge=rich)
    assert judged.value is not None
    assert own.value is not None
    assert judged.value.points > 5 * own.value.points
    assert judged.value.gpu_hours == own.value.gpu_hours


def test_a_week_of_offers_never_books_a_gpu_twice() -> None:
    for plan_by in ("h100x4-strategy", "steady"):
        entries = played(*stream(4, days=2, per_day=80), plan_by=plan_by)
        taken = [entry for entry in entries if entry.decision.accepted]
        assert len(taken) > 20
        assert overlapping(taken) == []


def test_cards_of_an_idle_fleet_are_linked_as_such_cards_are() -> None:
    def links(gpus: str) -> list[frozenset[str]]:
        return [gpu.linked for gpu in idle_fleet(Hardware(gpus=parse_gpus(gpus))).gpus]

    assert links("3xH100") == [frozenset("12"), frozenset("02"), frozenset("01")]
    assert links("3xA100-PCIE-40GB") == [frozenset("1"), frozenset("0"), frozenset()]
    assert links("2xL40S") == [frozenset(), frozenset()]
