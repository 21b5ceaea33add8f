"""What is in force when an offer comes, and what takes its place when its file is missing or broken."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.domain.decisions import Decision
from core.domain.errors import ConfigError
from core.domain.hardware import GpuSet, Hardware
from core.domain.wire import MinerTaskOffer
from miner.fleet.base import BackendAbility
from miner.offers import policy_runtime
from miner.offers.decide import decide, decide_parsed
from miner.offers.history import SuccessHistory
from miner.offers.parsed_offer import parse_offer
from miner.offers.policy_runtime import CACHE_SECONDS, DecisionCache, PolicyRuntime
from miner.settings import load_settings
from tests.miner.fleet.setups import H100
from tests.miner.offers.builders import NOON, fleet, hold, offer, outcome, policy, profile
from tests.miner.offers.test_decide_properties import OFFERS, POLICIES


def hardware(count: int = 4) -> Hardware:
    return Hardware(gpus=GpuSet(kind=H100, count=count))


class Bench:
    """A runtime with its settings and its alerts."""

    def __init__(self, folder: Path, installed: Hardware | None = None, **settings: str) -> None:
        env = {"DATA_DIR": str(folder), **settings}
        self.alerts: list[str] = []
        self.texts: list[str] = []
        self.installed = installed or hardware()
        self.runtime = PolicyRuntime(load_settings(env=env, env_file=None), self._alert)
        self.refresh()

    def _alert(self, kind: str, text: str) -> None:
        self.alerts.append(kind)
        self.texts.append(text)

    def refresh(self) -> None:
        self.runtime.refresh(self.installed)

    @property
    def names(self) -> tuple[str, str]:
        return self.runtime.policy.name, self.runtime.profile.name

    @property
    def rank(self) -> int | None:
        self.refresh()
        return self.runtime.profile.layers[-1].content.targets.lora_r

    def accepts(self) -> bool:
        self.refresh()
        return self.runtime.decide(offer(hours_to_complete=4), 0.0, fleet()).decision.accepted


def write(file: Path, text: str, tick: int) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    os.utime(file, ns=(tick * 10**9, tick * 10**9))


def test_what_the_gpus_chose_stays_while_they_cannot_be_seen(tmp_path: Path) -> None:
    bench = Bench(tmp_path, hardware(8))
    assert bench.names == ("h100x8", "h100x8")
    bench.runtime.refresh(None)
    assert bench.names == ("h100x8", "h100x8")


def test_the_operators_choice_counts_whatever_the_gpus(tmp_path: Path) -> None:
    bench = Bench(tmp_path, hardware(8), POLICY="conservative", PROFILE="steady", MAX_JOBS="3")
    assert bench.names == ("conservative", "steady")
    assert bench.runtime.policy.terms.rules.max_jobs == 3
    with pytest.raises(ConfigError, match="no such policy"):
        Bench(tmp_path, POLICY="nonexistent")


def test_an_edit_counts_at_the_next_refresh_and_a_bad_one_keeps_the_last_good_policy(tmp_path: Path) -> None:
    file = tmp_path / "policies" / "own.yaml"
    write(file, "extends: everything-feasible\nrules: {min_hours: 9}", 1)
    bench = Bench(tmp_path, POLICY="own", MAX_JOBS="3")
    assert not bench.accepts()
    write(file, "extends: everything-feasible", 2)
    assert bench.accepts()
    write(file, "rules: [", 3)
    assert bench.accepts()
    assert bench.alerts == ["policy_problem"]
    assert "own.yaml" in str(bench.runtime.problems["policy_problem"])
    assert bench.runtime.problems["profile_problem"] is None
    file.unlink()
    for _ in range(3):
        assert bench.accepts()
    assert bench.alerts == ["policy_problem", "policy_problem"]
    assert "is gone" in bench.texts[1]
    assert bench.runtime.policy.terms.rules.max_jobs == 3


def test_a_file_added_under_the_name_in_force_is_followed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.rank == 512
    write(tmp_path / "profiles" / "h100x4.yaml", "extends: h100x4\ntargets: {lora_r: 64}", 1)
    assert bench.rank == 64
    assert bench.alerts == []


def test_the_last_good_or_the_shipped_file_replaces_one_that_is_broken_at_the_start(tmp_path: Path) -> None:
    shadow, own = tmp_path / "profiles" / "h100x4.yaml", tmp_path / "profiles" / "mine.yaml"
    write(shadow, "targets: {lora_rr: 1}", 1)
    bench = Bench(tmp_path)
    assert bench.rank == 512
    assert bench.alerts == ["profile_problem"]
    assert "profile h100x4 cannot be used; the shipped h100x4 is in force instead" in bench.texts[0]
    assert "lora_rr" in bench.texts[0]
    write(shadow, "targets: {lora_r: 32}", 2)
    assert bench.rank == 32
    write(own, "targets: {lora_r: 48}", 1)
    assert Bench(tmp_path, PROFILE="mine").rank == 48
    write(own, "targets: {lora_rr: 2}", 3)
    again = Bench(tmp_path, PROFILE="mine")
    assert again.rank == 48
    assert "what was last good of it" in again.texts[0]


def test_an_edit_of_a_profile_that_is_not_in_force_raises_one_alert(tmp_path: Path) -> None:
    other = tmp_path / "profiles" / "other.yaml"
    write(other, "targets: {lora_r: 1}", 1)
    bench = Bench(tmp_path)
    assert bench.alerts == []
    write(other, "targets: {lora_r: 2}", 2)
    assert (bench.rank, bench.rank) == (512, 512)
    assert bench.alerts == ["profile_not_in_force"]
    why = "profile other is not in force; h100x4 is, because policy h100x4 names it and PROFILE is auto"
    assert f"{why}; PROFILE=other chooses it" in bench.texts[0]


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
