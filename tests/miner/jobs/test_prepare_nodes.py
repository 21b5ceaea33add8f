"""Jobs on a fleet of this machine and a cluster's nodes, each with its own backend."""

from __future__ import annotations

import time
from dataclasses import replace

from core.domain.hardware import GpuSet, Hardware, parse_gpus
from core.domain.job_states import EndReason
from core.domain.keys import Placement, TaskKey, gpu_on_node
from core.planning.plan import TrainingPlan
from core.runs.progress import OomEvent
from core.runs.run_files import RunEnd
from miner.backends.base import EndCause
from miner.fleet.base import FleetNode, Gpu, InventoryState
from tests.miner.jobs.harness import (
    VALIDATOR,
    CoroutineBackend,
    EndedBy,
    JobsHarness,
    Trainer,
    TrustedBackend,
    obeys,
)


class ClusterBackend(CoroutineBackend):
    name = "cluster"


def with_nodes(harness: JobsHarness, **nodes: str) -> ClusterBackend:
    """Give the harness these nodes with a second backend; the machine itself is the node `here`."""
    gpus, found = list[Gpu](), list[FleetNode]()
    for key, text in nodes.items():
        name = "" if key == "here" else key
        one = Hardware(gpus=parse_gpus(text), cpu_cores=16, memory_bytes=64 * 10**9)
        ids = [gpu_on_node(index, name) if name else str(index) for index in range(one.gpus.count)]
        gpus += [
            Gpu(gpu, index, one.gpus.kind, frozenset(ids) - {gpu}, None, name)
            for index, gpu in enumerate(ids)
        ]
        found.append(FleetNode(name, "cluster" if name else "", one, one))
    backend = ClusterBackend()
    assert isinstance(harness.services.backends, dict)
    assert isinstance(harness.services.trials, dict)
    harness.services.backends["cluster"] = backend
    harness.services.trials["cluster"] = TrustedBackend(backend, harness.folder)
    harness.fleet.update(InventoryState(tuple(gpus), tuple(found)))
    return backend


def trouble(harness: JobsHarness, job: int) -> str:
    live = harness.jobs.live(job)
    return live.trouble if live else ""


def plan_of(harness: JobsHarness, job: int) -> TrainingPlan:
    return TrainingPlan.from_json((harness.folder / f"jobs/{job}/attempt_1/plan.json").read_text())


async def test_each_job_runs_on_the_backend_of_its_node_with_a_plan_for_that_node(
    harness: JobsHarness,
) -> None:
    cluster = with_nodes(harness, here="2xH100", n1="4xH100")
    cluster.default = harness.backend.default = obeys
    first = await harness.start(task_id="t1")
    await harness.until(lambda: len(cluster.submitted) == 1)
    second = await harness.start(task_id="t2", name="repo-2")
    await harness.until(lambda: len(harness.backend.submitted) == 1)
    on_cluster, here = cluster.submitted[0], harness.backend.submitted[0]
    assert (on_cluster.nodes, len(on_cluster.gpus), plan_of(harness, first).gpus.count) == (("n1",), 4, 4)
    assert (here.nodes, here.gpus, plan_of(harness, second).gpus.count) == ((), ("0", "1"), 2)
    backends = [(await harness.attempts(job))[0].backend for job in (first, second)]
    assert backends == ["cluster", "coroutine"]
    for job in (first, second):
        await harness.jobs.cancel(job)
        await harness.over_within(job)
    assert not harness.fleet.is_in_use("0@n1")


async def test_an_accepted_offer_is_trained_on_the_nodes_reserved_for_it(harness: JobsHarness) -> None:
    cluster = with_nodes(harness, n1="4xH100", n2="2xA100")
    cluster.default = obeys
    now = time.time()
    where = Placement(("0@n2", "1@n2"), now, now + 3600)
    assert harness.fleet.reserve(TaskKey(VALIDATOR, "t1"), where)
    job = await harness.start(task_id="t1")
    await harness.until(lambda: len(cluster.submitted) == 1)
    assert cluster.submitted[0].nodes == ("n2",)
    assert plan_of(harness, job).gpus.kind.name == "A100-SXM-80GB"
    await harness.jobs.cancel(job)
    await harness.over_within(job)


