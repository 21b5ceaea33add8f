"""How jobs of Slurm end: what squeue printed for each, with and without the wrapper's record."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from miner.backends.base import EXIT_FILE, START_FILE, STOP_RECORD_FILE, EndCause, RunPhase
from miner.backends.slurm.job_script import OUTPUT_FILE
from miner.backends.slurm.jobs import (
    SlurmJob,
    ended_status,
    exit_code,
    never_begins,
    parse_sacct,
    parse_scontrol,
    parse_squeue,
)

pytestmark = pytest.mark.process


#: Of 22.05, recorded; the last two are written after them: there are neither cgroups nor a boot here.
SQUEUE = """\
20|CANCELLED|1795489703|1795489715|n1|None|withdrawn
16|PENDING|N/A|N/A||PartitionTimeLimit|longer
14|CANCELLED|1795489693|1795489693|n1|None|cancelled
22|PENDING|N/A|N/A||ReqNodeNotAvail, UnavailableNodes:n1|drained
25|COMPLETED|1795489716|1795489717|n1|None|ok
28|DEADLINE|1795489719|1795489719||DeadLine|deadline
11|FAILED|1795489693|1795489695|n1|NonZeroExitCode|fail
24|FAILED|1795489716|1795489717|n1|JobLaunchFailure|bad|output
26|FAILED|1795489716|1795489717|n1|JobLaunchFailure|signal
21|NODE_FAIL|1795489693|1795489721|n2|NodeDown|node
12|PREEMPTED|1795489693|1795489696|n1|None|preempted
27|TIMEOUT|1795489716|1795489806|n1|TimeLimit|timeout
29|RUNNING|1795489696|NONE|n1|None|runs
30|COMPLETING|1795489696|1795489796|n1|None|completing
31|OUT_OF_MEMORY|1795489696|1795489796|n1|OutOfMemory|memory
32|BOOT_FAIL|1795489696|1795489796|n1|BootFail|boot
"""
JOBS = {job.name: job for job in parse_squeue(SQUEUE)}
TERMED = {"code": 0, "signals": ["SIGTERM"]}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path


def began(run_dir: Path, record: dict[str, object] | None = None) -> None:
    (run_dir / START_FILE).write_text(json.dumps({"at": 1795489700, "pid": 7, "boot": "another machine's"}))
    if record is not None:
        (run_dir / EXIT_FILE).write_text(json.dumps({"at": 1795489710, **record}))


def names(jobs: Iterable[SlurmJob], *, over: bool) -> set[str]:
    return {job.name for job in jobs if job.is_over is over}


def test_what_goes_on_and_what_is_over_is_known() -> None:
    waiting = {job.name for job in JOBS.values() if job.is_waiting}
    assert names(JOBS.values(), over=False) == {"longer", "drained", "runs", "completing"}
    assert waiting == {"longer", "drained"}
    assert JOBS["bad|output"].id == "24"
    assert JOBS["ok"].started_at == 1795489716
    assert JOBS["runs"].ended_at is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("cancelled", EndCause.CANCELLED),
        ("preempted", EndCause.PREEMPTED),
        ("node", EndCause.NODE_FAIL),
        ("timeout", EndCause.TIMEOUT),
        ("memory", EndCause.OOM_KILLED),
        # A node's fault before the wrapper was there would have no start.
        ("signal", EndCause.KILLED),
    ],
)
def test_an_end_that_the_wrapper_could_not_record_is_slurms_word(
    name: str, why: EndCause, run_dir: Path
) -> None:
    began(run_dir)
    job = JOBS[name]
    if name == "signal":
        job = replace(job, code=137)
    status = ended_status(job, run_dir)
    assert (status.phase, status.why) == (RunPhase.ENDED, why)
    assert f"Slurm job {job.id} on {job.nodes}: {job.state}" in status.detail
    assert status.node == job.nodes


@pytest.mark.parametrize("name", ["bad|output", "boot", "deadline", "fail", "ok", "timeout"])
def test_a_job_whose_wrapper_never_began_was_not_started(name: str, run_dir: Path) -> None:
    (run_dir / OUTPUT_FILE).write_text("slurmstepd: error: Unable to create TMPDIR\n")
    status = ended_status(JOBS[name], run_dir)
    assert (status.phase, status.why) == (RunPhase.ENDED, EndCause.NOT_STARTED)
    assert "Unable to create TMPDIR" in status.detail


@pytest.mark.parametrize(("name", "why"), [("cancelled", EndCause.CANCELLED), ("node", EndCause.NODE_FAIL)])
def test_one_that_never_began_keeps_its_cause_where_that_is_known(
    name: str, why: EndCause, run_dir: Path
) -> None:
    assert ended_status(JOBS[name], run_dir).why is why


def test_a_withdrawn_job_was_not_started_for_the_reason_of_its_wait(run_dir: Path) -> None:
    status = ended_status(JOBS["withdrawn"], run_dir, "Slurm did not begin it within 600 s: Resources")
    assert status.why is EndCause.NOT_STARTED
    assert status.detail.startswith("Slurm did not begin it within 600 s: Resources")


@pytest.mark.parametrize(
    ("name", "record", "why"),
    [
        ("ok", {"code": 0}, EndCause.OK),
        ("fail", {"code": 7}, EndCause.FAILED),
        ("fail", {"code": 143, "timeout": True}, EndCause.TIMEOUT),
        # Slurm's SIGTERM, and what it was for.
        ("cancelled", TERMED, EndCause.CANCELLED),
        ("preempted", TERMED, EndCause.PREEMPTED),
        ("timeout", TERMED, EndCause.TIMEOUT),
        # It had ended by itself before its node did.
        ("node", {"code": 0}, EndCause.OK),
        ("node", {"code": 9}, EndCause.FAILED),
        ("cancelled", {"code": 0}, EndCause.OK),
        ("memory", {"code": 9}, EndCause.OOM_KILLED),
        ("memory", {"code": 0}, EndCause.OK),
    ],
)
def test_the_record_and_slurms_word_make_the_cause(
    name: str, record: dict[str, object], why: EndCause, run_dir: Path
) -> None:
    began(run_dir, record)
    status = ended_status(JOBS[name], run_dir)
    assert (status.why, status.code) == (why, record["code"])


def test_when_another_node_fails_the_first_ones_record_of_slurms_signal_is_its_consequence(
    run_dir: Path,
) -> None:
    began(run_dir, TERMED)
    assert ended_status(replace(JOBS["node"], nodes="n[1-2]"), run_dir).why is EndCause.NODE_FAIL
    assert ended_status(replace(JOBS["node"], nodes="n1"), run_dir).why is EndCause.KILLED
    began(run_dir, {"code": 9})
    assert ended_status(replace(JOBS["node"], nodes="n[1-2]"), run_dir).why is EndCause.FAILED


@pytest.mark.parametrize("name", ["cancelled", "fail", "timeout"])
def test_a_stop_of_ours_is_one_whatever_slurm_calls_it(name: str, run_dir: Path) -> None:
    (run_dir / STOP_RECORD_FILE).write_text(json.dumps({"at": 1795489705, "force": True}))
    assert ended_status(JOBS[name], run_dir).why is EndCause.STOPPED
    began(run_dir, {"code": 137, "signals": ["SIGQUIT", "SIGTERM"]})
    assert ended_status(JOBS[name], run_dir).why is EndCause.STOPPED


@pytest.mark.parametrize(
    ("reason", "never"),
    [
        ("Resources", False),
        ("Priority", False),
        ("BeginTime", False),
        ("QOSGrpGRES", False),
        ("PartitionNodeLimit", True),
        ("PartitionTimeLimit", True),
        ("JobHeldUser", True),
        ("JobHeldAdmin", True),
        ("ReqNodeNotAvail, UnavailableNodes:n1", True),
        ("launch failed requeued held", True),
        ("launch_failed_requeued_held", True),
        ("QOSMaxWallDurationPerJobLimit", True),
        ("AssocMaxGRESPerJob", True),
        ("InvalidQOS", True),
    ],
)
def test_reasons_that_do_not_pass_by_themselves_are_known(reason: str, never: bool) -> None:
    assert never_begins(reason) is never


def test_scontrol_and_sacct_say_the_same_of_both_releases() -> None:
    text = (
        "JobId=24 JobName=key UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901745 Nice=0 "
        "Account=(null) QOS=(null) JobState=FAILED Reason=JobLaunchFailure Dependency=(null) Requeue=0 "
        "Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:53 RunTime=00:00:01 TimeLimit=UNLIMITED "
        "StartTime=1795489716 EndTime=1795489717 NodeList=(null) WorkDir=/tmp\n"
    )
    (job,) = parse_scontrol(text)
    assert (job.name, job.state, job.code, job.nodes) == ("key", "FAILED", 181, "")
    cancelled, pending = parse_sacct(
        "24|CANCELLED by 0|0:15|1795489716|1795489717|n1|key\n"
        "25|PENDING|0:0|Unknown|Unknown|None assigned|a|b\n"
    )
    assert (cancelled.state, cancelled.reason, cancelled.code) == ("CANCELLED", "by 0", 143)
    assert (pending.name, pending.nodes, pending.is_over) == ("a|b", "", False)


def test_an_exit_code_is_as_shells_have_it() -> None:
    assert [exit_code(text) for text in ("0:0", "7:0", "0:9", "", "N/A")] == [0, 7, 137, None, None]
