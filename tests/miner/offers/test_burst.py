from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from miner.fleet.base import Ability, FleetSnapshot, TaskKey
from miner.offers import burst
from miner.offers.burst import HOLDS_FOR_S, Burst
from miner.offers.decision import Decision
from miner.offers.history import History
from tests.miner.offers.builders import NOON, fleet, hold, offer, outcome, policy, profile


class Room:
    """A burst with everything that a decision depends on; counts how often one is really made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = 0
        self.burst = Burst()
        self.state: dict[str, Any] = {
            "now": NOON,
            "fleet": fleet("4xH100", hold("a", "01")),
            "history": History(),
            "policy": policy(),
            "profile": profile(),
        }
        real = burst.decide

        def counted(*values: Any, **more: Any) -> Decision:
            self.made += 1
            return real(*values, **more)

        monkeypatch.setattr(burst, "decide", counted)

    def ask(self, task_id: str = "t", **changes: Any) -> Decision:
        """Of a task that is refused, unless told otherwise: there is no time for it."""
        return self.burst.decide(
            offer(task_id=task_id, **{"hours_to_complete": 0.01, **changes}), **self.state
        )


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    return Room(monkeypatch)


def test_like_offers_are_refused_once(room: Room) -> None:
    first = room.ask("a")
    room.state["now"] += HOLDS_FOR_S / 2
    room.state["fleet"] = replace(room.state["fleet"], taken_at=NOON + HOLDS_FOR_S / 2)
    assert room.ask("b") is first
    assert room.made == 1


def test_an_acceptance_is_never_reused(room: Room) -> None:
    assert room.ask("a", hours_to_complete=3.0).accepted
    assert room.ask("b", hours_to_complete=3.0).accepted
    assert room.made == 2


def test_another_offer_is_weighed_for_itself(room: Room) -> None:
    room.ask()
    for changes in (
        {"model": "a/llama-7b"},
        {"hours_to_complete": 4.0},
        {"model_params_count": 10**9},
        {"task_type": "DpoTask"},
        {"ds_size": 3},
    ):
        room.ask(**changes)
    assert room.made == 6


@pytest.mark.parametrize(
    "changed",
    [
        {"now": NOON + HOLDS_FOR_S},
        {"now": NOON - 3600},
        {"fleet": fleet("4xH100", hold("a", "01"))},
        {"policy": policy()},
        {"profile": profile()},
        {"history": History()},
    ],
    ids=lambda it: next(iter(it)),
)
def test_whatever_changed_is_looked_at_anew(room: Room, changed: dict[str, Any]) -> None:
    room.ask()
    room.state.update(changed)
    room.ask()
    assert room.made == 2


def test_a_job_that_ended_is_learned_from_at_once(room: Room) -> None:
    before = room.ask()
    room.state["history"].add(outcome(published=False))
    assert room.ask().score != before.score
    assert room.made == 2


def test_trouble_with_the_inventory_is_seen_at_once(room: Room) -> None:
    assert room.ask(hours_to_complete=3.0).accepted
    room.state["fleet"] = replace(room.state["fleet"], trouble="NVML is gone")
    assert not room.ask(hours_to_complete=3.0).accepted


def test_trouble_with_the_engine_is_seen_at_once(room: Room) -> None:
    assert room.ask(hours_to_complete=3.0).accepted
    room.state["fleet"] = replace(room.state["fleet"], ability=Ability(trouble="Docker is gone"))
    assert not room.ask(hours_to_complete=3.0).accepted


def test_no_more_than_so_many_answers_are_kept(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burst, "MOST_KEPT", 2)
    for hours in (0.01, 0.02, 0.03, 0.03, 0.01):
        assert not room.ask(hours_to_complete=hours).accepted
    assert room.made == 4


def test_a_fleet_without_a_task_that_holds_nothing_is_the_same_fleet() -> None:
    busy: FleetSnapshot = fleet("4xH100", hold("a", "01"))
    assert busy.without(TaskKey("validator", "b")) is busy
    assert busy.without(TaskKey("validator", "a")).holds == ()
