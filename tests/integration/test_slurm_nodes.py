"""The nodes of a real Slurm as the fleet sees them: others' jobs, drains, reservations."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from miner.backends.registry import ClusterContext
from miner.backends.slurm.commands import SlurmCommands, job_prefix
from miner.backends.slurm.gpu_source import ClusterScope, SlurmGpuSource
from miner.fleet.placement import FOREVER
from miner.fleet.sources import GpuScan, ScanFailed
from tests.doubles.required import missing
from tests.doubles.slurm import OwnSlurm, own_slurm, waited_for

HOUR = 3600


@pytest.fixture(scope="module")
def cluster() -> Iterator[OwnSlurm]:
    if os.geteuid():
        missing("root: jobs of another user")
    with own_slurm() as slurm:
        yield slurm


def source_of(slurm: OwnSlurm, **scope: Any) -> SlurmGpuSource:
    return SlurmGpuSource(
        ClusterScope(**scope),
        SlurmCommands(str(slurm.bin)),
        job_prefix("0123456789abcdef"),
        ClusterContext(kinds=dict, host=dict, is_in_use=lambda _: False, clock=time.time),
    )


async def scan_of(slurm: OwnSlurm, **scope: Any) -> GpuScan:
    return await source_of(slurm, **scope).scan()


def ends(scan: GpuScan) -> dict[str, list[float]]:
    """Node → the ends of its windows, of the slots that have one."""
    found: dict[str, list[float]] = {}
    for gpu in scan.gpus:
        found.setdefault(gpu.node, []).extend(until for _, until in gpu.busy)
    return found


async def test_others_jobs_have_gpus_until_their_limit_and_ours_are_not_counted(cluster: OwnSlurm) -> None:
    began = time.time()
    jobs = [
        cluster.others_job("--nodelist=n1", "--gpus-per-node=2", "--time=60"),
        cluster.others_job("--nodelist=n1", "--gpus-per-node=1"),
        cluster.others_job("--nodelist=n2", "--exclusive", "--time=30"),
        cluster.others_job(
            "--nodelist=n1", "--gpus-per-node=1", f"--job-name={job_prefix('0123456789abcdef')}k"
        ),
    ]
    try:
        scan = await scan_of(cluster)
        assert scan.source.startswith("Slurm ")
        assert [gpu.id for gpu in scan.gpus[:5]] == ["0@n1", "1@n1", "2@n1", "3@n1", "0@n2"]
        assert {gpu.kind.name for gpu in scan.gpus} == {"H100-SXM"}
        found = ends(scan)
        # Without a limit it is a year, or for ever.
        assert [until > began + 300 * 24 * HOUR for until in found["n1"]] == [False, False, True]
        assert all(began + HOUR - 1 <= until <= time.time() + HOUR + 1 for until in found["n1"][:2])
        assert len(found["n2"]) == 4
        assert await scan_of(cluster) == scan
    finally:
        cluster.run("scancel", *jobs)
    waited_for(lambda: not cluster.run("squeue", "-h"), "the jobs do not end")
    assert ends(await scan_of(cluster)) == {"n1": [], "n2": []}


async def test_drains_reservations_and_dead_nodes_are_seen(cluster: OwnSlurm) -> None:
    now = int(time.time())
    cluster.drain("n1", "bad disk = really")
    window = ("StartTime=now+7200", "Duration=60", "Users=root")
    cluster.run("scontrol", "create", "reservation", "ReservationName=kept", "Nodes=n2", *window)
    try:
        scan = await scan_of(cluster)
        assert {gpu.node: gpu.excluded for gpu in scan.gpus} == {
            "n1": "drained: bad disk = really",
            "n2": None,
        }
        (bounds,) = {gpu.busy for gpu in scan.gpus if gpu.node == "n2"}
        ((starts_at, ends_at),) = bounds
        assert now + 2 * HOUR - 1 <= starts_at <= time.time() + 2 * HOUR + 1
        assert ends_at == starts_at + HOUR
        ours = await scan_of(cluster, reservation="kept")
        assert {gpu.node for gpu in ours.gpus} == {"n2"}
        assert ours.gpus[0].busy == ((0.0, starts_at), (ends_at, FOREVER))
    finally:
        cluster.run("scontrol", "delete", "reservation=kept")
        cluster.resume("n1")
    cluster.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=no power")
    try:
        scan = await scan_of(cluster)
        assert {node.name: node.state for node in scan.nodes}["n2"] == "down: no power"
    finally:
        cluster.resume("n2")


async def test_a_wrong_partition_fails_the_scan(cluster: OwnSlurm) -> None:
    with pytest.raises(ScanFailed, match="SLURM_PARTITION names gone, and Slurm has train"):
        await scan_of(cluster, partitions=("gone",))
