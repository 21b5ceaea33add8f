"""A cluster's nodes as GPUs: which may be used, and when others have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from core.domain.hardware import CPU, GpuSet
from miner.backends.registry import ClusterContext
from miner.backends.slurm import gpu_source as slurm_source
from miner.backends.slurm.commands import SlurmCommands, SlurmUnreachable
from miner.backends.slurm.gpu_source import ClusterScope, SlurmGpuSource
from miner.fleet.placement import FOREVER
from miner.fleet.sources import GpuScan, ScanFailed

pytestmark = pytest.mark.process


NOW = 1_800_000_000
HOUR = 3600
OURS = "god-miner-0123456789abcdef-"
TRAIN = "PartitionName=train Default=YES MaxTime=UNLIMITED Nodes=n[1-9] State=UP"


def node(name: str = "n1", gres: str = "gpu:h100:4", state: str = "IDLE", **more: object) -> str:
    fields = {"Partitions": "train", "GresUsed": "gpu:h100:0(IDX:N/A)", "Version": "24.11.5", **more}
    words = " ".join(f"{key}={value}" for key, value in fields.items() if key != "Reason")
    reason = f" Reason={more['Reason']} [root@1700000000]" if "Reason" in more else ""
    return f"NodeName={name} CPUEfctv=64 Gres={gres} RealMemory=512000 State={state} {words}{reason}"


def job(
    number: int,
    shares: dict[str, int],
    ends: int | None = NOW + HOUR,
    *,
    name: str = "theirs",
    cores: str = "0-15",
    memory: int = 0,
    state: str = "RUNNING",
    gpu: str = "h100",
) -> str:
    """A running job; `shares`: node → GPUs."""
    parts = "   ".join(
        f"Nodes={on} CPU_IDs={cores} Mem={memory} GRES={f'gpu:{gpu}:{count}(IDX:0)' if count else ''}"
        for on, count in shares.items()
    )
    return (
        f"JobId={number} JobName={name} UserId=ann(1000) JobState={state} TimeLimit=UNLIMITED "
        f"StartTime={NOW - HOUR} EndTime={'Unknown' if ends is None else ends} {parts} MinCPUsNode=1"
    )


def planned(number: int, on: str, gres: str, begins: int, ends: int, **more: str) -> str:
    extra = " ".join(f"{key}={value}" for key, value in more.items())
    return (
        f"JobId={number} JobName=waits UserId=ann(1000) JobState=PENDING StartTime={begins} EndTime={ends} "
        f"SchedNodeList={on} NumCPUs=1 NumTasks=1 TresPerNode={gres} {extra}"
    )


def reservation(name: str, nodes: str, begins: int, ends: int) -> str:
    return f"ReservationName={name} StartTime={begins} EndTime={ends} Nodes={nodes} Flags=MAINT State=ACTIVE"


@dataclass(frozen=True)
class PrintedSlurm(SlurmCommands):
    """Prints what a test writes down."""

    texts: dict[str, list[str]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    async def run(self, program: str, *arguments: str, **_: Any) -> str:
        self.calls.append(arguments[-1])
        if "away" in self.texts:
            raise SlurmUnreachable("Unable to contact slurm controller (connect failure)")
        return "\n".join(self.texts.get(arguments[-1], ["None in the system"]))


class Cluster:
    def __init__(self, *nodes: str, kinds: Callable[[], Mapping[str, str]] = dict, **scope: Any) -> None:
        self.slurm = PrintedSlurm(texts={"nodes": list(nodes or [node()]), "partitions": [TRAIN]})
        self.in_use: set[str] = set()
        self.now = float(NOW)
        self.source = SlurmGpuSource(
            ClusterScope(**scope),
            self.slurm,
            OURS,
            ClusterContext(
                kinds=kinds,
                host=lambda: {"disk_free_bytes": 7, "cpu_cores": 2, "cores": ((0, 1),), "memory_bytes": 1},
                is_in_use=lambda gpu: gpu in self.in_use,
                clock=lambda: self.now,
            ),
        )

    def show(self, what: str, *lines: str) -> Cluster:
        self.slurm.texts[what] = list(lines)
        return self

    async def scan(self) -> GpuScan:
        self.source._asked_at = -FOREVER  # as if half a minute had passed
        return await self.source.scan()

    async def busy(self) -> dict[str, tuple[tuple[float, float], ...]]:
        return {gpu.id: gpu.busy for gpu in (await self.scan()).gpus if gpu.busy}

    async def excluded(self) -> dict[str, str | None]:
        return {gpu.node: gpu.excluded for gpu in (await self.scan()).gpus}


RUNS = (NOW - HOUR, NOW + HOUR)


async def test_nodes_have_slots_of_their_gpus_kind_and_their_own_hardware() -> None:
    scan = await Cluster(
        node("n1"),
        node("n2", "gpu:nvidia_a100_80gb_pcie:2(S:0)", MemSpecLimit=2000, ActiveFeatures="x"),
        node("cpu1", "(null)"),
    ).scan()
    assert [gpu.id for gpu in scan.gpus] == ["0@n1", "1@n1", "2@n1", "3@n1", "0@n2", "1@n2"]
    assert [gpu.kind.name for gpu in scan.gpus[3:5]] == ["H100-SXM", "A100-PCIE-80GB"]
    assert scan.gpus[0].linked == {"1@n1", "2@n1", "3@n1"}
    assert [(one.name, one.backend, one.state) for one in scan.nodes] == [
        ("n1", "slurm", "idle"),
        ("n2", "slurm", "idle"),
    ]
    assert scan.nodes[1].facts == {
        "disk_free_bytes": 7,
        "cpu_cores": 64,
        "memory_bytes": 510_000 * 2**20,
        "cores": (),
    }
    assert scan.source == "Slurm 24.11.5, partition train"


@pytest.mark.parametrize(
    ("gres", "features", "kind"),
    [
        ("gpu:nvidia_h100_80gb_hbm3:8", "", "H100-SXM"),
        ("gpu:8", "ib,a100-sxm4-40gb", "A100-SXM-40GB"),
        ("gpu:a100_3g.40gb:2", "", "A100-SXM-80GB-40GB-SLICE"),
        ("gpu:1g.10gb:7", "h100", "H100-SXM-10GB-SLICE"),
        ("gpu:big:4", "", "H200"),
        ("gpu:potato:2,gpu:h100:1,gpu:l4:4", "", "L4"),
    ],
)
async def test_what_slurm_calls_a_gpu_names_its_kind(gres: str, features: str, kind: str) -> None:
    scan = await Cluster(node(gres=gres, ActiveFeatures=features), kinds=lambda: {"big": "H200"}).scan()
    assert {gpu.kind.name for gpu in scan.gpus} == {kind}


async def test_a_job_of_ours_has_the_whole_node_where_the_partition_gives_whole_nodes() -> None:
    cluster = Cluster(node("n1"), node("n2")).show("partitions", f"{TRAIN} OverSubscribe=EXCLUSIVE")
    cluster.in_use = {"0@n1"}
    left = await cluster.busy()
    assert left == dict.fromkeys(("1@n1", "2@n1", "3@n1"), ((0.0, FOREVER),))
    cluster.show("jobs", job(7, {"n1": 1}, name=f"{OURS}k"))
    assert await cluster.busy() == dict.fromkeys(left, ((0.0, NOW + HOUR),))
    cluster.in_use = set()
    assert await cluster.show("jobs").busy() == {}


async def test_an_unknown_kind_is_left_out_and_gpus_of_other_types_are_named() -> None:
    scan = await Cluster(node("n1", "gpu:4"), node("n2", "gpu:h100:4,gpu:v100:1")).scan()
    assert {gpu.node for gpu in scan.gpus} == {"n2"}
    assert [note for note in scan.notes if "n1" in note and "kinds: {gpu: H100}" in note]
    assert scan.nodes[0].state == "idle (not used: 1 v100)"


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        ("IDLE+DRAIN", "drained: bad disk"),
        ("MIXED+DRAIN", "draining: bad disk"),
        ("DOWN+NOT_RESPONDING", "down, not responding: bad disk"),
        ("IDLE+INVALID_REG", "has less than slurm.conf says: bad disk"),
        ("IDLE+CLOUD+POWERING_DOWN", "powering down: bad disk"),
        ("IDLE+MAINTENANCE+RESERVED", "idle, maintenance, reserved: bad disk"),
    ],
)
async def test_a_node_that_takes_no_jobs_is_shown_with_state_and_reason(state: str, shown: str) -> None:
    cluster = Cluster(node(state=state, Reason="bad disk"))
    assert await cluster.excluded() == {"n1": shown}
    assert (await cluster.scan()).nodes[0].state == shown


@pytest.mark.parametrize("state", ["IDLE", "MIXED", "IDLE+CLOUD+POWERED_DOWN", "IDLE+PLANNED"])
async def test_a_node_that_slurm_would_use_can_be_used(state: str) -> None:
    assert await Cluster(node(state=state)).excluded() == {"n1": None}


async def test_others_jobs_have_the_highest_slots_until_they_end() -> None:
    cluster = Cluster(node(GresUsed="gpu:h100:3(IDX:0-2)"))
    cluster.show("jobs", job(1, {"n1": 1}, None), job(2, {"n1": 2}))
    assert await cluster.busy() == {
        "3@n1": ((NOW - HOUR, FOREVER),),
        **dict.fromkeys(("1@n1", "2@n1"), (RUNS,)),
    }


async def test_our_own_jobs_are_not_busy_and_others_keep_off_their_slots() -> None:
    cluster = Cluster(node(GresUsed="gpu:h100:3(IDX:0-2)"))
    cluster.in_use = {"2@n1", "3@n1"}
    cluster.show("jobs", job(1, {"n1": 2}, name=OURS + "task-1"), job(2, {"n1": 1}))
    assert await cluster.busy() == {"1@n1": (RUNS,)}


async def test_a_job_of_ours_that_slurm_began_between_its_answers_is_nobody_elses() -> None:
    cluster = Cluster(node(GresUsed="gpu:h100:2(IDX:0-1)"))
    cluster.in_use = {"0@n1", "1@n1"}
    assert await cluster.busy() == {}


async def test_gpus_in_use_by_jobs_that_are_hidden_from_us_are_busy() -> None:
    cluster = Cluster(node(GresUsed="gpu:h100:1(IDX:0)"))
    assert await cluster.busy() == {"3@n1": ((0, FOREVER),)}


async def test_a_job_stays_on_its_slots_while_others_come_and_go() -> None:
    cluster = Cluster().show("jobs", job(1, {"n1": 2}))
    first = await cluster.busy()
    assert first.keys() == {"2@n1", "3@n1"}
    cluster.show("jobs", job(1, {"n1": 2}), job(2, {"n1": 1}, NOW + 9 * HOUR))
    assert await cluster.busy() == {**first, "1@n1": ((NOW - HOUR, NOW + 9 * HOUR),)}


async def test_equal_answers_give_equal_scans() -> None:
    cluster = Cluster(node(), node("n2"), max_gpus=5)
    cluster.show(
        "jobs",
        job(1, {"n1": 2, "n2": 1}),
        job(2, {"n1": 1}, NOW - 5),
        planned(3, "n2", "gres:gpu:2", NOW, NOW + 9),
    )
    cluster.show("partitions", TRAIN.replace("UNLIMITED", "1-00:00:00"))
    first = await cluster.scan()
    cluster.now += 0.4
    assert await cluster.scan() == first


async def test_a_job_past_its_end_has_its_gpus_a_little_longer() -> None:
    cluster = Cluster().show("jobs", job(1, {"n1": 4}, NOW - 30, state="COMPLETING"))
    ((_, until),) = (await cluster.busy())["0@n1"]
    assert NOW < until <= NOW + 120


async def test_cores_and_memory_of_others_block_slots_too() -> None:
    cluster = Cluster().show("jobs", job(1, {"n1": 0}, cores="0-63"))
    assert await cluster.busy() == {f"{slot}@n1": (RUNS,) for slot in range(4)}
    cluster.show("jobs", job(1, {"n1": 0}, cores="0-19"))  # 44 cores are left: two of our jobs of 16
    assert (await cluster.busy()).keys() == {"2@n1", "3@n1"}
    cluster.show("jobs", job(1, {"n1": 1}, cores="0-15", memory=400_000))
    assert (await cluster.busy()).keys() == {"1@n1", "2@n1", "3@n1"}


async def test_what_the_scheduler_has_planned_for_others_is_busy_then() -> None:
    then = (NOW + 2 * HOUR, NOW + 3 * HOUR)
    cluster = Cluster().show("jobs", job(1, {"n1": 2}), planned(2, "n1", "gres/gpu:1", *then))
    assert await cluster.busy() == {"2@n1": (RUNS,), "3@n1": (RUNS, then)}
    cluster.show("jobs", planned(3, "n1", "(null)", *then, OverSubscribe="NO"))
    assert await cluster.busy() == {f"{slot}@n1": (then,) for slot in range(4)}


async def test_reservations_of_others_are_busy_and_outside_ours_nothing_may_run() -> None:
    window = (NOW - 60, NOW + HOUR)
    nodes = (node(state="IDLE+MAINTENANCE+RESERVED"), node("n2"))
    cluster = Cluster(*nodes).show("reservations", reservation("maint", "n1", *window))
    assert await cluster.busy() == {f"{slot}@n1": (window,) for slot in range(4)}
    assert await cluster.excluded() == {"n1": None, "n2": None}
    ours = Cluster(*nodes, reservation="maint").show("reservations", reservation("maint", "n1", *window))
    assert await ours.busy() == {f"{slot}@n1": ((0, window[0]), (window[1], FOREVER)) for slot in range(4)}
    assert await ours.excluded() == {"n1": None}


async def test_the_partitions_longest_time_bounds_a_job() -> None:
    cluster = Cluster().show("partitions", TRAIN.replace("UNLIMITED", "06:00:00"))
    assert (await cluster.busy())["0@n1"] == ((NOW // 600 * 600 + 6 * HOUR, FOREVER),)


async def test_partition_nodes_and_constraint_say_which_nodes() -> None:
    nodes = [
        node("n1", ActiveFeatures="h100,ib"),
        node("n2", ActiveFeatures="h100", Partitions="train,other"),
        node("n3", Partitions="other"),
    ]

    async def meant(**scope: Any) -> list[str]:
        cluster = Cluster(*nodes, **scope)
        cluster.show("partitions", TRAIN, "PartitionName=other Default=NO MaxTime=UNLIMITED State=DOWN")
        return list(await cluster.excluded())

    assert await meant() == ["n1", "n2"]
    assert await meant(partitions=("other",)) == ["n2", "n3"]
    assert await meant(nodes="n[2-5]") == ["n2"]
    assert await meant(constraint="h100&ib") == ["n1"]
    assert await meant(constraint="ib|x") == ["n1"]
    assert await meant(constraint="[ib*2]") == ["n1", "n2"]


async def test_nothing_begins_in_a_partition_that_is_down() -> None:
    cluster = Cluster().show("partitions", TRAIN.replace("UP", "DOWN"))
    assert await cluster.excluded() == {"n1": "partition train is DOWN"}


@pytest.mark.parametrize(
    ("scope", "words"),
    [
        ({"partitions": ("gone",)}, "SLURM_PARTITION names gone, and Slurm has train"),
        ({"reservation": "mine"}, "SLURM_RESERVATION=mine"),
    ],
)
async def test_a_setting_that_slurm_does_not_know_is_a_problem(scope: dict[str, Any], words: str) -> None:
    with pytest.raises(ScanFailed, match=words):
        await Cluster(**scope).scan()


async def test_no_more_gpus_than_allowed_and_those_that_we_have_first() -> None:
    cluster = Cluster(node("n1"), node("n2"), node("n3", state="IDLE+DRAIN"), max_gpus=5)
    cluster.show("jobs", job(1, {"n1": 1}))

    async def usable() -> set[str]:
        return {gpu.id for gpu in (await cluster.scan()).gpus if gpu.excluded is None}

    first = await usable()
    assert first == {"0@n2", "1@n2", "2@n2", "3@n2", "0@n1"}
    cluster.in_use = {"1@n1"}
    cluster.show("jobs", job(2, {"n2": 1}))
    assert await usable() == {"1@n1", "0@n1", "0@n2", "1@n2", "2@n2"}


async def test_without_gpus_each_node_has_a_pretended_one() -> None:
    cluster = Cluster(node("n1", "(null)"), node("n2"), pretended=GpuSet(kind=CPU, count=1))
    cluster.show("jobs", job(1, {"n2": 4}, cores="0-63"))
    scan = await cluster.scan()
    assert [(gpu.id, gpu.kind.name, bool(gpu.busy)) for gpu in scan.gpus] == [
        ("cpu@n1", "cpu", False),
        ("cpu@n2", "cpu", True),
    ]


async def test_slurm_is_asked_rarely_and_soon_after_our_own_jobs_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at = [1000.0]
    monkeypatch.setattr(slurm_source.time, "monotonic", lambda: at[0])
    cluster = Cluster()
    calls = cluster.slurm.calls
    first = await cluster.source.scan()
    at[0] += slurm_source.REFRESH_S - 1
    assert await cluster.source.scan() is first
    assert sorted(calls) == ["jobs", "nodes", "partitions", "reservations"]
    cluster.in_use = {"0@n1"}
    await cluster.source.scan()
    assert len(calls) == 8
    cluster.in_use = set()
    at[0] += slurm_source.LEAST_S - 1
    await cluster.source.scan()
    assert len(calls) == 8
    at[0] += 1
    await cluster.source.scan()
    assert len(calls) == 12


async def test_a_controller_that_is_away_fails_the_scan_also_when_asked_again_at_once() -> None:
    cluster = Cluster().show("away")
    with pytest.raises(ScanFailed, match="Unable to contact"):
        await cluster.source.scan()
    calls = len(cluster.slurm.calls)
    with pytest.raises(ScanFailed):
        await cluster.source.scan()
    assert len(cluster.slurm.calls) == calls
    del cluster.slurm.texts["away"]
    assert len((await cluster.scan()).gpus) == 4


async def test_an_answer_that_is_not_understood_fails_the_scan_and_hides_no_job() -> None:
    cluster = Cluster().show(
        "jobs",
        "JobId=7 JobName=x UserId=u(1) JobState=RUNNING StartTime=1 EndTime=9 TimeLimit=1 "
        "Nodes=n[a-b] CPU_IDs=0-3 Mem=1 GRES=",
    )
    with pytest.raises(ScanFailed, match="not understood"):
        await cluster.source.scan()
