"""What Slurm 22.05 (recorded) and 24.11 (after its documentation) print of nodes, jobs and reservations."""

from __future__ import annotations

import pytest

from miner.backends.slurm.nodes import (
    NO_LIMIT,
    JobShare,
    NodeSize,
    duration,
    expand_hosts,
    gpu_counts,
    least_size,
    parse_jobs,
    parse_nodes,
    parse_partitions,
    parse_reservations,
)

pytestmark = pytest.mark.process


NODES = """\
NodeName=n1 Arch=x86_64 CoresPerSocket=1  CPUAlloc=8 CPUEfctv=7 CPUTot=8 CPULoad=0.18 \
AvailableFeatures=h100,ib ActiveFeatures=h100,ib Gres=gpu:h100:4(S:0-1) GresDrain=N/A \
GresUsed=gpu:h100:3(IDX:0,2-3) NodeAddr=127.0.0.1 NodeHostName=host Port=17301 Version=22.05.8 OS=Linux \
6.18.44 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=1000 AllocMem=0 FreeMem=22872 Sockets=8 Boards=1 \
MemSpecLimit=100 State=ALLOCATED ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A \
Partitions=train,long  BootTime=1795457367 CfgTRES=cpu=8,mem=1000M,billing=8 AllocTRES=cpu=8
NodeName=n2 Arch=x86_64 CPUAlloc=0 CPUEfctv=8 CPUTot=8 ActiveFeatures=(null) Gres=gpu:4 GresUsed=gpu:0 \
Version=22.05.8 RealMemory=1 State=IDLE+DRAIN+MAINTENANCE+RESERVED Partitions=train  BootTime=1795457367 \
AllocTRES= CapWatts=n/a Reason=psu = 2, see ticket [root@1795488698]
NodeName=n3 CPUTot=4 Gres=(null) State=DOWN*+POWERED_DOWN Partitions=
"""

#: Of 22.05, recorded; the last two as 24.11 writes them.
JOBS = """\
JobId=1 JobName=a1 UserId=root(0) GroupId=root(0) JobState=RUNNING Reason=None RunTime=00:00:45 \
TimeLimit=01:00:00 StartTime=1795487426 EndTime=1795491026 Partition=train NodeList=n1 NumNodes=1 \
NumCPUs=1 NumTasks=1 TRES=cpu=1,node=1,billing=1 JOB_GRES=gpu:h100:2   Nodes=n1 CPU_IDs=0,4-5 Mem=2048 \
GRES=gpu:h100:2(IDX:0-1) MinCPUsNode=1 OverSubscribe=OK Command=(null) WorkDir=/a folder \
TresPerNode=gres:gpu:2
JobId=2 JobName=forever UserId=root(0) JobState=RUNNING TimeLimit=UNLIMITED StartTime=1795487426 \
EndTime=Unknown NodeList=n[1-2] NumNodes=2   Nodes=n1 CPU_IDs=1 Mem=0 GRES=gpu:h100:1(IDX:2)   Nodes=n2 \
CPU_IDs=0-7 Mem=0 GRES= MinCPUsNode=1
JobId=4 JobName=x JobState=RUNNING y UserId=root(0) JobState=PENDING Reason=Resources TimeLimit=00:30:00 \
StartTime=1795489226 EndTime=1795491026 NodeList= SchedNodeList=n2 NumNodes=1-1 NumCPUs=1 NumTasks=1 \
OverSubscribe=NO
JobId=6 JobName=planned UserId=root(0) JobState=PENDING Reason=Priority TimeLimit=00:10:00 \
StartTime=1795491600 EndTime=1795492200 NodeList= SchedNodeList=n[1-2] NumNodes=2-2 NumCPUs=3 NumTasks=2 \
OverSubscribe=OK TresPerJob=gres:gpu:7
JobId=7 JobName=tasks UserId=root(0) JobState=PENDING StartTime=1795492200 EndTime=1795492800 \
SchedNodeList=n2 NumNodes=1 NumCPUs=2 NumTasks=2 OverSubscribe=OK TresPerTask=gres/gpu:2
JobId=8 JobName=waits UserId=root(0) JobState=PENDING Reason=Priority StartTime=Unknown EndTime=Unknown \
NodeList= NumNodes=1 TresPerNode=gres/gpu:4
JobId=9 JobName=over UserId=root(0) JobState=COMPLETED StartTime=1795487426 EndTime=1795487430 \
NodeList=n1   Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:h100:4(IDX:0-3)
JobId=12 ArrayJobId=9 ArrayTaskId=2 JobName=arr UserId=ann(1000) JobState=COMPLETING StartTime=1795487444 \
EndTime=1795488044 NodeList=n2 ReqTRES=cpu=1,mem=1G,node=1,billing=1,gres/gpu=1 \
AllocTRES=cpu=1,mem=1G,node=1,billing=1,gres/gpu=1,gres/gpu:h100=1   Nodes=n2 CPU_IDs=2 Mem=1024 \
GRES=gpu:h100:1(IDX:2) TresPerNode=gres/gpu:h100:1
"""


