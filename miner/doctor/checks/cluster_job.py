"""Submit one small job to Slurm, and report what it finds on its node.

It is cancelled on every end. If the doctor itself is killed, its deadline and time limit remove it.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import re
import secrets
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from miner.backends.slurm.commands import SUBMIT_S, SlurmCommands, SlurmRefused, SlurmUnreachable, records
from miner.doctor.checks.machine import GIB, OFF_SECONDS, SYNC_FIX, WRONG_SECONDS
from miner.doctor.examine import Finding, fail, ok, skip, warn
from miner.settings import SandboxKind, Settings

#: Told apart from trainings by its name.
NAME_PREFIX = "god-miner-doctor-"
#: How long it may wait for a node, and then take; Slurm counts in minutes.
PENDING_S, RUNNING_S, LIMIT_MINUTES = 60.0, 120.0, 2
POLL_S = 0.5
#: A file system may show another machine's files late.
SEEN_S, SLOW_S = 60.0, 5.0
#: Exit codes of its script.
NOT_THERE, NOT_WRITABLE = 72, 73
#: NCCL and data loaders share memory through it.
ENOUGH_SHM = 8 * GIB
#: A node's own disk: caches of the compiler, sockets.
TEMPORARY_SPACE = 5 * GIB
CONSTRAIN_FIX = "ConstrainDevices=yes in cgroup.conf, with TaskPlugin=task/cgroup"
GPU_FIX = "correct the driver or gres.conf on the node; see god-miner fleet show"

# A shell is all that it needs: it has to say what else is missing. `gpus`: those that can be opened.
_SCRIPT = """#!/bin/sh
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
cd {place} 2>/dev/null || exit {not_there}
token=$(cat from-here 2>/dev/null) || exit {not_there}
fact() {{ printf '%s=%s\\n' "$1" "$2"; }}
free() {{ df -Pk "$1" 2>/dev/null | awk 'NR == 2 {{ print $4 }}'; }}
{{
    fact token "$token"
    fact node "${{SLURMD_NODENAME:-$(hostname)}}"
    fact user "$(id -un)"
    fact now "$(date +%s.%N)"
    fact cuda "$CUDA_VISIBLE_DEVICES"
    fact gpus "$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')"
    fact driver "$(command -v nvidia-smi >/dev/null && nvidia-smi -L 2>&1 | head -n 1 || echo no nvidia-smi)"
    fact tmp "$(free /tmp)"
    fact shm "$(free /dev/shm)"
    fact python "$({python} -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>&1 | tail -n 1)"
    fact sandbox "$(bwrap --unshare-all --ro-bind / / --proc /proc --dev /dev true 2>&1 && echo works)"
    fact container "$({container})"
}} >from-there.new 2>/dev/null || exit {not_writable}
mv from-there.new from-there || exit {not_writable}
"""

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


class TestJobFailed(Exception):
    """It found out nothing; the finding says why."""

    __test__ = False

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.detail)
        self.finding = finding


@dataclass(frozen=True)
class JobFacts:
    """What the job wrote, and when by our clock: submitted, and its file seen."""

    values: Mapping[str, str]
    submitted_at: float
    seen_at: float
    #: How long its file was not there yet after Slurm had said that it ended.
    late_s: float

    @property
    def node(self) -> str:
        return self.values.get("node", "the node")


def run_test_job(
    settings: Settings,
    commands: SlurmCommands,
    place: Path,
    *,
    python: str,
    node: str = "",
    with_gpu: bool,
) -> JobFacts:
    """Run it with our settings, in a shared directory; `TestJobFailed`."""
    token = secrets.token_hex(8)
    (place / "from-here").write_text(token)
    name = NAME_PREFIX + token
    begun = time.time()
    with _cancelled_at_the_end(commands, name):
        try:
            job = (
                _ask(
                    commands,
                    "sbatch",
                    *_options(settings, name, node, with_gpu),
                    script=_script(settings, place, python),
                    limit_s=SUBMIT_S,
                )
                .split(";")[0]
                .strip()
            )
            ended = _wait_for_end(commands, job)
        except SlurmRefused as error:
            raise TestJobFailed(refused(str(error))) from None
        except SlurmUnreachable as error:
            raise TestJobFailed(fail("slurm job", str(error), way_to_the_controller(str(error)))) from None
    return _facts(ended, place, token, begun)


def _options(settings: Settings, name: str, node: str, with_gpu: bool) -> Iterator[str]:
    yield from ("--parsable", f"--job-name={name}", "--nodes=1", "--ntasks=1", "--cpus-per-task=1")
    # Slurm ends it even if nobody is there to cancel it; without --mem it would ask for the whole node's.
    yield f"--deadline=now+{round(PENDING_S + RUNNING_S) + 60 * LIMIT_MINUTES}"
    yield from ("--mem=256M", f"--time={LIMIT_MINUTES}", "--no-requeue", "--export=ALL")
    # Not the shared directory, which the node may lack: then the job itself can say so.
    yield from ("--chdir=/", "--output=/dev/null")
    if with_gpu:
        yield "--gpus-per-node=1"
    if node:
        yield f"--nodelist={node}"
    for option in ("partition", "account", "qos", "constraint", "reservation"):
        value = getattr(settings, f"slurm_{option}")
        if value:
            yield f"--{option}={value}"
    yield from settings.slurm_options


def _script(settings: Settings, place: Path, python: str) -> str:
    return _SCRIPT.format(
        place=shlex.quote(str(place)),
        python=shlex.quote(python),
        container=_container_test(settings.slurm_container or ""),
        not_there=NOT_THERE,
        not_writable=NOT_WRITABLE,
    )


def _container_test(container: str) -> str:
    """A shell command that prints what is wrong with the container on the node, or nothing."""
    kind, _, image = container.partition(":")
    image = shlex.quote(image)
    if kind == "apptainer":
        return (
            "command -v apptainer >/dev/null || echo there is no apptainer; "
            f"[ -r {image} ] || echo {image} cannot be read"
        )
    if kind == "pyxis":
        return "command -v enroot >/dev/null || echo there is no enroot"
    return "true"


@contextmanager
def _cancelled_at_the_end(commands: SlurmCommands, name: str) -> Iterator[None]:
    """By name: sbatch may have been accepted without our having its answer.

    Also when the program is interrupted while this is running: nobody waits for its thread.
    """

    def cancel() -> None:
        with suppress(SlurmRefused, SlurmUnreachable):
            _ask(commands, "scancel", f"--name={name}")

    atexit.register(cancel)
    try:
        yield
    finally:
        atexit.unregister(cancel)
        cancel()


def _ask(commands: SlurmCommands, program: str, *arguments: str, **more: str | float) -> str:
    return asyncio.run(commands.run(program, *arguments, **more))  # type: ignore[arg-type]


def _wait_for_end(commands: SlurmCommands, job: str) -> Mapping[str, str]:
    """The job as Slurm has it once it has ended; empty if Slurm has forgotten it already."""
    waits_until = time.monotonic() + PENDING_S
    runs_until = waits_until + RUNNING_S
    while True:
        try:
            found = next(records(_ask(commands, "scontrol", "-o", "show", "job", job)), {})
        except SlurmRefused as error:
            if "Invalid job id" in str(error):
                return {}
            raise
        state, reason = found.get("JobState", ""), found.get("Reason", "None")
        if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STAGE_OUT"):
            return found
        if state == "PENDING" and (
            time.monotonic() > waits_until or re.search("Held|BadConstraints", reason)
        ):
            raise TestJobFailed(waiting(reason, PENDING_S))
        if time.monotonic() > runs_until:
            detail = f"{job} on {found.get('NodeList', '?')} is still {state} after {RUNNING_S:g} s"
            way = "the shared directory or the driver hangs there: log in, and try `df` and `nvidia-smi`"
            raise TestJobFailed(fail("slurm job", detail, way))
        time.sleep(POLL_S)


def way_to_the_controller(message: str) -> str:
    """What to do where Slurm does not answer, by its own message."""
    if re.search("munge", message, re.IGNORECASE):
        return "start munge here (systemctl start munge), with the key of the cluster, and the same clock"
    if re.search("configuration", message, re.IGNORECASE):
        return "have the cluster's slurm.conf in /etc/slurm, or name it in SLURM_CONF"
    return "see that `scontrol ping` and `munge -n | unmunge` answer here; jobs that run go on meanwhile"


def waiting(reason: str, seconds: float) -> Finding:
    """What a job that does not begin means, by Slurm's own reason."""
    detail = f"the test job had not begun after {seconds:g} s; Slurm's reason: {reason}"
    if _BUSY.fullmatch(reason):
        detail = f"{detail} (others have the nodes), so that nothing was tried on a node"
        return warn("slurm job", detail, "run god-miner doctor again when a node is free: squeue --start")
    return fail("slurm job", detail, _way_out(_WAITING, reason, "see `man squeue`, JOB REASON CODES"))


