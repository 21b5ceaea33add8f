"""A restart of the daemon while every GPU of a large cluster trains.

The daemon is the real one; Slurm's commands are stand-ins that print what such a cluster would. Each training
has its directory, its record in the backend, and some hundred steps behind it.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
import urllib.request
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benchmarks import machine, subjects
from benchmarks.busy_store import fill_store
from benchmarks.report import Report
from core.data.facts import assumed_facts
from core.domain.hardware import GpuSet, Hardware, parse_gpus
from core.domain.job_states import JobState
from core.domain.keys import GpuReservation, ReservationKind, TaskKey, gpu_on_node
from core.domain.tasks import TaskType
from core.models.identify import facts_from_name
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from core.profile.resolve import load_profile
from core.runs.progress import EvalEvent, StageEvent, StepEvent, encode_event
from core.runs.run_files import HeldOutScore, RunSpec
from miner.backends.base import START_FILE
from miner.backends.registry import build_here
from miner.backends.slurm.commands import job_prefix
from miner.backends.slurm.runs import CLAIM, RunNote, SlurmRuns
from miner.backends.trial import RESULTS_FILE
from miner.dev.samples import SampleTask, sample_task
from miner.dev.stack import LOOPBACK, ChildProcess, DevStack, daemon_process
from miner.jobs.folder import AttemptFolder, job_folder
from miner.jobs.launch import write_attempt
from miner.settings import BackendKind, load_settings
from miner.store import attempts, database, jobs, offers
from miner.store.jobs import StartRequest
from miner.store.offers import ReservationRow
from miner.support.data_id import data_id
from tests.doubles.base_image import PYTHON

NODES, GPUS_A_NODE, ENDED_JOBS, ENDED_OFFERS = 250, 4, 20_000, 20_000
#: Steps that each training has logged, and its evaluations.
STEPS, EVALS = 500, 10
HOURS, AGE_S = 6.0, 3600.0
READY_BAR_S = 10.0
VALIDATOR = "5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY"
#: How long a daemon is watched after it has read everything.
WATCHED_S = 30.0
_LIMIT_S = 600.0


@dataclass
class Restart:
    """Seconds since the start of the process."""

    ready_s: float = 0.0
    #: All trainings have their workers and GPUs; all their progress is known.
    adopted_s: float = 0.0
    read_s: float = 0.0
    cpu_s: float = 0.0
    #: The longest time without an answer: until everything is read, and in the time after.
    stopped_s: float = 0.0
    later_stopped_s: float = 0.0
    later_core: float = 0.0
    rss_mb: float = 0.0
    calls: Counter[str] | None = None
    later_calls: Counter[str] | None = None


def run(quick: bool) -> Report:
    nodes, ended, rounds = (25, 2_000, 1) if quick else (NODES, ENDED_JOBS, 3)
    report = Report(
        f"A restart with {nodes * GPUS_A_NODE:,} trainings on {nodes} nodes, and {ended:,} ended jobs",
        ("what", "median", "longest"),
    )
    with subjects.ground() as stack:
        running = write_site(stack, nodes, ended)
        taken = [_restart(stack, running, 10.0 if quick else WATCHED_S) for _ in range(rounds)]
    for what, values in {
        f"first answer, s (the bar is {READY_BAR_S:g})": [one.ready_s for one in taken],
        "all trainings have their workers and GPUs, s": [one.adopted_s for one in taken],
        "all their progress is read, s": [one.read_s for one in taken],
        "CPU until then, s": [one.cpu_s for one in taken],
        "longest time without an answer until then, s": [one.stopped_s for one in taken],
        "RSS then, MB": [one.rss_mb for one in taken],
        "longest time without an answer later, s": [one.later_stopped_s for one in taken],
        "cores in use later": [one.later_core for one in taken],
    }.items():
        report.rows.append((what, f"{median(values):.2f}", f"{max(values):.2f}"))
        report.data[what] = values
    for what, calls in (
        ("until then", [one.calls for one in taken]),
        ("later", [one.later_calls for one in taken]),
    ):
        report.notes.append(f"Commands {what}: {'; '.join(map(_shown_calls, calls))}.")
    report.notes.append(
        f"Each training has logged {STEPS} steps. /healthz is asked every 10 ms. Stand-ins print what "
        "Slurm would: what its controller takes is not measured."
    )
    return report


def _shown_calls(calls: Counter[str] | None) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted((calls or Counter()).items())) or "none"


# The site


def write_site(stack: DevStack, nodes: int, ended: int) -> int:
    """Write the store, the trainings' files and the commands; return how many trainings there are."""
    fill_store(stack, ended, ENDED_OFFERS)
    store = stack.data_dir / database.FILE_NAME
    names = [f"n{number:03d}" for number in range(1, nodes + 1)]
    gpus = [gpu_on_node(str(index), node) for node in names for index in range(GPUS_A_NODE)]
    writer = _RunWriter(stack)
    with closing(database.connect(store)) as db:
        db.execute("BEGIN")
        now = time.time()
        held = db.execute("SELECT validator, task_id FROM reservations").fetchall()
        offers.lapse_reservations(db, [TaskKey(*row) for row in held], now)
        for (job_id,) in db.execute(f"SELECT id FROM jobs WHERE {jobs.IS_OPEN}").fetchall():
            row = jobs.get_job(db, job_id)
            attempts.set_job_state(db, job_id, row.lock_token, JobState.CANCELLED, now)
        # Past the time in which a published model may be given another name.
        db.execute("UPDATE jobs SET deadline_at = ended_at WHERE ended_at IS NOT NULL")
        runs = [writer.write(db, number, gpu, now) for number, gpu in enumerate(gpus)]
        db.execute("COMMIT")
    _write_commands(_commands(stack), names, [f"{job_prefix(data_id(stack.data_dir))}{key}" for key in runs])
    _write_trial(stack)
    return len(runs)


