"""The backend against a Slurm that answers what the real one was recorded to answer."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from miner.backends.base import (
    EXIT_FILE,
    AttemptSpec,
    BackendRejected,
    BackendUnreachable,
    EndCause,
    Mount,
    RunPhase,
    RunStatus,
)
from miner.backends.slurm import backend as module
from miner.backends.slurm.backend import SlurmBackend, SlurmOptions
from miner.backends.slurm.commands import SlurmRefused, SlurmUnreachable
from miner.backends.slurm.runs import CLAIM, RunNote, SlurmRuns
from tests.doubles.backend_bench import context_in

pytestmark = pytest.mark.process


PREFIX = "god-miner-feed-"
PLACEMENT = {"partition": "train", "account": "", "qos": "", "constraint": "", "reservation": ""}


@dataclass
class AnsweringSlurm:
    """In the place of `SlurmCommands`: jobs as squeue's lines, and what was asked."""

    lines: dict[str, str] = field(default_factory=dict)
    calls: list[tuple[str, ...]] = field(default_factory=list)
    fails: dict[str, Exception] = field(default_factory=dict)
    next_id: int = 1

    async def run(self, program: str, *arguments: str, script: str | None = None, **_more: Any) -> str:
        self.calls.append((program, *arguments))
        await asyncio.sleep(0)
        if program in self.fails:
            raise self.fails[program]
        if program == "sbatch":
            number, self.next_id = str(self.next_id), self.next_id + 1
            name = next(word.partition("=")[2] for word in arguments if word.startswith("--job-name="))
            self.lines[number] = f"PENDING|N/A|N/A||None|{name}"
            return f"{number}\n"
        if program == "squeue":
            return "".join(f"{number}|{line}\n" for number, line in self.lines.items())
        if program == "sinfo" and "--Node" in arguments:
            return "n1 alloc\nn2 mix\n"
        if program == "scontrol" and "nodes" in arguments:
            return "NodeName=n1 CPUTot=8 RealMemory=1000 Gres=gpu:h100:4 State=MIXED Partitions=train\n"
        if program == "scontrol" and "partitions" in arguments:
            return "PartitionName=train Default=YES State=UP MaxTime=1:00:00\n"
        if program == "scontrol":
            raise SlurmRefused("slurm_load_jobs error: Invalid job id specified")
        if program == "sacct":
            raise SlurmRefused("Slurm accounting storage is disabled")
        return ""

    def set(self, key: str, state: str, reason: str = "None", nodes: str = "n1", number: str = "1") -> None:
        self.lines[number] = f"{state}|1795489716|1795489717|{nodes}|{reason}|{PREFIX}{key}"

    def count(self, program: str) -> int:
        return sum(call[0] == program for call in self.calls)

    def last(self, program: str) -> tuple[str, ...]:
        return next(call for call in reversed(self.calls) if call[0] == program)


@pytest.fixture
def slurm() -> AnsweringSlurm:
    return AnsweringSlurm()


@pytest.fixture
def spec(tmp_path: Path) -> AttemptSpec:
    run_dir = tmp_path / "attempt"
    run_dir.mkdir()
    return AttemptSpec("k1", ("python", "-c", "pass"), run_dir, gpus=("0@n1", "1@n1"), nodes=("n1",))


def backend_on(slurm: AnsweringSlurm, folder: Path, **options: Any) -> SlurmBackend:
    context = context_in(folder, trusted=(folder,))
    chosen = SlurmOptions(PLACEMENT, poll_s=0.0, **options)
    return SlurmBackend(context, None, slurm, SlurmRuns(folder / "runs"), chosen)  # type: ignore[arg-type]


