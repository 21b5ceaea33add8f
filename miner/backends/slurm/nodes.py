"""Read what `scontrol -o show …` prints of nodes, jobs, reservations and partitions, of Slurm 22.05 to 24.11.

Jobs are many: of a line only the few fields that count are looked for. Parse in a thread.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from miner.backends.slurm.commands import SlurmCommands, SlurmRefused, records, seconds

NO_LIMIT = float("inf")
_MIB = 2**20
#: Jobs that have their nodes.
_HOLDING = frozenset(
    {"RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
)
#: What `sinfo` and old releases append to a state.
_SUFFIXES = {"*": "NOT_RESPONDING", "~": "POWERED_DOWN", "#": "POWERING_UP", "%": "POWERING_DOWN"}
_SHARE = re.compile(r"(?:^|\s)Nodes=(\S+) CPU_IDs=(\S*) Mem=(\d+) GRES=(\S*)")
_WHO_AND_WHEN = re.compile(r"\s*\[\S+@\S+\]$")


@dataclass(frozen=True, slots=True)
class SlurmNode:
    name: str
    #: Its state and flags, such as {"IDLE", "DRAIN"}.
    states: frozenset[str]
    reason: str
    #: Type of GPU → how many; "" for GPUs without a type.
    gpus: Mapping[str, int]
    gpus_used: Mapping[str, int]
    cores: int
    #: None: the site does not say.
    memory_bytes: int | None
    features: frozenset[str]
    partitions: frozenset[str]
    version: str = ""

    @property
    def main_gpu_type(self) -> str:
        """The type of the GPUs that we use: a node's others are left to other users."""
        return max(self.gpus, key=lambda kind: (self.gpus[kind], kind), default="")


@dataclass(frozen=True, slots=True)
class JobShare:
    """The share of one node that a job has, or will have."""

    gpus: Mapping[str, int] = field(default_factory=dict)
    cores: int = 0
    memory_bytes: int = 0
    #: Nobody else runs there beside it.
    whole_node: bool = False


@dataclass(frozen=True, slots=True)
class AllocatedJob:
    """A job that has nodes, or that the scheduler has planned on some."""

    id: str
    name: str
    is_running: bool
    starts_at: float
    ends_at: float
    shares: Mapping[str, JobShare]


@dataclass(frozen=True, slots=True)
class SlurmReservation:
    name: str
    nodes: frozenset[str]
    starts_at: float
    ends_at: float


@dataclass(frozen=True, slots=True)
class SlurmPartition:
    name: str
    is_default: bool
    #: UP, DOWN, DRAIN or INACTIVE.
    state: str
    #: Of one job.
    longest_s: float
    #: Each job gets whole nodes (`OverSubscribe=EXCLUSIVE`).
    is_exclusive: bool = False


def parse_nodes(text: str) -> list[SlurmNode]:
    return [_node(fields) for fields in records(text) if "NodeName" in fields]


def _node(fields: Mapping[str, str]) -> SlurmNode:
    limit = _number(fields.get("MemSpecLimit"))
    memory = _number(fields.get("RealMemory")) - limit
    return SlurmNode(
        name=fields["NodeName"],
        states=_states(fields.get("State", "UNKNOWN")),
        reason=_WHO_AND_WHEN.sub("", fields.get("Reason", "")),
        gpus=gpu_counts(fields.get("Gres", "")),
        gpus_used=gpu_counts(fields.get("GresUsed", "")),
        cores=max(_number(fields.get("CPUEfctv") or fields.get("CPUTot")), 1),
        # 1 is the default of slurm.conf: nothing is said.
        memory_bytes=memory * _MIB if memory > 1 else None,
        features=_names(fields.get("ActiveFeatures", "")),
        partitions=_names(fields.get("Partitions", "")),
        version=fields.get("Version", ""),
    )


def _states(text: str) -> frozenset[str]:
    states = set()
    for part in text.split("+"):
        word = part.rstrip("*~#%!$@^-")
        states.add(word)
        states |= {_SUFFIXES[mark] for mark in part[len(word) :] if mark in _SUFFIXES}
    return frozenset(states)