class _RunWriter:
    """Writes trainings as the daemon and the backend leave them when they go on."""

    def __init__(self, stack: DevStack) -> None:
        self._data_dir = stack.data_dir
        self._runs = SlurmRuns(stack.data_dir / "backends" / "slurm" / "runs")
        self._task = sample_task(TaskType.INSTRUCT, Random(3))
        self._plan = _plan(self._task)
        self._progress = _progress(time.time() - AGE_S)

    def write(self, db: Any, number: int, gpu: str, now: float) -> str:
        began, key = now - AGE_S, TaskKey(VALIDATOR, f"running-{number:05d}")
        request = json.dumps({**self._task.start(), "task_id": key.task_id}).encode()
        start = StartRequest(
            key.task_id,
            TaskType.INSTRUCT,
            self._task.model,
            HOURS,
            self._task.expected_repo_name,
            began,
            request,
        )
        end = start.deadline_at
        hold = GpuReservation(key, ReservationKind.JOB, (gpu,), began, end)
        started = offers.record_offered_start(
            db, VALIDATOR, start, ReservationRow(hold, True, end), now=began, decision=None, infeasible=None
        )
        job_id, name = started.job_id, f"{started.job_id}-1-0123456789abcdef"
        folder = job_folder(self._data_dir, job_id).attempt(1)
        row = jobs.get_job(db, job_id)
        attempt = attempts.NewAttempt(1, "slurm", name, str(folder.path), (gpu,), end)
        attempts.begin_attempt(db, job_id, row.lock_token, began, attempt)
        attempts.set_backend_ref(db, attempts.attempts_of(db, job_id)[0].id, name)
        self._write_files(folder, start, began)
        self._runs.write(RunNote(name, str(folder.path), began, str(number + 1)))
        claim = self._runs.directory(name) / CLAIM
        claim.mkdir()
        (claim / "job").write_text(f"{number + 1}\n")
        return name

    def _write_files(self, folder: AttemptFolder, start: StartRequest, began: float) -> None:
        folder.path.mkdir(parents=True)
        run = RunSpec(
            task_id=start.task_id,
            task_type=start.task_type,
            model_id=start.model,
            model_path=str(self._data_dir / "models" / "base"),
            data_path=str(folder.path.parent / "inputs" / "train.json"),
            dataset=self._task.dataset_type,
            expected_repo_name=start.expected_repo_name,
            plan_path=str(folder.plan),
            work_dir=str(folder.work),
            submission_dir=str(folder.submission),
            progress_path=str(folder.progress),
            result_path=str(folder.result),
            stop_path=str(folder.stop),
            control_path=str(folder.control),
            began_at=began,
            end_by=start.deadline_at,
            deadline_at=start.deadline_at,
            seed=self._plan.targets.seed,
        )
        write_attempt(folder, run, self._plan)
        (folder.path / START_FILE).write_text(json.dumps({"at": began, "pid": 4242, "boot": "another"}))
        folder.progress.write_bytes(self._progress)


