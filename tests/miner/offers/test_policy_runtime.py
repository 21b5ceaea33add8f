"""What is in force when an offer comes, and what takes its place when its file is missing or broken."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from core.domain.errors import ConfigError
from core.domain.hardware import GpuSet, Hardware
from miner.offers.policy_runtime import PolicyRuntime
from miner.settings import load_settings
from tests.miner.fleet.setups import H100
from tests.miner.offers.builders import fleet, offer


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