def refused(message: str) -> Finding:
    text = re.sub(r"^sbatch: (error: )?", "", message)
    return fail(
        "slurm job", f"sbatch refuses: {text}", _way_out(_REFUSED, text, "correct the SLURM_ settings")
    )


def _way_out(ways: Sequence[tuple[str, str]], text: str, otherwise: str) -> str:
    return next((way for pattern, way in ways if re.search(pattern, text, re.IGNORECASE)), otherwise)


def _facts(ended: Mapping[str, str], place: Path, token: str, begun: float) -> JobFacts:
    code, _, signal = ended.get("ExitCode", "0:0").partition(":")
    node = ended.get("NodeList", "the node")
    share = "mount it on every node at the same path, or set DATA_DIR to a directory that all nodes share"
    if code == str(NOT_THERE):
        raise TestJobFailed(fail("slurm shared files", f"{node} does not have {place.parent}", share))
    if code == str(NOT_WRITABLE):
        way = "let this user (same uid on every node, no root_squash for root) write there"
        raise TestJobFailed(fail("slurm shared files", f"{place.parent} cannot be written on {node}", way))
    if ended and (ended.get("JobState") != "COMPLETED" or code != "0"):
        how = f"{ended.get('JobState')}, exit code {code}, signal {signal or 0}, reason {ended.get('Reason')}"
        way = f"see slurmd's log on {node}, and slurmctld's; a training would end in the same way"
        raise TestJobFailed(fail("slurm job", f"it ended on {node} as {how}", way))
    over = time.monotonic()
    # The directory is read, because opening a file that was not there yet may be answered from a cache.
    while "from-there" not in os.listdir(place):
        if time.monotonic() > over + SEEN_S:
            detail = f"what {node} wrote in {place.parent} is not seen here {SEEN_S:g} s later"
            raise TestJobFailed(fail("slurm shared files", detail, share))
        time.sleep(0.1)
    seen, late = time.time(), time.monotonic() - over
    lines = (place / "from-there").read_text(errors="replace").splitlines()
    values = {name: value for name, _, value in (line.partition("=") for line in lines)}
    if values.get("token") != token:
        raise TestJobFailed(
            fail("slurm shared files", f"{node} reads another file than was written here", share)
        )
    return JobFacts(values, begun, seen, late)