@pytest.fixture
def backend(slurm: AnsweringSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmBackend:
    monkeypatch.setattr("miner.backends.slurm.jobs.LEAST_S", 0.0)
    return backend_on(slurm, tmp_path)


def ended(spec: AttemptSpec, **record: Any) -> None:
    (spec.run_dir / "start.json").write_text(json.dumps({"at": 1795489700, "pid": 7, "boot": "b"}))
    (spec.run_dir / EXIT_FILE).write_text(json.dumps({"at": 1795489710, **record}))


async def status(backend: SlurmBackend, spec: AttemptSpec) -> RunStatus:
    return await backend.poll(spec.key, spec.run_dir)


async def test_a_submit_is_one_sbatch_within_what_the_node_has(
    backend: SlurmBackend, slurm: AnsweringSlurm, spec: AttemptSpec
) -> None:
    for _ in range(3):
        assert await backend.submit(replace(spec, timeout_s=86_400.0, memory_bytes=1 << 40)) == "k1"
    assert slurm.count("sbatch") == 1
    # Half of the node's GPUs: half of its CPUs and memory, and no more time than its partition allows.
    asked = set(slurm.last("sbatch"))
    assert {"--gpus-per-node=2", "--cpus-per-task=4", "--mem=500M", "--time=60", "--nodelist=n1"} <= asked
    assert (await status(backend, spec)).phase is RunPhase.QUEUED


async def test_a_job_asks_for_no_more_time_than_others_leave_the_node_to_us(
    backend: SlurmBackend, slurm: AnsweringSlurm, spec: AttemptSpec
) -> None:
    # Slurm begins nothing whose limit reaches a maintenance.
    await backend.submit(replace(spec, timeout_s=86_400.0, free_s=1850.0))
    assert "--time=29" in slurm.last("sbatch")


async def test_a_trial_runs_on_one_of_the_operators_nodes(
    slurm: AnsweringSlurm, tmp_path: Path, spec: AttemptSpec
) -> None:
    backend = backend_on(slurm, tmp_path, nodes="n[1-2]")
    await backend.submit(replace(spec, gpus=(), nodes=()))
    # Half of a node: a training goes on beside it.
    assert {"--nodelist=n2", "--cpus-per-task=4"} <= set(slurm.last("sbatch"))


async def test_a_profile_says_where_its_tasks_run(
    backend: SlurmBackend, slurm: AnsweringSlurm, spec: AttemptSpec
) -> None:
    await backend.submit(
        replace(spec, cluster={"partition": "big", "qos": "high", "options": "--nice=5 --x"})
    )
    assert {"--partition=big", "--qos=high", "--nice=5", "--x"} <= set(slurm.last("sbatch"))


async def test_a_submit_without_an_answer_is_found_by_its_name(
    backend: SlurmBackend, slurm: AnsweringSlurm, spec: AttemptSpec, tmp_path: Path
) -> None:
    slurm.fails["sbatch"] = SlurmUnreachable("sbatch has not answered for 60 s")
    with pytest.raises(BackendUnreachable):
        await backend.submit(spec)
    assert await backend.find("k1") is None
    slurm.set("k1", "RUNNING", number="77")
    again = backend_on(slurm, tmp_path)
    assert await again.find("k1") == "k1"
    assert await again.submit(spec) == "k1"
    assert slurm.count("sbatch") == 1
    note = SlurmRuns(tmp_path / "runs").read("k1")
    assert note.job == "77"


async def test_one_that_slurm_forgot_before_its_number_was_noted_is_known_by_its_claim(
    backend: SlurmBackend, slurm: AnsweringSlurm, spec: AttemptSpec, tmp_path: Path
) -> None:
    runs = SlurmRuns(tmp_path / "runs")
    runs.write(RunNote("k1", str(spec.run_dir), time.time()))
    claim = runs.directory("k1") / CLAIM
    claim.mkdir()
    (claim / "job").write_text("5\n")
    assert await backend.submit(spec) == "k1"
    assert slurm.count("sbatch") == 0
    ended(spec, code=0)
    assert (await status(backend, spec)).why is EndCause.OK


@pytest.mark.parametrize(
    "text",
    [
        "sbatch: error: Batch job submission failed: Invalid node name specified",
        "sbatch: error: Batch job submission failed: Requested node configuration is not available",
        "sbatch: error: Batch job submission failed: Required partition not available (inactive or drain)",
        "sbatch: error: Batch job submission failed: Required node not available (down, drained or reserved)",
        "sbatch: error: Batch job submission failed: Requested reservation not usable now",
        "sbatch: error: QOSMaxWallDurationPerJobLimit sbatch: error: Batch job submission failed: Job"
        " violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
    ],
)
async def test_a_refusal_for_the_node_is_a_run_that_did_not_start(
    text: str, backend: SlurmBackend, slurm: AnsweringSlurm, spec: AttemptSpec
) -> None:
    slurm.fails["sbatch"] = SlurmRefused(text)
    await backend.submit(spec)
    found = await status(backend, spec)
    assert (found.phase, found.why) == (RunPhase.ENDED, EndCause.NOT_STARTED)
    assert text in found.detail


async def test_other_refusals_are_final_or_for_the_moment(
    backend: SlurmBackend, slurm: AnsweringSlurm, spec: AttemptSpec
) -> None:
    slurm.fails["sbatch"] = SlurmRefused("sbatch: error: Invalid account or account/partition combination")
    with pytest.raises(BackendRejected, match="Invalid account"):
        await backend.submit(spec)
    assert await backend.list_runs() == []
    slurm.fails["sbatch"] = SlurmRefused(
        "sbatch: error: AssocMaxSubmitJobLimit sbatch: error: Batch job submission failed: Job violates "
        "accounting/QOS policy (job submit limit, user's size and/or time limits)"
    )
    with pytest.raises(BackendUnreachable, match="no job at the moment"):
        await backend.submit(spec)


async def test_hostile_code_needs_a_sandbox(backend: SlurmBackend, spec: AttemptSpec) -> None:
    with pytest.raises(BackendRejected, match="no sandbox"):
        await backend.submit(replace(spec, hostile=True))


async def test_a_path_that_a_container_cannot_bind_is_rejected(
    slurm: AnsweringSlurm, tmp_path: Path, spec: AttemptSpec
) -> None:
    inputs = tmp_path / "a,b"
    inputs.mkdir()
    backend = backend_on(slurm, tmp_path, container="apptainer:/t.sif")
    with pytest.raises(BackendRejected, match="cannot be bound"):
        await backend.submit(replace(spec, mounts=(Mount(inputs),)))
    assert await backend.submit(spec) == "k1"


async def test_polls_share_one_squeue(slurm: AnsweringSlurm, tmp_path: Path, spec: AttemptSpec) -> None:
    backend = backend_on(slurm, tmp_path)
    backend._jobs._interval_s = 60.0
    specs = [replace(spec, key=f"k{number}") for number in range(100)]
    for one in specs:
        await backend.submit(one)
    for number, one in enumerate(specs, 1):
        slurm.set(one.key, "RUNNING", number=str(number))
    for _ in range(3):
        found = await asyncio.gather(*(status(backend, one) for one in specs))
        assert {one.phase for one in found} == {RunPhase.RUNNING}
    assert slurm.count("squeue") == 1


async def test_a_controller_that_is_gone_is_asked_once_for_all_that_wait(
    slurm: AnsweringSlurm, tmp_path: Path, spec: AttemptSpec
) -> None:
    backend = backend_on(slurm, tmp_path)
    backend._jobs._interval_s = 60.0
    await backend.submit(spec)
    slurm.fails["squeue"] = SlurmUnreachable("Unable to contact slurm controller (connect failure)")
    found = await asyncio.gather(*(status(backend, spec) for _ in range(20)), return_exceptions=True)
    assert {type(one) for one in found} == {BackendUnreachable}
    assert slurm.count("squeue") == 1


@pytest.mark.parametrize("code", [0, 1])
async def test_a_success_ends_while_the_controller_is_away_and_a_failure_waits_for_it(
    backend: SlurmBackend, slurm: AnsweringSlurm, spec: AttemptSpec, code: int
) -> None:
    await backend.submit(spec)
    slurm.set("k1", "RUNNING")
    assert (await status(backend, spec)).phase is RunPhase.RUNNING
    slurm.fails["squeue"] = SlurmUnreachable("Unable to contact slurm controller (connect failure)")
    with pytest.raises(BackendUnreachable):
        await status(backend, spec)
    ended(spec, code=code)
    if code == 0:
        assert (await status(backend, spec)).why is EndCause.OK
        return
    with pytest.raises(BackendUnreachable):
        await status(backend, spec)
    del slurm.fails["squeue"]
    slurm.set("k1", "PREEMPTED")
    assert (await status(backend, spec)).why is EndCause.PREEMPTED


async def test_a_job_that_never_completes_ends_by_its_record_and_is_cancelled_once(
    backend: SlurmBackend, slurm: AnsweringSlurm, spec: AttemptSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINGER_S", -1.0)
    await backend.submit(spec)
    ended(spec, code=7)
    slurm.set("k1", "COMPLETING")
    assert (await status(backend, spec)).why is EndCause.FAILED
    assert slurm.count("scancel") == 1


async def test_of_two_jobs_of_a_run_the_one_that_has_begun_is_stopped_and_kept(
    backend: SlurmBackend, slurm: AnsweringSlurm, spec: AttemptSpec, tmp_path: Path
) -> None:
    """The second was taken by Slurm after sbatch had given up, and began first."""
    await backend.submit(spec)
    slurm.set("k1", "FAILED", "NonZeroExitCode")
    slurm.set("k1", "RUNNING", number="2")
    runs = SlurmRuns(tmp_path / "runs")
    assert (await status(backend, spec)).phase is RunPhase.RUNNING
    claim = runs.directory("k1") / CLAIM
    claim.mkdir()
    (claim / "job").write_text("2\n")
    assert (await status(backend, spec)).phase is RunPhase.RUNNING
    await backend.remove("k1")
    assert claim.exists()
    await backend.stop("k1", force=True)
    assert slurm.count("scancel") > 0


async def test_a_node_that_is_prepared_for_too_long_is_given_up(
    slurm: AnsweringSlurm, tmp_path: Path, spec: AttemptSpec, backend: SlurmBackend
) -> None:
    backend = backend_on(slurm, tmp_path, pending_s=-1.0)
    await backend.submit(spec)
    slurm.set("k1", "CONFIGURING", "Prolog")
    assert (await status(backend, spec)).phase is RunPhase.QUEUED
    # Its base state is RUNNING.
    assert "--state=PENDING" not in slurm.last("scancel")


async def test_a_job_that_is_forgotten_while_orphans_are_looked_for_has_no_directory(
    backend: SlurmBackend, slurm: AnsweringSlurm
) -> None:
    slurm.set("stray", "RUNNING")
    (run,) = await backend.list_runs()
    assert (run.key, run.run_dir) == ("stray", None)


async def test_a_job_that_is_completing_runs_although_its_end_is_recorded(
    backend: SlurmBackend, slurm: AnsweringSlurm, spec: AttemptSpec
) -> None:
    await backend.submit(spec)
    ended(spec, code=0)
    slurm.set("k1", "COMPLETING")
    assert (await status(backend, spec)).phase is RunPhase.RUNNING
    slurm.set("k1", "COMPLETED")
    assert (await status(backend, spec)).why is EndCause.OK


async def test_a_number_that_is_used_again_is_somebody_elses(
    backend: SlurmBackend, slurm: AnsweringSlurm, spec: AttemptSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a reset of the controller."""
    await backend.submit(spec)
    slurm.lines = {"1": "RUNNING|1795489716|NONE|n1|None|another"}
    with pytest.raises(BackendUnreachable, match="asked again"):
        await status(backend, spec)
    monkeypatch.setattr(module, "SETTLE_S", 0.0)
    assert (await status(backend, spec)).phase is RunPhase.LOST


async def test_a_job_that_waits_for_too_long_is_withdrawn(
    slurm: AnsweringSlurm, tmp_path: Path, spec: AttemptSpec, backend: SlurmBackend
) -> None:
    backend = backend_on(slurm, tmp_path, pending_s=-1.0)
    await backend.submit(spec)
    slurm.set("k1", "PENDING", "Resources", nodes="")
    assert (await status(backend, spec)).phase is RunPhase.QUEUED
    # Only while it waits: one that has just begun goes on.
    assert {f"--name={PREFIX}k1", "--state=PENDING"} <= set(slurm.last("scancel"))
    slurm.set("k1", "CANCELLED", nodes="")
    found = await status(backend, spec)
    assert found.why is EndCause.NOT_STARTED
    assert "Resources" in found.detail


async def test_a_job_that_waits_for_what_does_not_come_is_withdrawn_early(
    backend: SlurmBackend, slurm: AnsweringSlurm, spec: AttemptSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.submit(spec)
    slurm.set("k1", "PENDING", "PartitionNodeLimit", nodes="")
    await status(backend, spec)
    assert slurm.count("scancel") == 0
    monkeypatch.setattr(module, "NEVER_S", -1.0)
    await status(backend, spec)
    assert slurm.count("scancel") == 1


async def test_a_stop_goes_to_the_script_and_before_the_start_to_slurm(
    backend: SlurmBackend, slurm: AnsweringSlurm, spec: AttemptSpec
) -> None:
    await backend.submit(spec)
    await backend.stop("k1")
    assert not any(word.startswith("--signal") for word in slurm.last("scancel"))
    slurm.set("k1", "RUNNING")
    (spec.run_dir / "start.json").write_text(json.dumps({"at": 1795489700, "pid": 7}))
    await backend.stop("k1")
    assert {"--batch", "--signal=TERM"} <= set(slurm.last("scancel"))
    before = slurm.count("scancel")
    await backend.stop("k1", force=True)
    quit_, whole = [call for call in slurm.calls if call[0] == "scancel"][before:]
    assert "--signal=QUIT" in quit_
    assert not any(word.startswith("--signal") for word in whole)


async def test_a_daemon_that_lost_all_but_the_shared_directory_finds_its_runs(
    backend: SlurmBackend, slurm: AnsweringSlurm, spec: AttemptSpec, tmp_path: Path
) -> None:
    await backend.submit(spec)
    slurm.lines["9"] = "RUNNING|1795489716|NONE|n1|None|god-miner-beef-k1"
    (run,) = await backend_on(slurm, tmp_path).list_runs()
    assert run == ("k1", "k1", spec.run_dir)
    slurm.set("k1", "RUNNING")
    await backend.remove("k1")
    assert await backend.find("k1") == "k1"
    slurm.set("k1", "COMPLETED")
    await backend.remove("k1")
    assert await backend.list_runs() == []
    assert await backend.find("k1") is None