def parse_jobs(text: str) -> list[AllocatedJob]:
    """The jobs that have nodes, and those that wait and are planned on some."""
    jobs = (_job(line) for line in text.splitlines())
    return [job for job in jobs if job is not None]


def _job(line: str) -> AllocatedJob | None:
    # A name may contain anything: fields are looked for behind it.
    head, _, rest = line.partition(" UserId=")
    rest = f" {rest}"
    state = _value(rest, "JobState")
    is_running = state in _HOLDING
    planned = _value(rest, "SchedNodeList") if state == "PENDING" else ""
    starts_at = seconds(_value(rest, "StartTime"))
    if starts_at is None or not (is_running or planned):
        return None
    number, _, name = head.removeprefix("JobId=").partition(" JobName=")
    return AllocatedJob(
        id=number.partition(" ")[0],
        name=name,
        is_running=is_running,
        starts_at=starts_at,
        ends_at=_end(rest, starts_at),
        shares=_running_shares(rest) if is_running else _planned_shares(rest, expand_hosts(planned)),
    )


def _end(line: str, starts_at: float) -> float:
    ends_at = seconds(_value(line, "EndTime"))
    return ends_at if ends_at is not None else starts_at + duration(_value(line, "TimeLimit"))


def _running_shares(line: str) -> dict[str, JobShare]:
    """By `show job -d`: a line per group of nodes with equal shares."""
    shares = {}
    for nodes, cores, memory, gres in _SHARE.findall(line):
        share = JobShare(gpu_counts(gres), _count_of_ids(cores), int(memory) * _MIB)
        shares.update(dict.fromkeys(expand_hosts(nodes), share))
    return shares


