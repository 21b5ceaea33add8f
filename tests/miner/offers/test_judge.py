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
        self.judge = Judge(
            load_settings(env=env, env_file=None), lambda kind, _text: self.alerts.append(kind)
        )
        self.judge.refresh(hardware())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def names(bench: Bench) -> tuple[str, str]:
    return bench.judge.policy.name, bench.judge.profile.name


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (hardware(8), ("h100x8", "h100x8")),
        (hardware(4), ("h100x4", "h100x4-strategy")),
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
    file.unlink()
    bench.judge.refresh(hardware())
    assert bench.judge.decide(offer(), 0.0, idle).decision.accepted
    assert bench.alerts == ["policy_problem", "policy_problem"]
