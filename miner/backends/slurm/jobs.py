"""Ask Slurm for the state of all our jobs with one squeue, which every poll of an interval shares."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from miner.backends.base import EndCause, RunPhase, RunStatus
from miner.backends.run_folder import (
    BackendEndReport,
    ExitRecord,
    end_status,
    read_exit,
    read_start,
    read_stop_record,
)
from miner.backends.slurm.commands import SlurmCommands, SlurmRefused, SlurmUnreachable, records, seconds
from miner.backends.slurm.job_script import NO_DIRECTORY, NO_MODULE, OUTPUT_FILE
from miner.backends.slurm.nodes import expand_hosts
from miner.support.untrusted_files import read_untrusted

#: No two commands follow each other faster, whoever asks.
LEAST_S = 0.3
#: How long an answer that there is no accounting is believed.
ACCOUNTING_OFF_S = 600.0
#: The name is last, so that a `|` in somebody's job name cannot shift the other fields.
_FIELDS = "%i|%T|%S|%e|%N|%r|%j"
_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "CONFIGURING"})
_ACTIVE = frozenset(
    {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT", "POWER_UP_NODE"}
)


@dataclass(frozen=True, slots=True)
class SlurmJob:
    id: str
    name: str
    #: Slurm's word: RUNNING, NODE_FAIL, …
    state: str
    reason: str = ""
    nodes: str = ""
    started_at: float | None = None
    ended_at: float | None = None
    #: 128 and the signal's number for an end by signal; None where it was not asked for.
    code: int | None = None

    @property
    def is_waiting(self) -> bool:
        return self.state in _WAITING

    @property
    def is_over(self) -> bool:
        return self.state not in _ACTIVE and not self.is_waiting

    def __str__(self) -> str:
        where = f" on {self.nodes}" if self.nodes else ""
        reason = f" ({self.reason})" if self.reason not in ("", "None") else ""
        return f"Slurm job {self.id}{where}: {self.state}{reason}"


class SlurmJobs:
    """The jobs of this user by name. Their numbers cannot be keys: after a reset of the controller they begin
    again."""

    def __init__(self, commands: SlurmCommands, interval_s: float) -> None:
        self._commands = commands
        self._interval_s = interval_s
        self._lock = asyncio.Lock()
        self._jobs: dict[str, list[SlurmJob]] = {}
        #: When the last squeue was started, and why it failed.
        self._asked_at = float("-inf")
        self._failure: SlurmUnreachable | None = None
        self._no_accounting_until = float("-inf")

    async def named(self, name: str, *, after: float | None = None) -> list[SlurmJob]:
        """The jobs with this name. `after`: by an answer that was asked for after this moment of the
        monotonic clock; without it, by one that is not older than the interval."""
        return (await self.all(after=after)).get(name, [])

    async def all(self, *, after: float | None = None) -> dict[str, list[SlurmJob]]:
        came = time.monotonic()
        oldest = came - self._interval_s if after is None else after
        async with self._lock:
            # Who has waited for a squeue that failed gets its error: with a controller away each would wait.
            if self._failure is not None and self._asked_at + self._interval_s > came:
                raise self._failure
            if self._asked_at < oldest or self._failure is not None:
                await asyncio.sleep(max(self._asked_at + LEAST_S - time.monotonic(), 0))
                await self._ask()
            return self._jobs

    async def _ask(self) -> None:
        asked_at = time.monotonic()
        try:
            text = await self._commands.run(
                "squeue", "--noheader", f"--user={os.geteuid()}", "--states=all", f"--format={_FIELDS}"
            )
        except SlurmRefused as error:
            # It refuses nothing that we could change: a misconfiguration, as when the user is unknown.
            self._failure = SlurmUnreachable(str(error))
        except SlurmUnreachable as error:
            self._failure = error
        else:
            self._failure = None
            self._jobs = {}
            for job in parse_squeue(text):
                self._jobs.setdefault(job.name, []).append(job)
        self._asked_at = asked_at
        if self._failure is not None:
            self._asked_at = time.monotonic()
            raise self._failure

    async def details(self, job: SlurmJob) -> SlurmJob:
        """The job with its exit code and reason; as it was where Slurm has forgotten it meanwhile."""
        try:
            text = await self._commands.run("scontrol", "--oneliner", "show", "job", job.id)
        except SlurmRefused:
            return job
        return next((known for known in parse_scontrol(text) if known.name == job.name), job)

    async def accounted(self, name: str, job_id: str) -> SlurmJob | None:
        """Ask the accounting, if there is one, for a job that Slurm itself has forgotten."""
        if time.monotonic() < self._no_accounting_until:
            return None
        try:
            text = await self._commands.run(
                "sacct",
                "--noheader",
                "--parsable2",
                "--allocations",
                "--duplicates",
                f"--jobs={job_id}",
                "--format=JobID,State,ExitCode,Start,End,NodeList,JobName",
            )
        except (SlurmRefused, SlurmUnreachable):
            self._no_accounting_until = time.monotonic() + ACCOUNTING_OFF_S
            return None
        return next((job for job in parse_sacct(text) if job.name == name and job.is_over), None)


def parse_squeue(text: str) -> Iterable[SlurmJob]:
    for line in text.splitlines():
        fields = line.split("|", 6)
        if len(fields) == 7:
            number, state, begin, end, nodes, reason, name = fields
            yield SlurmJob(number, name, state, reason, nodes, seconds(begin), seconds(end))


def parse_scontrol(text: str) -> Iterable[SlurmJob]:
    for record in records(text):
        nodes = record.get("NodeList", "")
        yield SlurmJob(
            record.get("JobId", ""),
            record.get("JobName", ""),
            record.get("JobState", ""),
            record.get("Reason", ""),
            "" if nodes == "(null)" else nodes,
            seconds(record.get("StartTime")),
            seconds(record.get("EndTime")),
            exit_code(record.get("ExitCode", "")),
        )


def parse_sacct(text: str) -> Iterable[SlurmJob]:
    for line in text.splitlines():
        fields = line.split("|", 6)
        if len(fields) == 7 and fields[1]:
            number, state, code, begin, end, nodes, name = fields
            # "CANCELLED by 1000"
            by = state.partition(" ")
            nodes = "" if nodes == "None assigned" else nodes
            yield SlurmJob(number, name, by[0], by[2], nodes, seconds(begin), seconds(end), exit_code(code))


def exit_code(text: str) -> int | None:
    """`7:0` and `0:9`, as shells have it: 7 and 137."""
    codes = re.fullmatch(r"(\d+):(\d+)", text)
    if codes is None:
        return None
    code, signal = int(codes[1]), int(codes[2])
    return (128 + signal) & 255 if signal else code


# How a job has ended


#: States that say how it ended, whatever the wrapper saw of it: mostly a SIGTERM.
CAUSE_OF_STATE = {
    "BOOT_FAIL": EndCause.NOT_STARTED,
    "CANCELLED": EndCause.CANCELLED,
    "DEADLINE": EndCause.TIMEOUT,
    "NODE_FAIL": EndCause.NODE_FAIL,
    "OUT_OF_MEMORY": EndCause.OOM_KILLED,
    "PREEMPTED": EndCause.PREEMPTED,
    "REVOKED": EndCause.CANCELLED,
    "TIMEOUT": EndCause.TIMEOUT,
}
#: States whose exit code is the script's. Others show 0:0.
_WITH_CODE = ("COMPLETED", "FAILED")
#: Reasons for which a job waits until somebody changes the cluster or the job.
_NEVER = re.compile(
    r"AccountNotAllowed|BadConstraints|DependencyNeverSatisfied|InvalidAccount|InvalidQOS"
    r"|JobHeld|NodeDown|PartitionDown|PartitionInactive|PartitionNodeLimit|PartitionTimeLimit|QOSNotAllowed"
    r"|ReqNodeNotAvail|ReservationDeleted|launch.failed.requeued.held"
    r"|(QOS|Assoc|QOSUsage)(Max|Min)\w*(PerJob|PerNode)"
)


def never_begins(reason: str) -> bool:
    """Return True if Slurm's reason for the wait does not pass by itself."""
    return _NEVER.match(reason) is not None