# What was found


def job_findings(settings: Settings, facts: JobFacts, *, user: str, with_gpu: bool) -> Iterator[Finding]:
    yield ok(
        "slurm job",
        f"a test job ran on {facts.node}, seen ended {facts.seen_at - facts.submitted_at:.1f} s later",
    )
    yield _shared_files(facts, user)
    yield clock(facts)
    if with_gpu:
        yield from gpus(facts)
    yield from _space(facts, with_gpu)
    yield _python(settings, facts)
    if not settings.slurm_container and settings.trainer_sandbox is not SandboxKind.OFF:
        yield _sandbox(facts)


def _shared_files(facts: JobFacts, user: str) -> Finding:
    what, node = "slurm shared files", facts.node
    if facts.values.get("user") != user:
        detail = f"you are {facts.values.get('user')} on {node}, and {user} here: files may get another owner"
        return warn(what, detail, "give the user the same name and uid on every machine of the cluster")
    if facts.late_s > SLOW_S:
        detail = f"what {node} wrote was seen here {facts.late_s:.0f} s later: ends and progress come late"
        return warn(what, detail, "mount with a shorter attribute cache, such as NFS's actimeo=3")
    return ok(what, f"written on {node}, and read here; written here, and read on {node}")


def clock(facts: JobFacts) -> Finding:
    """The node's time has to be between submission and end; what is outside is its difference at least."""
    try:
        now = float(facts.values.get("now", ""))
    except ValueError:
        return skip("slurm clock", f"{facts.node} said no time")
    off = min(now - facts.submitted_at, 0.0) or max(now - facts.seen_at, 0.0)
    detail = f"{facts.node} is {abs(off):.1f} s {'ahead of' if off > 0 else 'behind'} this machine"
    if abs(off) >= WRONG_SECONDS:
        return fail("slurm clock", f"{detail}: trainings there end at wrong times", SYNC_FIX)
    if abs(off) >= OFF_SECONDS:
        return warn("slurm clock", detail, SYNC_FIX)
    return ok("slurm clock", f"{facts.node} agrees with this machine")


