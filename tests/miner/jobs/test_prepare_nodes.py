"""Jobs on a fleet of this machine and a cluster's nodes, each with its own backend."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from core.data.facts import assumed_facts
from core.domain.decisions import Decision, TrainingWorth
from core.domain.hardware import GpuSet, Hardware, parse_gpus
from core.domain.job_states import EndReason, ProgressCallback
from core.domain.keys import Placement, TaskKey, gpu_on_node
from core.domain.tasks import ImageModelType, TaskType
from core.domain.wire import MinerTaskOffer
from core.models.identify import facts_from_name
from core.planning.plan import TrainingPlan
from core.profile.resolve import load_profile
from core.runs.progress import OomEvent
from core.runs.run_files import RunEnd
from miner.backends.base import EndCause
from miner.fleet.base import FleetNode, FleetSnapshot, Gpu, InventoryState
from miner.inputs.fetch import FetchedInputs, JobTask
from miner.jobs.tasks import OPERATOR
from miner.jobs.timeline import JobTimings
from miner.offers.decide import decide, training_worth
from miner.offers.history import SuccessHistory
from miner.offers.parsed_offer import parse_offer
from miner.offers.policies.load import load_policy
from miner.store.jobs import StartRequest
from tests.miner.jobs.harness import (
    VALIDATOR,
    CoroutineBackend,
    EndedBy,
    JobsHarness,
    Trainer,
    TrustedBackend,
    obeys,
    open_harness,
    request,
    waits,
)
from tests.miner.offers.builders import offer


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


LLAMA, HOURS = "meta-llama/Llama-3.1-8B", 4.0
JOB, OTHER = TaskKey(VALIDATOR, "t1"), TaskKey(VALIDATOR, "t2")
POLICY, HISTORY = load_policy("h100x4"), SuccessHistory()


def worth(
    asked: MinerTaskOffer, image_type: ImageModelType | None, fleet: FleetSnapshot, now: float
) -> TrainingWorth:
    parsed, terms = parse_offer(asked, image_type), POLICY.terms
    chances = HISTORY.chances(parsed.kinds, parsed.model.family, parsed.params, terms.success, now)
    return training_worth(parsed, terms, chances, fleet)


@pytest.fixture
async def by_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[JobsHarness]:
    """Four idle H100, and inputs as offers of four hours are assumed to have them."""
    timings = JobTimings(poll_s=0.01)
    async with open_harness(tmp_path / "data", timings, "4xH100", "h100x4", worth=worth) as harness:
        fetch = harness.inputs.fetch

        async def fetched(task: JobTask, on_progress: ProgressCallback) -> FetchedInputs:
            data = assumed_facts(TaskType.INSTRUCT, None, HOURS)
            return replace(await fetch(task, on_progress), model=facts_from_name(LLAMA), data=data)

        monkeypatch.setattr(harness.inputs, "fetch", fetched)
        harness.backend.default = waits
        yield harness


def accept(harness: JobsHarness, key: TaskKey) -> Decision:
    now = time.time()
    asked = offer(task_id=key.task_id, hours_to_complete=HOURS)
    fleet = harness.fleet.snapshot(now)
    decision = decide(asked, now, fleet, HISTORY, POLICY, load_profile("h100x4"))
    assert decision.accepted
    assert decision.placement is not None
    assert harness.fleet.reserve(key, decision.placement)
    return decision


async def gpus_of(harness: JobsHarness, job_id: int) -> tuple[str, ...]:
    await harness.until(lambda: bool(harness.backend.runs))
    return (await harness.attempts(job_id))[-1].gpus


async def test_a_job_gets_the_gpus_that_its_offer_reserved(by_value: JobsHarness) -> None:
    """Even if others came later and raised the price of a GPU, it keeps its own, and they keep theirs."""
    decision, other = accept(by_value, JOB), accept(by_value, OTHER)
    assert len(decision.placement.gpus) == 2 > len(other.placement.gpus)
    by_value.fleet.start(JOB, until=time.time() + HOURS * 3600)
    job = await by_value.start(seconds=HOURS * 3600, model=LLAMA)
    assert await gpus_of(by_value, job) == decision.placement.gpus
    (held,) = [hold for hold in by_value.fleet.ledger.reservations if hold.key == OTHER]
    assert held.gpus == other.placement.gpus


async def test_a_job_keeps_its_reserved_gpus_if_its_inputs_are_smaller_than_assumed(
    by_value: JobsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One GPU would complete them, but later: the other one costs nothing now."""
    decision, fetch = accept(by_value, JOB), by_value.inputs.fetch

    async def few_rows(task: JobTask, on_progress: ProgressCallback) -> FetchedInputs:
        return replace(await fetch(task, on_progress), data=assumed_facts(TaskType.INSTRUCT, 2_000))

    monkeypatch.setattr(by_value.inputs, "fetch", few_rows)
    by_value.fleet.start(JOB, until=time.time() + HOURS * 3600)
    job = await by_value.start(seconds=HOURS * 3600, model=LLAMA)
    assert await gpus_of(by_value, job) == decision.placement.gpus
    (attempt,) = await by_value.attempts(job)
    plan = TrainingPlan.from_json((Path(attempt.folder) / "plan.json").read_text(encoding="utf-8"))
    assert (plan.gpus.count, plan.steps.share) == (2, 1.0)


@pytest.mark.parametrize("another_waits", [False, True])
async def test_an_operators_task_has_the_host_until_another_waits(
    by_value: JobsHarness, another_waits: bool
) -> None:
    if another_waits:
        waiting = accept(by_value, OTHER).placement
        assert waiting is not None
        by_value.fleet.release(OTHER)
        later = replace(waiting, starts_at=time.time() + 600, ends_at=time.time() + 7200)
        assert by_value.fleet.reserve(OTHER, later)
    wanted = request("mine", model=LLAMA, hours_to_complete=HOURS)
    start = StartRequest(
        "mine", TaskType.INSTRUCT, LLAMA, HOURS, None, time.time(), json.dumps(wanted).encode()
    )
    job = (await by_value.jobs.start_own(start, OPERATOR)).job_id
    assert len(await gpus_of(by_value, job)) == (1 if another_waits else 4)