def test_a_node_has_its_state_gpus_cores_and_memory() -> None:
    one, two, three = parse_nodes(NODES)
    assert (one.states, one.gpus, one.gpus_used) == ({"ALLOCATED"}, {"h100": 4}, {"h100": 3})
    assert (one.cores, one.memory_bytes, one.version) == (7, 900 * 2**20, "22.05.8")
    assert (one.features, one.partitions) == ({"h100", "ib"}, {"train", "long"})
    assert two.states == {"IDLE", "DRAIN", "MAINTENANCE", "RESERVED"}
    assert (two.reason, two.gpus, two.memory_bytes) == ("psu = 2, see ticket", {"": 4}, None)
    assert three.states == {"DOWN", "NOT_RESPONDING", "POWERED_DOWN"}
    assert (three.gpus, three.partitions, three.cores) == ({}, frozenset(), 4)


def test_jobs_that_have_nodes_or_are_planned_on_some_are_read_and_no_others() -> None:
    jobs = {job.id: job for job in parse_jobs(JOBS)}
    assert list(jobs) == ["1", "2", "4", "6", "7", "12"]
    assert jobs["1"].shares == {"n1": JobShare({"h100": 2}, 3, 2048 * 2**20)}
    assert (jobs["1"].starts_at, jobs["1"].ends_at, jobs["1"].is_running) == (1795487426, 1795491026, True)
    assert jobs["2"].shares == {"n1": JobShare({"h100": 1}, 1), "n2": JobShare({}, 8)}
    assert jobs["2"].ends_at == NO_LIMIT
    assert jobs["12"].name == "arr"


def test_what_a_waiting_job_will_have_is_what_it_asks_for() -> None:
    jobs = {job.id: job for job in parse_jobs(JOBS)}
    assert not jobs["4"].is_running
    assert jobs["4"].name == "x JobState=RUNNING y"
    assert jobs["4"].shares["n2"].whole_node
    assert jobs["6"].shares == dict.fromkeys(("n1", "n2"), JobShare({"": 4}, 2))
    assert jobs["7"].shares == {"n2": JobShare({"": 4}, 2)}


