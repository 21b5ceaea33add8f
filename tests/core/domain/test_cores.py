"""A host's cores, divided among its GPUs."""

from __future__ import annotations

import itertools
import random

import pytest

from core.data.facts import assumed_facts
from core.domain.cores import cores_in, cores_of_job, show_cores
from core.domain.hardware import GPU_KINDS, GpuSet, Hardware
from core.domain.tasks import TaskType
from core.models.identify import facts_from_name
from core.planning.plan import TaskSpec
from core.planning.planner import plan_task
from core.profile.resolve import load_profile
from core.recipes.launch import launch_environment
from tests.core.recipes.cases import inputs

H100 = GPU_KINDS["H100-SXM"]


def machine(gpus: int, numbers: int, sockets: int = 1, threads: int = 1, **changes: object) -> Hardware:
    """Number cores as Linux does: all first threads, socket by socket, then all second ones."""
    physical = tuple(tuple(range(core, numbers, numbers // threads)) for core in range(numbers // threads))
    per_socket = len(physical) // sockets
    near = [
        show_cores(itertools.chain(*physical[per_socket * socket : per_socket * (socket + 1)]))
        for socket in range(sockets)
    ]
    facts = {
        "gpus": GpuSet(kind=H100, count=gpus),
        "cpu_cores": numbers,
        "cores": physical,
        "near_cores": tuple(near[index * sockets // gpus] for index in range(gpus)),
    }
    return Hardware.model_validate(facts | changes)


def shares(hardware: Hardware, wanted: str | None = None) -> list[str | None]:
    """Return the cores of jobs on one GPU each."""
    each = hardware.gpus.take(1)
    hosts = hardware.gpus.count
    return [
        cores_of_job(
            wanted, hardware.model_copy(update={"gpus": each, "host_gpus": hosts, "gpu_places": (place,)}), 1
        )
        for place in range(hosts)
    ]


@pytest.mark.parametrize("text", ["0", "0-63", "0-15,32-47", "3,5,7-8"])
def test_the_notation_is_dockers(text: str) -> None:
    assert show_cores(cores_in(text)) == text


@pytest.mark.parametrize(
    ("hardware", "wanted", "expected"),
    [
        # without any knowledge of the host: an even split of the range, by the GPUs' order
        (machine(4, 128, cores=(), near_cores=()), "0-63", ["0-15", "16-31", "32-47", "48-63"]),
        (machine(3, 8, cores=(), near_cores=()), "0-7", ["0-1", "2-4", "5-7"]),
        # two sockets: the near ones, with both threads of a core
        (machine(4, 128, 2, 2), None, ["0-15,64-79", "16-31,80-95", "32-47,96-111", "48-63,112-127"]),
        (machine(4, 128, 2, 2), "0-63", ["0-15", "16-31", "32-47", "48-63"]),
        # the range has none near to the last two GPUs: far ones are better than none
        (machine(4, 128, 2), "0-63", ["0-15", "32-47", "16-31", "48-63"]),
        (machine(4, 128, 2), "32-95", ["32-47", "48-63", "64-79", "80-95"]),
        # all GPUs on the first of two sockets: each has near cores and far ones
        (machine(2, 32, near_cores=("0-15", "0-15")), None, ["0-7,16-23", "8-15,24-31"]),
        # three GPUs on one socket and one on the other
        (
            machine(4, 48, near_cores=("0-23", "0-23", "0-23", "24-47")),
            None,
            ["0-7,36-39", "8-15,40-43", "16-23,44-47", "24-35"],
        ),
        # the daemon may use the last eight only, and the range names others
        (
            machine(2, 8, cores=tuple((core,) for core in range(56, 64)), near_cores=("", "")),
            "0-15",
            ["56-59", "60-63"],
        ),
        # nothing to divide
        (machine(4, 2), "0-1", ["0-1"] * 4),
    ],
)
def test_each_gpu_has_equally_many_cores_near_ones_first(
    hardware: Hardware, wanted: str | None, expected: list[str]
) -> None:
    assert shares(hardware, wanted) == expected


def test_jobs_on_different_gpus_never_share_a_core_whatever_the_host_looks_like() -> None:
    draw = random.Random(34)
    for _ in range(300):
        gpus, threads = draw.randint(1, 8), draw.choice([1, 2])
        cores = draw.randint(gpus, 64) * threads
        near = tuple(
            draw.choice(["", show_cores(draw.sample(range(cores), draw.randint(1, cores)))])
            for _ in range(gpus)
        )
        hardware = machine(gpus, cores, threads=threads, near_cores=near)
        divided = [cores_in(share) for share in shares(hardware, f"0-{cores - 1}") if share]
        assert frozenset().union(*divided) == frozenset(range(cores))
        assert sum(map(len, divided)) == cores
        assert max(map(len, divided)) - min(map(len, divided)) <= threads
        for core in hardware.cores:
            assert sum(not share.isdisjoint(core) for share in divided) == 1, "threads stay together"


def test_a_job_has_the_cores_of_all_its_gpus_and_one_with_the_host_for_itself_all() -> None:
    hardware = machine(4, 64, 2)
    two = hardware.model_copy(update={"gpus": hardware.gpus.take(2), "host_gpus": 4, "gpu_places": (1, 2)})
    assert cores_of_job("0-63", two, 2) == "16-47"
    assert cores_of_job(None, two, 2) == "16-47"
    assert cores_of_job("0-63", hardware, 4) == "0-63"
    assert cores_of_job(None, hardware, 4) is None
    assert cores_of_job(None, machine(4, 64, cores=()), 1) is None, "nothing is known of the cores"
    assert cores_of_job("0-1", machine(4, 2), 4) == "0-1", "fewer cores than GPUs"


@pytest.mark.parametrize("known", [False, True])
def test_four_jobs_of_one_host_divide_its_cores_loaders_threads_and_shared_memory(known: bool) -> None:
    """The profile names 64 cores and 128 GB of shared memory, for a job with all GPUs."""
    whole = machine(4, 128, 2, 2, memory_bytes=512 * 10**9)
    if not known:
        whole = whole.model_copy(update={"cores": (), "near_cores": ()})
    spec = TaskSpec(task_type=TaskType.INSTRUCT, hours=3)
    model, data = facts_from_name("meta-llama/Llama-3.1-8B-Instruct"), assumed_facts(spec.task_type, 20_000)
    profile = load_profile("h100x4")
    plans = [
        plan_task(
            spec,
            model,
            data,
            whole.model_copy(update={"gpus": whole.gpus.take(1), "host_gpus": 4, "gpu_places": (place,)}),
            profile,
        )
        for place in range(4)
    ]
    assert [plan.container.cpus for plan in plans] == ["0-15", "16-31", "32-47", "48-63"]
    for plan in plans:
        assert plan.verdict.feasible
        assert plan.loader.workers == 16
        assert launch_environment(plan, inputs())["OMP_NUM_THREADS"] == "16"
        assert plan.container.shm_bytes == 64 * 10**9
        gave_way = {one.field: one for one in plan.concessions}
        assert (gave_way["container.cpus"].wanted, gave_way["container.cpus"].got) == (
            "0-63",
            plan.container.cpus,
        )
        assert "1 of 4 GPUs" in gave_way["container.cpus"].reason
        assert "container.shm" in gave_way
