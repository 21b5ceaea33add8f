from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.domain.decisions import Decision
from core.domain.wire import MinerTaskOffer
from miner.fleet.base import BackendAbility
from miner.offers import policy_runtime
from miner.offers.decide import decide, decide_parsed
from miner.offers.history import SuccessHistory
from miner.offers.parsed_offer import parse_offer
from miner.offers.policy_runtime import CACHE_SECONDS, DecisionCache
from tests.miner.offers.builders import NOON, fleet, hold, offer, outcome, policy, profile
from tests.miner.offers.test_decide_properties import OFFERS, POLICIES


class CountingCache:
    """A cache with everything that a decision depends on; counts how often one is really made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decided = 0
        self.cache = DecisionCache()
        self.state: dict[str, Any] = {
            "now": NOON,
            "fleet": fleet("4xH100", hold("a", "01")),
            "history": SuccessHistory(),
            "policy": policy(),
            "profile": profile(),
        }

        def counted(*values: Any) -> Decision:
            self.decided += 1
            return decide_parsed(*values)

        monkeypatch.setattr(policy_runtime, "decide_parsed", counted)

    def decide(self, **changes: Any) -> Decision:
        """By default about an offer that is refused: it leaves no time to train."""
        sent = offer(**{"hours_to_complete": 0.01, **changes})
        denied = self.state["policy"].terms.rules.models_denied
        return self.cache.get_or_decide(parse_offer(sent, denied=denied), **self.state).decision


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> CountingCache:
    return CountingCache(monkeypatch)


def test_equal_offers_are_refused_once_whatever_they_are_called(cache: CountingCache) -> None:
    first = cache.decide()
    cache.state["now"] += CACHE_SECONDS / 2
    cache.state["fleet"] = replace(cache.state["fleet"], taken_at=NOON + CACHE_SECONDS / 2)
    for number in range(3):
        model = f"someone{number}/Llama-3-8B-tuned"
        assert cache.decide(task_id=f"b{number}", model=model, ds_size=number) is first
    assert cache.decided == 1


def test_an_acceptance_is_never_reused(cache: CountingCache) -> None:
    assert cache.decide(task_id="a", hours_to_complete=3.0).accepted
    assert cache.decide(task_id="b", hours_to_complete=3.0).accepted
    assert cache.decided == 2


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
    cache, by, plan_by = DecisionCache(), policy(name, rules__models_denied=["evil/*"]), profile()
    on, history = fleet("4xH100", *([hold("a", "0123", -1.0, 9.0)] if busy else [])), SuccessHistory()
    for sent in (*offers, *offers):
        parsed = parse_offer(sent, denied=by.terms.rules.models_denied)
        cached = cache.get_or_decide(parsed, NOON, on, history, by, plan_by).decision
        assert cached == decide(sent, NOON, on, history, by, plan_by)


@pytest.mark.parametrize(
    "changed",
    [
        {"now": NOON + CACHE_SECONDS},
        {"now": NOON - 3600},
        {"fleet": fleet("4xH100", hold("a", "01"))},
        {"policy": policy()},
        {"profile": profile()},
        {"history": SuccessHistory()},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_whatever_changed_it_is_decided_again(cache: CountingCache, changed: dict[str, Any]) -> None:
    cache.decide()
    cache.state.update(changed)
    cache.decide()
    assert cache.decided == 2


def test_a_job_that_ended_counts_at_once(cache: CountingCache) -> None:
    before = cache.decide()
    cache.state["history"].add(outcome(published=False))
    assert cache.decide().score != before.score


@pytest.mark.parametrize(
    "changes",
    [
        {"inventory": replace(fleet().inventory, problem="NVML is gone")},
        {"abilities": {"": BackendAbility(problem="Docker is gone")}},
    ],
)
def test_trouble_with_inventory_or_backend_counts_at_once(
    cache: CountingCache, changes: dict[str, Any]
) -> None:
    before = cache.decide()
    cache.state["fleet"] = replace(cache.state["fleet"], **changes)
    assert len(cache.decide().failed) > len(before.failed)


def test_no_more_than_so_many_refusals_are_cached(
    cache: CountingCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_runtime, "MAX_CACHED_REFUSALS", 2)
    for hours in (0.01, 0.02, 0.03, 0.03, 0.02, 0.01):
        cache.decide(hours_to_complete=hours)
    assert cache.decided == 4