def test_reservations_and_partitions_have_their_bounds() -> None:
    (maintenance,) = parse_reservations(
        "ReservationName=maint StartTime=1795494626 EndTime=1795498226 Nodes=n[1-2] NodeCnt=2 "
        "Flags=MAINT,SPEC_NODES TRES=cpu=8 Users=root State=INACTIVE\n"
    )
    assert maintenance.nodes == {"n1", "n2"}
    assert (maintenance.starts_at, maintenance.ends_at) == (1795494626, 1795498226)
    assert not parse_reservations("No reservations in the system\n")
    train, long = parse_partitions(
        "PartitionName=train Default=YES MaxTime=1-00:00:00 Nodes=n[1-2] State=UP TotalCPUs=16\n"
        "PartitionName=long Default=NO MaxTime=UNLIMITED Nodes=n1 State=DRAIN TotalCPUs=8\n"
    )
    assert (train.is_default, train.longest_s, train.state) == (True, 86400, "UP")
    assert (long.is_default, long.longest_s, long.state) == (False, NO_LIMIT, "DRAIN")


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("gpu:h100:4(S:0-1),shard:8", {"h100": 4}),
        ("gpu:nvidia_h100_80gb_hbm3:8", {"nvidia_h100_80gb_hbm3": 8}),
        ("gpu:a100:3(IDX:0,2,3),gpu:1g.10gb:2(IDX:4-5)", {"a100": 3, "1g.10gb": 2}),
        ("gpu:4", {"": 4}),
        ("gres/gpu:h100=2", {"h100": 2}),
        ("gres:gpu", {"": 1}),
        ("(null)", {}),
        ("", {}),
    ],
)
def test_gpus_are_counted_by_type(text: str, counts: dict[str, int]) -> None:
    assert gpu_counts(text) == counts


def test_lists_of_nodes_are_expanded() -> None:
    assert expand_hosts("n[1-3,07-08],big7,r[1-2]x[0-1]") == (
        *("n1", "n2", "n3", "n07", "n08", "big7"),
        *("r1x0", "r1x1", "r2x0", "r2x1"),
    )
    assert expand_hosts("(null)") == ()


def test_durations_are_seconds() -> None:
    assert [duration(text) for text in ("30", "30:00", "01:00:00", "2-12:00:00")] == [
        1800,
        1800,
        3600,
        216000,
    ]
    assert [duration(text) for text in ("UNLIMITED", "", "Partition_Limit")] == [NO_LIMIT] * 3


SIZED = parse_nodes(
    "NodeName=n1 CPUTot=64 CPUEfctv=62 RealMemory=515000 MemSpecLimit=3000 Gres=gpu:h100:8(S:0-1) "
    "State=IDLE Partitions=train\n"
    "NodeName=n2 CPUTot=32 RealMemory=257000 Gres=gpu:a100:4,nvme:1 State=MIXED Partitions=train,short\n"
    "NodeName=n3 CPUTot=8 RealMemory=1000 Gres=(null) State=IDLE Partitions=short\n"
)
PARTITIONS = parse_partitions(
    "PartitionName=train Default=YES State=UP MaxTime=1-12:30:00\n"
    "PartitionName=short Default=NO State=UP MaxTime=5:00\n"
    "PartitionName=long Default=NO State=UP MaxTime=UNLIMITED\n"
)


def test_the_least_of_the_partitions_nodes_counts() -> None:
    assert least_size(SIZED, PARTITIONS, "", False) == NodeSize(32, 257_000 << 20, 4, "", 131_400.0)
    assert least_size(SIZED, PARTITIONS, "short,train", False) == NodeSize(8, 1000 << 20, 0, "", 300.0)
    assert least_size(SIZED, PARTITIONS, "long", False) is None
    assert least_size([], PARTITIONS, "", False) is None


def test_what_slurm_keeps_for_itself_is_not_offered() -> None:
    size = least_size(SIZED[:1], PARTITIONS, "long", True)
    assert size == NodeSize(62, 512_000 << 20, 8, "", None)


def test_where_a_node_has_several_types_the_one_that_it_has_most_of_is_named() -> None:
    nodes = parse_nodes("NodeName=n1 CPUTot=8 RealMemory=9 Gres=gpu:h100:2,gpu:1g.10gb:7 Partitions=train\n")
    size = least_size(nodes, PARTITIONS, "", True)
    assert (size.gpus, size.gpu_type) == (7, "1g.10gb")
