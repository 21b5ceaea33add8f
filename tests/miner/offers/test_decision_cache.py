from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.wire import MinerTaskOffer
from miner.fleet.base import Ability, FleetSnapshot, TaskKey
from miner.offers import decision_cache
from miner.offers.ask import understand
from miner.offers.decide import decide, decide_ask
from miner.offers.decision import Decision
from miner.offers.decision_cache import HOLDS_FOR_S, DecisionCache
from miner.offers.history import History
from tests.miner.offers.builders import NOON, fleet, hold, offer, outcome, policy, profile
from tests.miner.offers.test_decide_properties import OFFERS, POLICIES


class Asked:
    """A cache with everything that a decision depends on; counts how often one is really made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = 0
        self.cache = DecisionCache()
        self.state: dict[str, Any] = {
            "now": NOON,
            "fleet": fleet("4xH100", hold("a", "01")),
            "history": History(),
            "policy": policy(),
            "profile": profile(),
        }

        def counted(*values: Any) -> Decision:
            self.made += 1
            return decide_ask(*values)

        monkeypatch.setattr(decision_cache, "decide_ask", counted)

    def ask(self, task_id: str = "t", **changes: Any) -> Decision:
        """Of a task that is refused, unless told otherwise: there is no time for it."""
        made = offer(task_id=task_id, **{"hours_to_complete": 0.01, **changes})
        denied = self.state["policy"].terms.rules.models_denied
        return self.cache.decide(understand(made, denied=denied), **self.state).decision


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


def test_equal_asks_are_refused_once_whatever_they_are_called(asked: Asked) -> None:
    first = asked.ask("a")
    asked.state["now"] += HOLDS_FOR_S / 2
    asked.state["fleet"] = replace(asked.state["fleet"], taken_at=NOON + HOLDS_FOR_S / 2)
    for number in range(3):
        assert asked.ask(f"b{number}", model=f"someone{number}/Llama-3-8B-tuned", ds_size=number) is first
    assert asked.made == 1


def test_an_acceptance_is_never_reused(asked: Asked) -> None:
    assert asked.ask("a", hours_to_complete=3.0).accepted
    assert asked.ask("b", hours_to_complete=3.0).accepted
    assert asked.made == 2


def test_what_a_decision_depends_on_is_weighed_for_itself(asked: Asked) -> None:
    asked.state["policy"] = policy(rules__models_denied=["bad/*"])
    asked.ask()
    for changes in (
        {"model": "a/mistral-8b"},
        {"model": "a/llama-7b"},
        {"model": "bad/llama-8b"},
        {"hours_to_complete": 4.0},
        {"model_params_count": 10**9},
        {"task_type": "DpoTask"},
        {"task_type": "ImageTask", "ds_size": 3},
        {"task_type": "ImageTask", "ds_size": 4},
    ):
        asked.ask(**changes)
    assert asked.made == 9


#: Few of each, so that many are equal but for their names.
_ALIKE = st.lists(
    st.builds(
        offer,
        model=st.sampled_from(
            ["a/llama-8b", "b/Llama-8b-x", "a/flux", "c/flux-2", "a/sd-1.5", "evil/llama-8b"]
        ),
        hours_to_complete=st.sampled_from([0.01, 1.0, 3.0]),
        task_type=st.sampled_from(["InstructTextTask", "DpoTask", "ImageTask"]),
        ds_size=st.sampled_from([None, 20, 100_000]),
        model_params_count=st.sampled_from([None, 0, 8_030_261_248]),
    )
    | OFFERS,
    min_size=2,
    max_size=12,
)


@settings(max_examples=60)
@given(_ALIKE, POLICIES, st.booleans())
def test_with_the_cache_every_offer_gets_the_decision_it_would_get_without(
    offers: list[MinerTaskOffer], name: str, busy: bool
) -> None:
    cache, terms, plans = DecisionCache(), policy(name, rules__models_denied=["evil/*"]), profile()
    there, history = fleet("4xH100", *([hold("a", "0123", -1.0, 9.0)] if busy else [])), History()
    for one in (*offers, *offers):
        ask = understand(one, denied=terms.terms.rules.models_denied)
        found = cache.decide(ask, NOON, there, history, terms, plans).decision
        assert found == decide(one, NOON, there, history, terms, plans)


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
def test_whatever_changed_is_looked_at_anew(asked: Asked, changed: dict[str, Any]) -> None:
    asked.ask()
    asked.state.update(changed)
    asked.ask()
    assert asked.made == 2


def test_a_job_that_ended_is_learned_from_at_once(asked: Asked) -> None:
    before = asked.ask()
    asked.state["history"].add(outcome(published=False))
    assert asked.ask().score != before.score
    assert asked.made == 2


def test_trouble_with_inventory_or_engine_is_seen_at_once(asked: Asked) -> None:
    fine = asked.state["fleet"]
    for changes in ({"trouble": "NVML is gone"}, {"ability": Ability(trouble="Docker is gone")}):
        asked.state["fleet"] = fine
        assert asked.ask(hours_to_complete=3.0).accepted
        asked.state["fleet"] = replace(fine, **changes)
        assert not asked.ask(hours_to_complete=3.0).accepted


def test_no_more_than_so_many_answers_are_kept(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_cache, "MOST_KEPT", 2)
    for hours in (0.01, 0.02, 0.03, 0.03, 0.02, 0.01):
        assert not asked.ask(hours_to_complete=hours).accepted
    assert asked.made == 4
    assert len(asked.cache._known) == 2


def test_a_fleet_without_a_task_that_holds_nothing_is_the_same_fleet() -> None:
    busy: FleetSnapshot = fleet("4xH100", hold("a", "01"))
    assert busy.without(TaskKey("validator", "b")) is busy
    assert busy.without(TaskKey("validator", "a")).holds == ()
