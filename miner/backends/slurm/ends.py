"""How a job of Slurm has ended, by its state and by what the wrapper recorded."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from miner.backends.base import EndCause, RunPhase, RunStatus
from miner.backends.run_folder import (
    EngineEndReport,
    ExitRecord,
    end_status,
    read_exit,
    read_start,
    read_stop_record,
)
from miner.backends.slurm.job_script import NO_DIRECTORY, NO_MODULE, OUTPUT_FILE
from miner.backends.slurm.jobs import SlurmJob
from miner.backends.slurm.nodes import expand_hosts
from miner.support.untrusted_files import read_untrusted

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
    """Whether Slurm's reason for the wait does not pass by itself."""
    return _NEVER.match(reason) is not None


def ended_status(job: SlurmJob, run_dir: Path, not_started: str = "") -> RunStatus:
    """`not_started`: why we withdrew it while it waited."""
    start, record, stop = read_start(run_dir), read_exit(run_dir), read_stop_record(run_dir)
    report = EngineEndReport(
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
    """Whether the end that the wrapper recorded, on the first node, came before a node failed. When another
    node fails, Slurm ends the job by a signal."""
    return not record.signals or len(expand_hosts(job.nodes)) == 1


def _never_began(status: RunStatus, job: SlurmJob, run_dir: Path, not_started: str) -> RunStatus:
    """Whatever kept the wrapper from its first act."""
    if job.state == "CANCELLED" and not not_started:
        return replace(status, why=EndCause.CANCELLED, detail=str(job))
    if job.state in ("PREEMPTED", "NODE_FAIL", "REVOKED"):
        return replace(status, why=CAUSE_OF_STATE[job.state], detail=str(job))
    why = {
        NO_DIRECTORY: f"{run_dir} or the engine's directory cannot be used on the node: is DATA_DIR shared?",
        NO_MODULE: "a module of SLURM_MODULES cannot be loaded",
    }.get(job.code or 0, "")
    said = (read_untrusted(run_dir / OUTPUT_FILE, 64 * 1024) or b"").decode(errors="replace")
    parts = [not_started or "it did not begin", why, " ".join(said.split())[-300:], str(job)]
    return replace(status, why=EndCause.NOT_STARTED, detail="; ".join(filter(None, parts)))