def ended_status(job: SlurmJob, run_dir: Path, not_started: str = "") -> RunStatus:
    """`not_started`: why we withdrew it while it waited."""
    start, record, stop = read_start(run_dir), read_exit(run_dir), read_stop_record(run_dir)
    report = BackendEndReport(
        code=job.code if record is None and job.state in _WITH_CODE else None,
        oom_killed=job.state == "OUT_OF_MEMORY",
        started_at=job.started_at if start is None and record is not None else None,
        ended_at=job.ended_at if record is None else None,
        detail=str(job),
        here=False,
    )
    status = end_status(run_dir, report)
    status = replace(status, phase=RunPhase.ENDED, node=job.nodes)
    if status.why in (EndCause.OK, EndCause.STOPPED, EndCause.TIMEOUT):
        return status
    if start is None and stop is None:
        return _never_began(status, job, run_dir, not_started)
    cause = CAUSE_OF_STATE.get(job.state)
    if cause is None or (record is not None and cause is EndCause.NODE_FAIL and _ended_before(job, record)):
        return status
    return replace(status, why=cause, detail=str(job))


def _ended_before(job: SlurmJob, record: ExitRecord) -> bool:
    """Return True if the end that the wrapper recorded, on the first node, came before a node failed. When
    another node fails, Slurm ends the job by a signal."""
    return not record.signals or len(expand_hosts(job.nodes)) == 1


def _never_began(status: RunStatus, job: SlurmJob, run_dir: Path, not_started: str) -> RunStatus:
    """Explain what kept the wrapper from starting."""
    if job.state == "CANCELLED" and not not_started:
        return replace(status, why=EndCause.CANCELLED, detail=str(job))
    if job.state in ("PREEMPTED", "NODE_FAIL", "REVOKED"):
        return replace(status, why=CAUSE_OF_STATE[job.state], detail=str(job))
    why = {
        NO_DIRECTORY: f"{run_dir} or the backend's directory cannot be used on the node: is DATA_DIR shared?",
        NO_MODULE: "a module of SLURM_MODULES cannot be loaded",
    }.get(job.code or 0, "")
    said = (read_untrusted(run_dir / OUTPUT_FILE, 64 * 1024) or b"").decode(errors="replace")
    parts = [not_started or "it did not begin", why, " ".join(said.split())[-300:], str(job)]
    return replace(status, why=EndCause.NOT_STARTED, detail="; ".join(filter(None, parts)))