async def test_after_memory_ran_out_a_plan_for_one_node_is_not_spread_over_two(
    harness: JobsHarness,
) -> None:
    cluster = with_nodes(harness, n1="4xH100", n2="2xH100", n3="2xH100")
    gpus, nodes = harness.fleet.inventory.gpus, harness.fleet.inventory.nodes

    async def oom_and_its_node_drains(trainer: Trainer) -> None:
        drained = tuple(gpu if gpu.node != "n1" else replace(gpu, unusable_reason="drained") for gpu in gpus)
        left = (replace(nodes[0], hardware=None), *nodes[1:])
        harness.fleet.update(InventoryState(drained, left))
        trainer.say(OomEvent(t=0, moment="train", text="tried to allocate 2 GiB"))
        trainer.end(RunEnd.OOM, "CUDA out of memory", "train")

    cluster.scripts = [oom_and_its_node_drains]
    await harness.done(await harness.start(task_id="t1"))
    first, second = cluster.submitted
    assert (first.nodes, len(first.gpus)) == (("n1",), 4)
    assert (second.nodes, len(second.gpus)) == (("n2",), 2)


async def test_a_job_waits_for_the_nodes_that_alone_can_train_it(harness: JobsHarness) -> None:
    cluster = with_nodes(harness, n1="4xH100", n2="2xH100")
    state, (large, small) = harness.fleet.inventory, harness.fleet.inventory.nodes
    drained = tuple(
        gpu if gpu.node != "n1" else replace(gpu, unusable_reason="drained") for gpu in state.gpus
    )
    kind = small.installed.gpus.kind.model_copy(update={"memory_bytes": 10**8})
    too_small = small.installed.model_copy(update={"gpus": GpuSet(kind=kind, count=2)})
    tiny = replace(small, installed=too_small, hardware=too_small)
    harness.fleet.update(InventoryState(drained, (replace(large, hardware=None), tiny)))
    job = await harness.start(task_id="t1")
    await harness.until(lambda: "only nodes like n1 can train it" in trouble(harness, job))
    harness.fleet.update(InventoryState(state.gpus, (large, tiny)))

    async def its_node_fails(_: Trainer) -> None:
        raise EndedBy(EndCause.NODE_FAIL, 137)

    cluster.scripts = [its_node_fails]
    await harness.done(job)
    assert [spec.nodes for spec in cluster.submitted] == [("n1",), ("n1",)]


async def test_a_job_that_waits_takes_nodes_that_come_back(harness: JobsHarness) -> None:
    cluster = with_nodes(harness, n1="2xH100", n2="2xA100")
    cluster.default = obeys
    state = harness.fleet.inventory
    gpus = tuple(gpu if gpu.node == "n1" else replace(gpu, unusable_reason="drained") for gpu in state.gpus)
    harness.fleet.update(InventoryState(gpus, (state.nodes[0], replace(state.nodes[1], hardware=None))))
    first = await harness.start(task_id="t1")
    await harness.until(lambda: len(cluster.submitted) == 1)
    second = await harness.start(task_id="t2", name="repo-2")
    await harness.until(lambda: "waits for" in trouble(harness, second))
    harness.fleet.update(state)
    await harness.until(lambda: len(cluster.submitted) == 2)
    assert [spec.nodes for spec in cluster.submitted] == [("n1",), ("n2",)]
    assert plan_of(harness, second).gpus.kind.name == "A100-SXM-80GB"
    for job in (first, second):
        await harness.jobs.cancel(job)
        await harness.over_within(job)


async def test_a_training_ends_before_others_use_its_node(harness: JobsHarness) -> None:
    cluster = with_nodes(harness, n1="2xH100")
    cluster.default = obeys
    free_until = time.time() + 1800
    gpus = tuple(
        replace(gpu, busy=((free_until, free_until + 7200),)) for gpu in harness.fleet.inventory.gpus
    )
    harness.fleet.update(replace(harness.fleet.inventory, gpus=gpus))
    job = await harness.start(task_id="t1", seconds=7200)
    await harness.until(lambda: len(cluster.submitted) == 1)
    spec = cluster.submitted[0]
    assert spec.free_s is not None
    assert 1700 < spec.free_s <= 1800
    row = (await harness.attempts(job))[0]
    assert row.end_by is not None
    assert row.end_by < free_until
    await harness.jobs.cancel(job)
    await harness.over_within(job)


async def test_after_a_node_has_failed_the_next_attempt_is_made_on_another(harness: JobsHarness) -> None:
    async def its_node_fails(_: Trainer) -> None:
        raise EndedBy(EndCause.NODE_FAIL, 137)

    cluster = with_nodes(harness, n1="4xH100", n2="4xH100")
    cluster.scripts = [its_node_fails]
    job = await harness.start(task_id="t1")
    await harness.done(job)
    assert await harness.ends(job) == [EndReason.NODE_FAILED, EndReason.TRAINED]
    assert [spec.nodes for spec in cluster.submitted] == [("n1",), ("n2",)]
