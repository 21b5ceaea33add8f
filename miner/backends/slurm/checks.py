"""Check the cluster: Slurm's commands, its controller, what we may use of it, and a trial run on a node."""

from __future__ import annotations

import asyncio
import atexit
import grp
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from miner.backends.slurm.commands import (
    SlurmCommands,
    SlurmRefused,
    SlurmUnreachable,
    records,
    slurm_commands,
)
from miner.backends.slurm.nodes import NO_LIMIT, duration, gpu_counts
from miner.backends.slurm.settings import SlurmSection
from miner.backends.trial import reward_isolation, trial_finding, trial_key
from miner.settings import BackendKind, Settings
from miner.support.findings import Finding, FindingStatus, fail, is_healthy, ok, skip, warn

PROGRAMS = ("sbatch", "scontrol", "squeue", "scancel")
OLDEST = (22, 5)
#: Two trial runs at their longest, each with its wait in the queue.
LIMIT_SECONDS = 480.0
#: How long a trial run may wait for a node: a full cluster is not a fault.
PENDING_S = 60.0
#: A controller that is busy may not answer at first.
CANCEL_ATTEMPTS = 3
CONSTRAIN_FIX = "ConstrainDevices=yes in cgroup.conf, with TaskPlugin=task/cgroup"

HOUR = 3600.0

Fields = Mapping[str, str]


@dataclass(frozen=True)
class Cluster:
    """Everything that the controller says of the cluster."""

    config: Fields
    partitions: Sequence[Fields]
    nodes: Sequence[Fields]
    #: SLURM_NODES, each by its name.
    named: Sequence[str] = ()


def check(settings: Settings) -> Iterator[Finding]:
    own = settings.section(SlurmSection)
    commands = slurm_commands(settings)
    try:
        missing = [program for program in PROGRAMS if not _is_there(commands, program)]
        if missing:
            where = f"in {own.slurm_bin_dir}" if own.slurm_bin_dir else "on PATH"
            way = "install Slurm's client commands (Debian: slurm-client), or set SLURM_BIN_DIR"
            yield fail("slurm", f"there is no {', '.join(missing)} {where}", way)
            return
        cluster = _cluster(commands, own.slurm_nodes)
    except SlurmUnreachable as error:
        yield fail("slurm", str(error), way_to_the_controller(str(error)))
        return
    except SlurmRefused as error:
        yield fail("slurm", str(error), "see that `scontrol show config` works for this user")
        return
    site = [
        version(_ask(commands, "scontrol", "--version"), cluster.config),
        *partition_findings(settings, cluster.partitions, _groups()),
        *node_findings(settings, cluster),
        *_reservation(settings, commands),
        *configuration_findings(cluster.config),
    ]
    yield from site
    if not is_healthy(site):
        yield skip("trial run", "not tried on a node: correct the above first")
        return
    yield from _try_out(settings, commands, cluster)


def _ask(commands: SlurmCommands, program: str, *arguments: str) -> str:
    return asyncio.run(commands.run(program, *arguments))


def _is_there(commands: SlurmCommands, program: str) -> bool:
    try:
        commands.path_of(program)
    except SlurmUnreachable:
        return False
    return True


def _cluster(commands: SlurmCommands, nodes: str | None) -> Cluster:
    config = _ask(commands, "scontrol", "show", "config")
    return Cluster(
        dict(_config_lines(config)),
        list(records(_ask(commands, "scontrol", "-o", "show", "partition"))),
        list(records(_ask(commands, "scontrol", "-o", "show", "node"))),
        _ask(commands, "scontrol", "show", "hostnames", nodes).split() if nodes else (),
    )