def _plan(task: SampleTask) -> TrainingPlan:
    hardware = Hardware(gpus=GpuSet(kind=parse_gpus("1xH100").kind, count=1), host_gpus=GPUS_A_NODE)
    spec = TaskSpec(task_type=task.task_type, hours=HOURS, task_id=task.task_id)
    model, data = facts_from_name(task.model, task.params), assumed_facts(task.task_type, 20_000)
    plan = plan_task(spec, model, data, hardware, load_profile("base"))
    if not plan.verdict.feasible:
        raise RuntimeError(f"the sample task cannot be planned: {plan.verdict.reason}")
    return plan


def _progress(began: float) -> bytes:
    draw, events = Random(5), [StageEvent(t=began, stage="load")]
    lines = [encode_event(event) for event in events]
    for step in range(1, STEPS + 1):
        at = began + AGE_S * step / STEPS
        loss = 2.0 - step / STEPS + draw.gauss(0.0, 0.05)
        lines.append(
            encode_event(
                StepEvent(
                    t=at, step=step * 10, total=STEPS * 60, epoch=step / STEPS, loss=loss, lr=1e-4,
                    grad_norm=0.7, tokens_s=13_000.0 + draw.gauss(0, 300), samples_s=12.0, mfu=0.42,
                    memory_bytes=64 * 10**9,
                    wait=0.01, ends_at=began + 5 * AGE_S,
                )
            )
        )  # fmt: skip
        if step % (STEPS // EVALS) == 0:
            score = HeldOutScore(value=loss, step=step * 10)
            lines.append(encode_event(EvalEvent(t=at, score=score, best=True, seconds=20.0)))
    return b"".join(lines)


def _write_trial(stack: DevStack) -> None:
    """Result of the last trial: the training environment was tried before the restart."""
    settings = load_settings(env=_settings(stack), env_file=None)
    identity = asyncio.run(build_here(settings, BackendKind.SLURM).identity("text"))
    (stack.data_dir / "backends" / RESULTS_FILE).write_text(json.dumps({f"slurm text {identity}": {}}))


# Slurm


def _commands(stack: DevStack) -> Path:
    return stack.folder / "slurm"


def _write_commands(folder: Path, nodes: list[str], names: list[str]) -> None:
    """Scripts that note each call, and print what was written beforehand."""
    folder.mkdir()
    now = int(time.time())
    start, end = now - int(AGE_S), now + int(HOURS * 3600)
    on = [nodes[number // GPUS_A_NODE] for number in range(len(names))]
    texts = {
        "nodes": "".join(
            f"NodeName={name} Arch=x86_64 CoresPerSocket=48 CPUAlloc=64 CPUEfctv=96 CPUTot=96 CPULoad=8.01 "
            f"AvailableFeatures=ib ActiveFeatures=ib Gres=gpu:h100:{GPUS_A_NODE} GresDrain=N/A "
            f"GresUsed=gpu:h100:{GPUS_A_NODE}(IDX:0-3) NodeAddr={name} NodeHostName={name} Version=23.11.4 "
            "OS=Linux 6.1 RealMemory=1000000 AllocMem=256000 FreeMem=20000 Sockets=2 Boards=1 State=MIXED "
            "ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=train "
            "BootTime=1700000000 SlurmdStartTime=1700000100 LastBusyTime=1700000200\n"
            for name in nodes
        ),
        "jobs": "".join(
            f"JobId={number} JobName={name} UserId=user(1000) GroupId=user(1000) MCS_label=N/A Priority=4294 "
            "Nice=0 Account=lab QOS=normal JobState=RUNNING Reason=None Dependency=(null) Requeue=0 "
            "Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=01:00:00 TimeLimit=07:00:00 TimeMin=N/A "
            f"SubmitTime={start} EligibleTime={start} StartTime={start} EndTime={end} Deadline=N/A "
            f"Partition=train NodeList={node} BatchHost={node} NumNodes=1 NumCPUs=16 JOB_GRES=gpu:h100:1   "
            f"Nodes={node} CPU_IDs=0-15 Mem=64000 GRES=gpu:h100:1(IDX:0) OverSubscribe=OK Command=(null) "
            "WorkDir=/shared\n"
            for number, (name, node) in enumerate(zip(names, on, strict=True), 1)
        ),
        "partitions": "PartitionName=train Default=YES MaxTime=UNLIMITED Nodes=ALL State=UP\n",
        "reservations": "",
        "squeue": "".join(
            f"{number}|RUNNING|{start}|{end}|{node}|None|{name}\n"
            for number, (name, node) in enumerate(zip(names, on, strict=True), 1)
        ),
        "sinfo": f"96|1000000|gpu:h100:{GPUS_A_NODE}|infinite|train*\n",
    }
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    for program in ("squeue", "scontrol", "sinfo", "sbatch", "scancel", "sacct"):
        last = "for last; do :; done" if program == "scontrol" else f"last={program}"
        path = folder / program
        path.write_text(
            f'#!/bin/sh\necho {program} >> "{folder}/calls"\n{last}\nexec cat "{folder}/$last.txt"\n'
        )
        path.chmod(0o755)


def _calls(stack: DevStack) -> Counter[str]:
    path = _commands(stack) / "calls"
    return Counter(path.read_text().split()) if path.exists() else Counter()


# The restart


def _settings(stack: DevStack) -> dict[str, str]:
    return {
        **stack.settings(),
        "BACKEND": "slurm",
        "GPUS": "auto",
        "POLICY": "auto",
        "TRAINER_PYTHON": str(PYTHON),
        "TRAINER_SANDBOX": "off",
        "SLURM_BIN_DIR": str(_commands(stack)),
    }


def _restart(stack: DevStack, running: int, watched_s: float) -> Restart:
    taken, before = Restart(), _calls(stack)
    child = daemon_process(stack, {**_settings(stack), **subjects.QUIET})
    began = time.perf_counter()
    with child:
        taken.ready_s = child.start_s
        with _Asking(child) as asking:
            _until(lambda: _status(stack)["training"]["jobs_worked_on"] == running, "workers", child)
            taken.adopted_s = time.perf_counter() - began
            _until(lambda: _with_progress(stack) == running, "progress", child)
            taken.read_s = time.perf_counter() - began
        taken.cpu_s, taken.rss_mb = machine.cpu_s(child.pid), machine.rss_mb(child.pid)
        taken.stopped_s, taken.calls = asking.longest_s, _calls(stack) - before
        before, used, since = _calls(stack), machine.cpu_s(child.pid), time.perf_counter()
        with _Asking(child) as asking:
            time.sleep(watched_s)
        taken.later_core = (machine.cpu_s(child.pid) - used) / (time.perf_counter() - since)
        taken.later_stopped_s, taken.later_calls = asking.longest_s, _calls(stack) - before
        if (open_jobs := _status(stack)["training"]["jobs_worked_on"]) != running:
            raise RuntimeError(f"{open_jobs} of {running} jobs are left:\n{child.log_tail()}")
    return taken


class _Asking:
    """Ask for /healthz all the time, and keep the longest time without an answer."""

    def __init__(self, child: ChildProcess) -> None:
        self.longest_s = 0.0
        self._port, self._over = child.port, threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> _Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        with closing(http.client.HTTPConnection(LOOPBACK, self._port, timeout=_LIMIT_S)) as connection:
            while not self._over.is_set():
                began = time.perf_counter()
                connection.request("GET", "/healthz")
                connection.getresponse().read()
                self.longest_s = max(self.longest_s, time.perf_counter() - began)
                time.sleep(0.01)


def _until(is_so: Any, what: str, child: ChildProcess) -> None:
    ends = time.monotonic() + _LIMIT_S
    while not is_so():
        if time.monotonic() > ends:
            raise RuntimeError(f"no {what} of all trainings within {_LIMIT_S:g} s:\n{child.log_tail()}")
        time.sleep(0.2)


def _status(stack: DevStack) -> Any:
    return _get(stack, "/status")


def _with_progress(stack: DevStack) -> int:
    listed = _get(stack, "/jobs?open=true&limit=1000")["jobs"]
    return sum(
        1 for job in listed if job["live"] and job["live"]["step"] == STEPS * 10 and job["live"]["gpus"]
    )


def _get(stack: DevStack, path: str) -> Any:
    request = urllib.request.Request(f"{stack.operator_url}{path}", headers=stack.operator_headers())
    with urllib.request.urlopen(request, timeout=_LIMIT_S) as answer:
        return json.load(answer)
