"""What the doctor says of the links between GPUs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from core.domain.hardware import GPU_KINDS
from miner.doctor.checks import training
from miner.doctor.checks.training import all_reduce_finding, check_links, idle_gpus, link_finding
from miner.doctor.examine import CheckContext
from miner.fleet.base import Gpu, InventoryState
from miner.settings import load_settings
from miner.support.findings import FindingStatus
from tests.doubles.each import each
from tests.miner.fleet.setups import inventory_of

NAMES = frozenset("0123")


def gpus(count: int = 4, linked: bool = True, **more: Any) -> list[Gpu]:
    kind = GPU_KINDS["H100-SXM"]
    return [
        Gpu(str(at), at, kind, NAMES - {str(at)} if linked else frozenset(), **more) for at in range(count)
    ]


@each(
    ("measured", "status", "says"),
    [
        ({"bytes_s": 330e9, "backend": "nccl", "processes": 4}, FindingStatus.OK, "330.0 GB/s"),
        ({"bytes_s": 12e9, "peer_access": False}, FindingStatus.WARN, "cannot reach each other"),
        ({"bytes_s": 1e9, "backend": "gloo"}, FindingStatus.WARN, "sees none of the GPUs"),
        ({"problem": "it had not ended after 120 s"}, FindingStatus.WARN, "had not ended"),
        ({"skipped": "no backend"}, FindingStatus.SKIP, "no backend"),
    ],
)
def test_a_measured_rate_is_judged_by_what_plans_count_on(
    measured: dict[str, Any], status: FindingStatus, says: str
) -> None:
    found = all_reduce_finding(gpus(), {"backend": "nccl", "processes": 4, **measured})
    assert found.status is status
    assert says in found.detail


def test_gpus_that_somebody_uses_are_not_measured() -> None:
    stock = inventory_of(gpus(), unclean=frozenset("1"), shared=frozenset("3"))
    assert [gpu.id for gpu in idle_gpus(stock)] == ["0", "2"]
    assert idle_gpus(InventoryState(tuple(gpus(unusable_reason="failed")))) == []


def test_boards_without_the_links_that_they_come_with_are_warned_of() -> None:
    assert link_finding(gpus()).status is FindingStatus.OK
    assert "fabric" in link_finding(gpus(linked=False)).fix


def test_beside_a_daemon_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the measurement for somebody else's use, and its GPUs out."""
    stock = inventory_of(gpus(), sees_memory=True)
    monkeypatch.setattr(training, "scan_once", lambda _: (SimpleNamespace(inventory=stock), "driver"))
    monkeypatch.setattr(training, "running_daemon", lambda _: {"pid": 1})
    context = CheckContext(load_settings(env={}, env_file=None, data_dir=tmp_path))
    found = {one.what: one.status for one in check_links(context)}
    assert found == {"links": FindingStatus.OK, "all-reduce": FindingStatus.SKIP}