def _planned_shares(line: str, nodes: tuple[str, ...]) -> dict[str, JobShare]:
    """Nothing says what a waiting job will have of each node: what it asks for, evenly."""
    count = max(len(nodes), 1)
    tasks = max(_number(_value(line, "NumTasks")), 1)
    gpus = gpu_counts(_value(line, "TresPerNode"))
    for name, share in (("TresPerJob", 1 / count), ("TresPerTask", tasks / count)):
        for kind, asked in gpu_counts(_value(line, name)).items():
            gpus[kind] = max(gpus.get(kind, 0), -int(-asked * share // 1))
    cores = -(-_number(_value(line, "NumCPUs")) // count)
    whole = _value(line, "OverSubscribe") == "NO" or bool(gpu_counts(_value(line, "TresPerSocket")))
    return dict.fromkeys(nodes, JobShare(gpus, cores, 0, whole))


def parse_reservations(text: str) -> list[SlurmReservation]:
    return [
        SlurmReservation(
            fields["ReservationName"],
            frozenset(expand_hosts(fields.get("Nodes", ""))),
            seconds(fields.get("StartTime")) or 0.0,
            seconds(fields.get("EndTime")) or NO_LIMIT,
        )
        for fields in records(text)
        if "ReservationName" in fields
    ]


def parse_partitions(text: str) -> list[SlurmPartition]:
    return [
        SlurmPartition(
            fields["PartitionName"],
            fields.get("Default") == "YES",
            fields.get("State", "UP"),
            duration(fields.get("MaxTime", "")),
            fields.get("OverSubscribe") == "EXCLUSIVE",
        )
        for fields in records(text)
        if "PartitionName" in fields
    ]


def gpu_counts(text: str) -> dict[str, int]:
    """`gpu:h100:4(S:0-1),gpu:1g.10gb:2,shard:8`, `gres/gpu:4` or `gres:gpu:a100:2` by the GPUs' type."""
    counts: dict[str, int] = {}
    for item in re.sub(r"\([^)]*\)", "", text).split(","):
        name, *more = re.split(r"[:=]", re.sub(r"^gres[:/]", "", item))
        if name == "gpu":
            count = int(more.pop()) if more and more[-1].isdigit() else 1
            kind = ":".join(more)
            counts[kind] = counts.get(kind, 0) + count
    return counts


def expand_hosts(text: str) -> tuple[str, ...]:
    """`n[1-3,07-08],big7` as names."""
    if text in ("", "(null)"):
        return ()
    return tuple(name for part in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text) for name in _expand(part))


def _expand(part: str) -> Iterator[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    ranges, _, after = rest.partition("]")
    for numbers in ranges.split(","):
        first, _, last = numbers.partition("-")
        for number in range(int(first), int(last or first) + 1):
            for end in _expand(after):
                yield f"{before}{number:0{len(first)}}{end}"


def duration(text: str) -> float:
    """`1-12:00:00` or `30:00`, in seconds; without a limit: for ever."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in (days or "0", *parts)):
        return NO_LIMIT
    total = 0
    for part in parts:
        total = 60 * total + int(part)
    return float(int(days or 0) * 86400 + total * (60 if len(parts) == 1 else 1))


def _value(line: str, name: str) -> str:
    _, _, rest = line.partition(f" {name}=")
    value = rest.partition(" ")[0]
    return "" if value == "(null)" else value


def _number(text: str | None) -> int:
    number = re.match(r"\d+", text or "")
    return int(number[0]) if number else 0


def _names(text: str) -> frozenset[str]:
    return frozenset(name for name in text.split(",") if name and name != "(null)")


def _count_of_ids(text: str) -> int:
    """Count the numbers that `0-3,8` names."""
    total = 0
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            total += int(last or first) - int(first) + 1
    return total


# What the nodes offer a job


#: How long an answer is taken as current.
FRESH_S = 300.0


@dataclass(frozen=True, slots=True)
class NodeSize:
    """The least of several nodes."""

    cpus: int
    memory_bytes: int
    #: Of the type that a node has most of; which one, where a node has others too.
    gpus: int
    gpu_type: str
    #: The partition's longest time, or None if it has no limit.
    limit_s: float | None


class NodeSizes:
    def __init__(self, commands: SlurmCommands) -> None:
        self._commands = commands
        self._known: dict[tuple[str, str], tuple[NodeSize | None, float]] = {}

    async def least(self, nodes: Sequence[str], partition: str) -> NodeSize | None:
        """The least of these nodes or of the whole partition, or None if there is no such node."""
        key = (",".join(nodes), partition)
        size, until = self._known.get(key, (None, 0.0))
        if time.monotonic() < until:
            return size
        show = ("--all", "--oneliner", "show")
        try:
            shown = await self._commands.run("scontrol", *show, "nodes", *[key[0]] * bool(nodes))
            partitions = await self._commands.run("scontrol", *show, "partitions")
        except SlurmRefused:
            return None  # there is no such node; sbatch says so too
        size = least_size(parse_nodes(shown), parse_partitions(partitions), partition, bool(nodes))
        self._known[key] = size, time.monotonic() + FRESH_S
        return size

    async def one_of(self, nodes: str, partition: str) -> tuple[str, ...]:
        """One of these nodes (as Slurm writes several), with room if any has it; empty if there are none."""
        chosen = [f"--nodes={nodes}"] + [f"--partition={partition}"] * bool(partition)
        text = await self._commands.run("sinfo", "--noheader", "--Node", "--format=%N %t", *chosen)
        states = dict(line.split()[:2] for line in text.splitlines() if " " in line)
        free = (node for node, state in states.items() if state in ("idle", "mix"))
        return tuple(filter(None, [next(free, next(iter(states), ""))]))


def least_size(
    nodes: Sequence[SlurmNode], partitions: Sequence[SlurmPartition], named: str, chosen: bool
) -> NodeSize | None:
    """The least node of the partitions `named`, with commas, or of the default one. `chosen`: of these nodes,
    whatever their partition."""
    default = {partition.name for partition in partitions if partition.is_default}
    names = set(named.split(",")) if named else default
    usable = [node for node in nodes if chosen or node.partitions & names]
    if not usable:
        return None
    longest = (partition.longest_s for partition in partitions if partition.name in names)
    limits = [limit_s for limit_s in longest if limit_s != NO_LIMIT]
    mixed = [node for node in usable if len(node.gpus) > 1]
    return NodeSize(
        min(node.cores for node in usable),
        min(node.memory_bytes or 0 for node in usable),
        min(max(node.gpus.values(), default=0) for node in usable),
        mixed[0].main_gpu_type if mixed else "",
        min(limits, default=None),
    )
