"""What is in force when an offer comes, and what is remembered of the last ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from core.errors import ConfigError
from core.hardware import CPU, GpuSet, Hardware
from core.tasks import TaskType
from core.wire import MinerTaskOffer
from miner.fleet.base import HoldKind
from miner.offers.judge import Judge
from miner.settings import load_settings
from tests.miner.fleet.setups import H100, cards, fleet, hold

BUSY = fleet(cards(4), [hold([0, 1, 2, 3], 0, 9e9, kind=HoldKind.JOB)])


def hardware(count: int = 4) -> Hardware:
    return Hardware(gpus=GpuSet(kind=H100, count=count))


def offer(model: str = "a/llama-8b", task_id: str = "t") -> MinerTaskOffer:
    return MinerTaskOffer(model=model, hours_to_complete=4, task_id=task_id, task_type=TaskType.INSTRUCT)


class Bench:
    def __init__(self, folder: Path, **settings: str) -> None:
        env = {"DATA_DIR": str(folder), **settings}
        self.alerts: list[str] = []
        self.texts: list[str] = []
        self.judge = Judge(load_settings(env=env, env_file=None), self._told)
        self.judge.refresh(hardware())

    def _told(self, kind: str, text: str) -> None:
        self.alerts.append(kind)
        self.texts.append(text)

    @property
    def rank(self) -> int | None:
        self.judge.refresh(hardware())
        return self.judge.profile.layers[-1].content.targets.lora_r


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def names(bench: Bench) -> tuple[str, str]:
    return bench.judge.policy.name, bench.judge.profile.name


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (hardware(8), ("h100x8", "h100x8")),
        (hardware(4), ("h100x4", "h100x4")),
        (Hardware(gpus=GpuSet(kind=CPU, count=1)), ("everything-feasible", "cpu-demo")),
    ],
)
def test_nobody_has_to_choose(tmp_path: Path, found: Hardware, expected: tuple[str, str]) -> None:
    bench = Bench(tmp_path)
    bench.judge.refresh(found)
    assert names(bench) == expected


def test_what_was_chosen_stays_while_the_cards_can_not_be_seen(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.judge.refresh(hardware(8))
    bench.judge.refresh(None)
    assert names(bench)[0] == "h100x8"


def test_the_operators_choice_counts_whatever_the_cards(tmp_path: Path) -> None:
    bench = Bench(tmp_path, POLICY="conservative", PROFILE="steady")
    bench.judge.refresh(hardware(8))
    assert names(bench) == ("conservative", "steady")


def test_a_policy_that_is_not_there_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such policy"):
        Bench(tmp_path, POLICY="nonexistent")


def test_an_edit_counts_at_the_next_refresh_and_a_bad_one_keeps_the_last(tmp_path: Path) -> None:
    folder = tmp_path / "policies"
    folder.mkdir()
    file = folder / "own.yaml"

    def write(text: str, tick: int) -> None:
        file.write_text(text)
        os.utime(file, ns=(tick * 10**9, tick * 10**9))

    write("extends: everything-feasible\nrules: {min_hours: 9}", 1)
    bench = Bench(tmp_path, POLICY="own")
    idle = fleet(cards(4))
    assert not bench.judge.decide(offer(), 0.0, idle).decision.accepted
    write("extends: everything-feasible", 2)
    bench.judge.refresh(hardware())
    assert bench.judge.decide(offer(), 0.0, idle).decision.accepted
    write("rules: [", 3)
    bench.judge.refresh(hardware())
    assert bench.judge.decide(offer(), 0.0, idle).decision.accepted
    assert bench.alerts == ["policy_problem"]
    assert "own.yaml" in str(bench.judge.problems["policy_problem"])
    assert bench.judge.problems["profile_problem"] is None
    file.unlink()
    bench.judge.refresh(hardware())
    assert bench.judge.decide(offer(), 0.0, idle).decision.accepted
    assert bench.alerts == ["policy_problem", "policy_problem"]


def write_profile(folder: Path, tick: int, **texts: str) -> None:
    (folder / "profiles").mkdir(exist_ok=True)
    for name, text in texts.items():
        file = folder / "profiles" / f"{name}.yaml"
        file.write_text(text)
        os.utime(file, ns=(tick * 10**9, tick * 10**9))


def test_a_file_added_under_the_name_in_force_is_followed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.rank == 512
    write_profile(tmp_path, 1, h100x4="extends: h100x4\ntargets: {lora_r: 64}")
    assert bench.rank == 64
    assert bench.alerts == []


def test_a_broken_file_at_the_start_gives_way_to_the_last_good_or_the_shipped_one(tmp_path: Path) -> None:
    write_profile(tmp_path, 1, h100x4="targets: {lora_rr: 1}", mine="targets: {lora_r: 48}")
    bench = Bench(tmp_path)
    assert bench.rank == 512
    assert bench.alerts == ["profile_problem"]
    assert "profile h100x4 cannot be used; the shipped h100x4 is in force instead" in bench.texts[0]
    assert "lora_rr" in bench.texts[0]
    write_profile(tmp_path, 2, h100x4="targets: {lora_r: 32}")
    assert bench.rank == 32
    assert Bench(tmp_path, PROFILE="mine").rank == 48
    write_profile(tmp_path, 3, mine="targets: {lora_rr: 2}")
    again = Bench(tmp_path, PROFILE="mine")
    assert again.rank == 48
    assert "what was last good of it" in again.texts[0]


def test_an_edit_of_a_profile_that_is_not_in_force_is_told(tmp_path: Path) -> None:
    write_profile(tmp_path, 1, other="targets: {lora_r: 1}")
    bench = Bench(tmp_path)
    assert bench.alerts == []
    write_profile(tmp_path, 2, other="targets: {lora_r: 2}")
    assert bench.rank == 512
    assert bench.rank == 512
    assert bench.alerts == ["profile_not_in_force"]
    why = "profile other is not in force; h100x4 is, because policy h100x4 names it and PROFILE is auto"
    assert f"{why}; PROFILE=other chooses it" in bench.texts[0]