def gpus(facts: JobFacts) -> Iterator[Finding]:
    """The job asked for one."""
    what, node = "slurm GPU", facts.node
    seen = int(facts.values.get("gpus") or 0)
    if not facts.values.get("cuda"):
        way = "name each GPU's File= or AutoDetect=nvml in gres.conf, and restart slurmd on the node"
        yield fail(what, f"Slurm gave the job a GPU on {node}, and no CUDA_VISIBLE_DEVICES", way)
    elif seen == 0:
        yield fail(what, f"none can be used on {node}: {facts.values.get('driver')}", GPU_FIX)
    elif seen > 1:
        detail = f"a job with one GPU can open all {seen} of {node}: trainings rely on CUDA_VISIBLE_DEVICES"
        yield warn(what, detail, CONSTRAIN_FIX)
    else:
        yield ok(
            what, f"{facts.values.get('driver', '').split(' (UUID')[0]} on {node}, and no other is visible"
        )


def _space(facts: JobFacts, with_gpu: bool) -> Iterator[Finding]:
    """The node's own disk and memory; the shared disk is looked at from here."""
    node = facts.node
    tmp, shm = (int(facts.values.get(name) or 0) * 1024 for name in ("tmp", "shm"))
    if tmp < TEMPORARY_SPACE:
        detail = f"{node} has {tmp / GIB:.1f} GiB free in /tmp"
        yield warn(
            "slurm node", detail, f"have {TEMPORARY_SPACE // GIB} GiB free there for compilers' caches"
        )
    elif with_gpu and shm < ENOUGH_SHM:
        detail = f"{node} has {shm / GIB:.2f} GiB in /dev/shm; several GPUs and data loaders need more"
        yield warn("slurm node", detail, "mount -o remount,size=32G /dev/shm on the node")
    else:
        yield ok("slurm node", f"{node}: {tmp / GIB:.0f} GiB free in /tmp, {shm / GIB:.1f} GiB in /dev/shm")


def _sandbox(facts: JobFacts) -> Finding:
    said, node = facts.values.get("sandbox", ""), facts.node
    if said.endswith("works"):
        return ok("slurm sandbox", f"bubblewrap works on {node}")
    why = re.sub(r"^.*slurm_script: \d+: ", "", said) or "no message"
    way = "install bubblewrap on every node, where user namespaces are allowed; or TRAINER_SANDBOX=off"
    return warn("slurm sandbox", f"{node}: {why}; tasks with reward functions (GRPO) cannot be trained", way)


def _python(settings: Settings, facts: JobFacts) -> Finding:
    said, node = re.sub(r"^.*slurm_script: \d+: ", "", facts.values.get("python", "")), facts.node
    if settings.slurm_container:
        wrong = facts.values.get("container")
        if wrong:
            return fail(
                "slurm container", f"{node}: {wrong}", "install it on every node, or correct SLURM_CONTAINER"
            )
        return ok("slurm container", f"{settings.slurm_container}: what starts it is on {node}")
    if re.fullmatch(r"3\.\d+", said):
        return ok("slurm python", f"Python {said} starts on {node}")
    way = "put the training environment on the shared file system, and name its python in TRAINER_PYTHON"
    return fail(
        "slurm python", f"TRAINER_PYTHON does not start on {node}: {said or 'nothing is printed'}", way
    )