def _config_lines(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals:
            yield name.strip(), value.strip()


# What the controller says


def version(here: str, config: Fields) -> Finding:
    """Judge the versions here and at the controller, which is the newer one."""
    ours = re.search(r"(\d+)\.(\d+)[.\w-]*", here)
    theirs = config.get("SLURM_VERSION", "unknown")
    detail = f"{config.get('ClusterName', 'the cluster')} answers; {here.strip()} here, {theirs} there"
    if ours is not None and (int(ours[1]), int(ours[2])) < OLDEST:
        return fail("slurm", detail, "god-miner needs Slurm 22.05 or newer")
    return ok("slurm", detail)


def partition_findings(
    settings: Settings, partitions: Sequence[Fields], groups: frozenset[str]
) -> Iterator[Finding]:
    own = settings.section(SlurmSection)
    what = "slurm partition"
    names = ", ".join(partition["PartitionName"] for partition in partitions) or "none"
    wanted = (own.slurm_partition or "").split(",") if own.slurm_partition else []
    used = [partition for partition in partitions if partition["PartitionName"] in wanted]
    if not wanted:
        used = [partition for partition in partitions if partition.get("Default") == "YES"]
        if not used:
            yield fail(
                what, "the cluster has no default partition", f"set SLURM_PARTITION; there are: {names}"
            )
    for name in wanted:
        if name not in [partition["PartitionName"] for partition in used]:
            yield fail(
                what, f"{name} is unknown, or hidden from you", f"set SLURM_PARTITION to one of: {names}"
            )
    for partition in used:
        yield from _partition(settings, partition, groups)


def _partition(settings: Settings, partition: Fields, groups: frozenset[str]) -> Iterator[Finding]:
    what, name = "slurm partition", partition["PartitionName"]
    nodes = f"{name}, with the nodes {partition.get('Nodes', '')}"
    barred = _barred(settings, partition, groups)
    state = partition.get("State", "UP")
    if barred:
        yield fail(
            what, f"{name}: {barred}", "use what it allows, another SLURM_PARTITION, or ask its admins"
        )
    elif state != "UP":
        yield fail(
            what, f"{name} is {state}: its jobs do not begin", "wait for its admins, or use another partition"
        )
    else:
        yield ok(what, nodes)
    longest = duration(partition.get("MaxTime", ""))
    if longest != NO_LIMIT and (settings.max_hours is None or settings.max_hours * HOUR > longest):
        yield warn(
            "slurm time limit",
            f"{name} ends every job after {longest / HOUR:.3g} hours (MaxTime)",
            f"set MAX_HOURS={longest / HOUR:.3g} or less, so that longer offers are refused",
        )
    preempts = partition.get("PreemptMode", "OFF")
    if preempts not in ("OFF", ""):
        yield warn(
            "slurm preemption",
            f"{name} has PreemptMode={preempts}: jobs that go before ours can end a training",
            "use a partition or QOS that is not preempted; else trainings are tried again as time allows",
        )


def _barred(settings: Settings, partition: Fields, groups: frozenset[str]) -> str:
    """Say why this user may not use it, as far as Slurm tells; the trial run finds out the rest."""
    own = settings.section(SlurmSection)
    for field, value, kind in (
        ("AllowAccounts", own.slurm_account, "SLURM_ACCOUNT"),
        ("AllowQos", own.slurm_qos, "SLURM_QOS"),
    ):
        allowed = partition.get(field, "ALL")
        if allowed != "ALL" and value and value not in allowed.split(","):
            return f"{kind}={value} may not use it ({field}={allowed})"
    for field, value in (("DenyAccounts", own.slurm_account), ("DenyQos", own.slurm_qos)):
        if value and value in partition.get(field, "").split(","):
            return f"{value} may not use it ({field})"
    allowed = partition.get("AllowGroups", "ALL")
    if allowed != "ALL" and os.geteuid() and not groups & set(allowed.split(",")):
        return f"you are in none of its groups (AllowGroups={allowed})"
    if partition.get("RootOnly") == "YES" and os.geteuid():
        return "only root may use it (RootOnly)"
    return ""


def _groups() -> frozenset[str]:
    names = set()
    for number in {os.getegid(), *os.getgroups()}:
        try:
            names.add(grp.getgrgid(number).gr_name)
        except KeyError:
            continue
    return frozenset(names)


_UNUSABLE = re.compile(r"DOWN|DRAIN|FAIL|UNKNOWN|INVAL|NOT_RESPONDING|MAINT|POWERED_DOWN|FUTURE|\*")


def node_findings(settings: Settings, cluster: Cluster) -> Iterator[Finding]:
    own = settings.section(SlurmSection)
    nodes = our_nodes(settings, cluster)
    unknown = sorted(set(cluster.named) - {node["NodeName"] for node in nodes})
    if unknown:
        yield fail(
            "slurm nodes",
            f"SLURM_NODES has nodes that the partition lacks: {', '.join(unknown)}",
            "see sinfo -N, and correct SLURM_NODES or SLURM_PARTITION",
        )
    features = sorted({name for node in nodes for name in _listed(node.get("AvailableFeatures", ""))})
    wanted = re.findall(r"[A-Za-z_][\w.-]*", own.slurm_constraint or "")
    for name in wanted:
        if name not in features:
            there = f"the nodes have: {', '.join(features)}" if features else "the nodes have no features"
            yield fail(
                "slurm constraint", f"no node has the feature {name}", f"correct SLURM_CONSTRAINT; {there}"
            )
    usable = [node for node in nodes if _is_usable(node)]
    for node in (node for node in nodes if not _is_usable(node)):
        reason = re.sub(r"\s*\[(\w+)@\d+\]$", r" (\1)", node.get("Reason", "")) or "no reason is given"
        yield warn(
            "slurm nodes",
            f"{node['NodeName']} is {node.get('State', '?')}: {reason}",
            f"its admins return it: scontrol update nodename={node['NodeName']} state=resume",
        )
    gpus = sum(sum(gpu_counts(node.get("Gres", "")).values()) for node in usable)
    detail = f"{len(usable)} of {len(nodes)} can be used, with {gpus} GPUs"
    if not usable:
        yield fail("slurm nodes", detail, "see sinfo -R: its admins return nodes that are down or drained")
    elif not gpus and settings.gpus != "cpu":
        way = (
            "give the nodes Gres=gpu:… in slurm.conf and gres.conf (docs/slurm.md), or set GPUS=cpu to try it"
        )
        yield fail("slurm nodes", detail, way)
    else:
        yield ok("slurm nodes", detail)


def _is_usable(node: Fields) -> bool:
    return _UNUSABLE.search(node.get("State", "")) is None


def our_nodes(settings: Settings, cluster: Cluster) -> list[Fields]:
    """The nodes of the partitions that are used, and of SLURM_NODES."""
    own = settings.section(SlurmSection)
    wanted = (own.slurm_partition or "").split(",")
    used = {
        one["PartitionName"]
        for one in cluster.partitions
        if one["PartitionName"] in wanted or (not own.slurm_partition and one.get("Default") == "YES")
    }
    return [
        node
        for node in cluster.nodes
        if used & set(node.get("Partitions", "").split(","))
        and (not cluster.named or node["NodeName"] in cluster.named)
    ]


def _listed(text: str) -> list[str]:
    return [] if text in ("", "(null)") else text.split(",")


def _reservation(settings: Settings, commands: SlurmCommands) -> Iterator[Finding]:
    own = settings.section(SlurmSection)
    name = own.slurm_reservation
    if not name:
        return
    try:
        reservations = list(records(_ask(commands, "scontrol", "-o", "show", "reservation", name)))
    except SlurmRefused as error:
        yield fail("slurm reservation", str(error), "correct SLURM_RESERVATION: scontrol show reservation")
        return
    for reservation in reservations:
        detail = f"{name} is {reservation.get('State', '?')}, on {reservation.get('Nodes', '?')}"
        if reservation.get("State") == "ACTIVE":
            yield ok("slurm reservation", detail)
        else:
            yield warn(
                "slurm reservation",
                f"{detail}: jobs wait for it",
                "take SLURM_RESERVATION out until it begins",
            )


def configuration_findings(config: Fields) -> Iterator[Finding]:
    """Judge what matters to a training in the site's configuration."""
    select = config.get("SelectType", "")
    if "cons_tres" not in select:
        yield fail(
            "slurm GPUs",
            f"SelectType={select}: jobs cannot ask for some of a node's GPUs",
            "SelectType=select/cons_tres in slurm.conf",
        )
    tracker = config.get("ProctrackType", "unknown")
    if tracker == "proctrack/cgroup":
        yield ok("slurm processes", "a job's processes end with it (proctrack/cgroup)")
    else:
        yield warn(
            "slurm processes",
            f"ProctrackType={tracker}: a process that leaves its session goes on after the end of its job",
            "ProctrackType=proctrack/cgroup in slurm.conf",
        )
    if config.get("ConstrainDevices", "").lower() == "no":
        yield warn("slurm GPUs", "jobs can open the GPUs of others (ConstrainDevices=no)", CONSTRAIN_FIX)
    age = int(re.match(r"\d*", config.get("MinJobAge", ""))[0] or 300)  # type: ignore[index]
    accounted = config.get("AccountingStorageType", "").endswith("slurmdbd")
    forgotten = f"Slurm forgets an ended job after {age} s (MinJobAge)"
    if accounted:
        yield ok("slurm accounting", f"on; {forgotten}, sacct does not")
    elif age < 60:
        yield warn(
            "slurm accounting",
            f"off, and {forgotten}: one that left no exit file then counts as lost",
            "MinJobAge=300 in slurm.conf, or slurmdbd",
        )
    else:
        yield ok("slurm accounting", f"off; {forgotten}, and then only the exit file says how it ended")
    if "jobs" in config.get("PrivateData", "").split(","):
        yield warn(
            "slurm jobs of others",
            "they are hidden (PrivateData=jobs): when their GPUs become free is not known",
            "ask for the operator's or coordinator's role, or use a reservation of your own",
        )


# A node


#: Why Slurm lets it wait, by its own words: what to do. The first that matches; else it is shown as it is.
_WAITING: Sequence[tuple[str, str]] = (
    ("Held", "release it, or ask the cluster's admins why jobs of yours are held: scontrol show job"),
    ("Reservation", "SLURM_RESERVATION is not active, or not yours: scontrol show reservation"),
    ("PartitionTimeLimit", "the partition allows no job of this length: scontrol show partition"),
    ("PartitionNodeLimit", "the partition allows no job of this size: scontrol show partition"),
    ("Partition", "the partition is down or inactive: another SLURM_PARTITION, or ask its admins"),
    (
        "QOS|Assoc|Max|Grp|Account",
        "your account's limit is reached: sacctmgr show assoc user=$USER; sacctmgr show qos",
    ),
    ("ReqNodeNotAvail|Node|DOWN|DRAIN", "nodes are down, drained or reserved: sinfo -R"),
    ("BadConstraints", "no node has what is asked for: correct SLURM_CONSTRAINT and SLURM_OPTIONS"),
    ("Licenses", "the licenses that SLURM_OPTIONS asks for are in use"),
    ("BeginTime", "Slurm starts it again later: a node could not begin it (see slurmctld's log)"),
)
#: Others are before us: nothing is wrong.
_BUSY = re.compile(r"Resources|Priority|None|Cleaning")
#: Why sbatch refuses.
_REFUSED: Sequence[tuple[str, str]] = (
    (
        "policy",
        "your account allows no more, or wants SLURM_QOS: sacctmgr show assoc user=$USER; sacctmgr show qos",
    ),
    (
        "account",
        "set SLURM_ACCOUNT to one of: sacctmgr -P show assoc user=$USER format=account,partition,qos",
    ),
    ("qos", "set SLURM_QOS to one of: sacctmgr -P show assoc user=$USER format=account,partition,qos"),
    ("reservation", "correct SLURM_RESERVATION: scontrol show reservation"),
    ("feature", "correct SLURM_CONSTRAINT: sinfo -o '%N %f'"),
    ("partition", "correct SLURM_PARTITION: sinfo -s"),
    (
        "generic resource|gres|node configuration",
        "the nodes lack what is asked for: sinfo -N -o '%N %G %c %m'",
    ),
    ("limit", "your account allows no more: sacctmgr show assoc user=$USER; sacctmgr show qos"),
    ("option", "correct SLURM_OPTIONS: each must be one that this cluster's sbatch knows"),
)


def way_to_the_controller(message: str) -> str:
    """Say what to do if Slurm does not answer, by its own message."""
    if re.search("munge", message, re.IGNORECASE):
        return "start munge here (systemctl start munge), with the key of the cluster, and the same clock"
    if re.search("configuration", message, re.IGNORECASE):
        return "have the cluster's slurm.conf in /etc/slurm, or name it in SLURM_CONF"
    return "see that `scontrol ping` and `munge -n | unmunge` answer here; jobs that run go on meanwhile"


def _try_out(settings: Settings, commands: SlurmCommands, cluster: Cluster) -> Iterator[Finding]:
    """Start the smallest training on a node, with the code, Python and container of a real one."""
    own = settings.section(SlurmSection)
    nodes = [node for node in our_nodes(settings, cluster) if _is_usable(node)]
    with_gpu = settings.gpus != "cpu" and any(gpu_counts(node.get("Gres", "")) for node in nodes)
    patience = {"slurm_pending_seconds": min(PENDING_S, own.slurm_pending_seconds)}
    hurried = settings.model_copy(update=patience)
    key = trial_key()
    with _cancelled_at_exit(commands, key):
        gpus = ("0",) if with_gpu else ()
        trial = explained(trial_finding(hurried, BackendKind.SLURM, gpus, key))
    yield trial
    if trial.status is FindingStatus.OK:
        yield from reward_isolation(hurried, BackendKind.SLURM)


@contextmanager
def _cancelled_at_exit(commands: SlurmCommands, key: str) -> Iterator[None]:
    """Cancel the run's job if the program is interrupted, which does not wait for a check's thread."""

    def cancel() -> None:
        for _attempt in range(CANCEL_ATTEMPTS):
            with suppress(SlurmRefused, SlurmUnreachable):
                jobs = commands.run_blocking("squeue", "--noheader", f"--user={os.geteuid()}", "--format=%j")
                for name in jobs.split():
                    if name.endswith(key):
                        commands.run_blocking("scancel", f"--name={name}")
                return

    atexit.register(cancel)
    yield
    # Not after an error: an exit first ends the executors of threads, at which the trial in its thread fails.
    atexit.unregister(cancel)


def explained(trial: Finding) -> Finding:
    """Add the way out to a trial run that Slurm refused, or did not begin."""
    if trial.status is not FindingStatus.FAIL:
        return trial
    if waited := re.search(r"did not begin it within [^:]*: ([^;]*)", trial.detail):
        reason = waited[1].strip()
        if _BUSY.fullmatch(reason):
            busy = "run god-miner doctor again when a node is free: squeue --start"
            return warn(trial.what, f"{trial.detail}; others have the nodes, so nothing was tried", busy)
        return replace(trial, fix=_way_out(_WAITING, reason, "see `man squeue`, JOB REASON CODES"))
    if refused := re.search(r"(?:refused by Slurm|cannot be submitted): (.*)", trial.detail, re.DOTALL):
        return replace(trial, fix=_way_out(_REFUSED, refused[1], "correct the SLURM_ settings"))
    return trial


def _way_out(ways: Sequence[tuple[str, str]], text: str, otherwise: str) -> str:
    return next((way for pattern, way in ways if re.search(pattern, text, re.IGNORECASE)), otherwise)
