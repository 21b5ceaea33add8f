"""Check the cluster: Slurm's commands, its controller, what we may use of it, and a test job on a node."""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from miner.backends.slurm.commands import SlurmCommands, SlurmRefused, SlurmUnreachable, records
from miner.backends.slurm.nodes import NO_LIMIT, duration, gpu_counts
from miner.doctor.checks.cluster_job import (
    CONSTRAIN_FIX,
    TestJobFailed,
    job_findings,
    run_test_job,
    way_to_the_controller,
)
from miner.doctor.checks.training import reward_isolation, temporary_data_dir, trial_finding
from miner.doctor.examine import CheckContext, DoctorCheck, Finding, fail, is_healthy, ok, skip, warn
from miner.settings import EngineKind, Settings

PROGRAMS = ("sbatch", "scontrol", "squeue", "scancel")
OLDEST = (22, 5)
#: A test job that waits, and one that runs, are given up before; then comes the trial of the engine.
LIMIT_SECONDS = 480.0

HOUR = 3600.0

Fields = Mapping[str, str]


@dataclass(frozen=True)
class Cluster:
    """What the controller says."""

    config: Fields
    partitions: Sequence[Fields]
    nodes: Sequence[Fields]
    #: SLURM_NODES, each by its name.
    named: Sequence[str] = ()


def check_cluster(context: CheckContext) -> Iterator[Finding]:
    from miner.backends.registry import slurm_commands

    settings = context.settings
    if EngineKind.SLURM not in settings.engines:
        return
    commands = slurm_commands(settings)
    try:
        missing = [program for program in PROGRAMS if not _is_there(commands, program)]
        if missing:
            where = f"in {settings.slurm_bin_dir}" if settings.slurm_bin_dir else "on PATH"
            way = "install Slurm's client commands (Debian: slurm-client), or set SLURM_BIN_DIR"
            yield fail("slurm", f"there is no {', '.join(missing)} {where}", way)
            return
        cluster = _cluster(commands, settings.slurm_nodes)
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
        *configuration_findings(cluster.config, settings.slurm_poll_seconds),
    ]
    yield from site
    if not is_healthy(site):
        yield skip("slurm job", "no test job: correct the above first")
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
    """Here and at the controller, which is the newer of both."""
    ours = re.search(r"(\d+)\.(\d+)[.\w-]*", here)
    theirs = config.get("SLURM_VERSION", "unknown")
    detail = f"{config.get('ClusterName', 'the cluster')} answers; {here.strip()} here, {theirs} there"
    if ours is not None and (int(ours[1]), int(ours[2])) < OLDEST:
        return fail("slurm", detail, "god-miner needs Slurm 22.05 or newer")
    return ok("slurm", detail)


def partition_findings(
    settings: Settings, partitions: Sequence[Fields], groups: frozenset[str]
) -> Iterator[Finding]:
    what = "slurm partition"
    names = ", ".join(one["PartitionName"] for one in partitions) or "none"
    wanted = (settings.slurm_partition or "").split(",") if settings.slurm_partition else []
    used = [one for one in partitions if one["PartitionName"] in wanted]
    if not wanted:
        used = [one for one in partitions if one.get("Default") == "YES"]
        if not used:
            yield fail(
                what, "the cluster has no default partition", f"set SLURM_PARTITION; there are: {names}"
            )
    for name in wanted:
        if name not in [one["PartitionName"] for one in used]:
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
    """Why this user may not use it, as far as it says so itself; the test job finds out the rest."""
    for field, value, kind in (
        ("AllowAccounts", settings.slurm_account, "SLURM_ACCOUNT"),
        ("AllowQos", settings.slurm_qos, "SLURM_QOS"),
    ):
        allowed = partition.get(field, "ALL")
        if allowed != "ALL" and value and value not in allowed.split(","):
            return f"{kind}={value} may not use it ({field}={allowed})"
    for field, value in (("DenyAccounts", settings.slurm_account), ("DenyQos", settings.slurm_qos)):
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
    nodes = our_nodes(settings, cluster)
    unknown = sorted(set(cluster.named) - {node["NodeName"] for node in nodes})
    if unknown:
        yield fail(
            "slurm nodes",
            f"SLURM_NODES has nodes that the partition lacks: {', '.join(unknown)}",
            "see sinfo -N, and correct SLURM_NODES or SLURM_PARTITION",
        )
    features = sorted({name for node in nodes for name in _listed(node.get("AvailableFeatures", ""))})
    wanted = re.findall(r"[A-Za-z_][\w.-]*", settings.slurm_constraint or "")
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
    wanted = (settings.slurm_partition or "").split(",")
    used = {
        one["PartitionName"]
        for one in cluster.partitions
        if one["PartitionName"] in wanted or (not settings.slurm_partition and one.get("Default") == "YES")
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
    name = settings.slurm_reservation
    if not name:
        return
    try:
        found = list(records(_ask(commands, "scontrol", "-o", "show", "reservation", name)))
    except SlurmRefused as error:
        yield fail("slurm reservation", str(error), "correct SLURM_RESERVATION: scontrol show reservation")
        return
    for reservation in found:
        detail = f"{name} is {reservation.get('State', '?')}, on {reservation.get('Nodes', '?')}"
        if reservation.get("State") == "ACTIVE":
            yield ok("slurm reservation", detail)
        else:
            yield warn(
                "slurm reservation",
                f"{detail}: jobs wait for it",
                "take SLURM_RESERVATION out until it begins",
            )


def configuration_findings(config: Fields, poll_s: float) -> Iterator[Finding]:
    """What of the site's configuration matters to a training."""
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
    elif age < max(60, 4 * poll_s):
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


def _try_out(settings: Settings, commands: SlurmCommands, cluster: Cluster) -> Iterator[Finding]:
    nodes = [node for node in our_nodes(settings, cluster) if _is_usable(node)]
    # One that is free is there first.
    nodes.sort(key=lambda node: not node.get("State", "").startswith("IDLE"))
    with_gpu = settings.gpus != "cpu" and any(gpu_counts(node.get("Gres", "")) for node in nodes)
    with temporary_data_dir(settings) as temporary:
        try:
            facts = run_test_job(
                settings,
                commands,
                temporary.data_dir,
                python=_python(settings),
                node=nodes[0]["NodeName"] if cluster.named else "",
                with_gpu=with_gpu,
            )
        except TestJobFailed as error:
            yield error.finding
            return
    user = pwd.getpwuid(os.geteuid()).pw_name
    found = list(job_findings(settings, facts, user=user, with_gpu=with_gpu))
    yield from found
    if is_healthy(found):
        # As a training is started: its code, its Python, its container.
        yield trial_finding(settings, EngineKind.SLURM, gpus=("0",) if with_gpu else ())
        yield from reward_isolation(settings, EngineKind.SLURM)


def _python(settings: Settings) -> str:
    """What the engine takes for "python"; the same without the training stack on this machine."""
    from miner.backends.registry import NoEngine, training_interpreter

    try:
        return str(training_interpreter(settings).path)
    except NoEngine:
        return str(settings.trainer_python or "python3")


CLUSTER_CHECK = DoctorCheck("slurm", check_cluster, LIMIT_SECONDS)
