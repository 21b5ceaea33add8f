"""A cluster's nodes as JSON."""

from __future__ import annotations

from core.domain.hardware import GPU_KINDS, GpuSet, Hardware
from miner.api.fleet import GpuWindow
from miner.fleet.base import FleetNode, Gpu, InventoryState
from miner.fleet.node_view import node_entries, nodes_to_show, windows
from miner.fleet.placement import FOREVER

H100 = GPU_KINDS["H100-SXM"]
INSTALLED = Hardware(gpus=GpuSet(kind=H100, count=4))


def state_of(*gpus: Gpu) -> InventoryState:
    nodes = (
        FleetNode("", "docker", INSTALLED, INSTALLED),
        FleetNode("n1", "slurm", None, INSTALLED, "mixed"),
    )
    return InventoryState(gpus=(Gpu("GPU-1", 0, H100), *gpus), nodes=nodes)


def slot(index: int, *busy: tuple[float, float], out: str | None = None) -> Gpu:
    return Gpu(f"{index}@n1", index, H100, unusable_reason=out, node="n1", busy=busy)


def test_a_nodes_gpus_are_ours_others_or_free() -> None:
    state = state_of(slot(0), slot(1, (0.0, FOREVER)), slot(2, (0.0, 50.0)), slot(3, (100.0, 200.0)))
    (entry,) = node_entries(state, {"0@n1"}, 10.0)
    assert (entry.name, entry.backend, entry.kind) == ("n1", "slurm", "H100-SXM")
    assert (entry.state, entry.gpus) == ("mixed", 4)
    assert (entry.ours, entry.others, entry.free, entry.until) == (1, 2, 1, 50.0)
    assert entry.out is None


def test_a_node_is_out_when_all_of_its_gpus_are_and_of_interest_for_a_reason_of_its_own() -> None:
    (own,) = node_entries(state_of(slot(0, out="taken out: mixed"), slot(1, out="taken out: mixed")), (), 0.0)
    assert (own.out, own.state, own.free) == ("taken out: mixed", "mixed", 0)
    (limit,) = node_entries(state_of(slot(0, out="taken out: SLURM_MAX_GPUS=4")), (), 0.0)
    assert limit.state == "mixed; taken out: SLURM_MAX_GPUS=4"
    (idle,) = node_entries(state_of(slot(0), slot(1)), (), 0.0)
    (ours,) = node_entries(state_of(slot(0), slot(1)), {"0@n1"}, 0.0)
    entries = [own, limit, idle, ours]
    assert nodes_to_show(entries) == entries
    assert nodes_to_show([limit, idle, own, ours] * 8)[:9] == [ours] * 8 + [own]


def test_a_window_without_an_end_has_none() -> None:
    shown = windows(slot(0, (0.0, 5.0), (20.0, FOREVER)), 10.0)
    assert shown == [GpuWindow(starts_at=20.0, ends_at=None)]
