"""Run attempts as jobs of a Slurm cluster.

A run's reference is its key. Its job in Slurm is found by name, which holds the key and the data directory's
id: after a reset of the controller the numbers begin again. The end is the wrapper's record first, then
Slurm's word, then the accounting's where there is one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from miner.backends import ownership
from miner.backends.base import (
    EXIT_FILE,
    AttemptSpec,
    BackendRejected,
    BackendRun,
    BackendUnreachable,
    EndCause,
    RunPhase,
    RunStatus,
)
from miner.backends.environment import TOOLS, TrainingEnvironment
from miner.backends.preflight import check_spec, gpus_of, hand_over_files, mounts_of
from miner.backends.registry import BackendContext
from miner.backends.run_folder import (
    BackendEndReport,
    end_status,
    read_start,
    read_stop_record,
    write_stop_record,
)
from miner.backends.slurm.commands import SUBMIT_S, SlurmCommands, SlurmRefused, SlurmUnreachable, job_prefix
from miner.backends.slurm.job_script import (
    FOLDER,
    TAKEN,
    JobRequest,
    ScriptParts,
    container_parts,
    job_script,
    sbatch_options,
    script_environment,
)
from miner.backends.slurm.jobs import SlurmJob, SlurmJobs, ended_status, never_begins
from miner.backends.slurm.nodes import NodeSizes
from miner.backends.slurm.runs import RunNote, SlurmRuns
from miner.backends.slurm.settings import SlurmSection
from miner.settings import Settings

log = logging.getLogger(__name__)

T = TypeVar("T")

#: A job that Slurm does not know, without a recorded end, is asked for again for so long before it counts as
#: lost: a shared file system shows files late.
SETTLE_S = 30.0
#: A job goes on that long after its end is recorded: without slurmstepd, which nobody misses, it never ends.
LINGER_S = 60.0
#: How often Slurm is asked for the state of all jobs, with one command.
POLL_S = 5.0
#: How long a reason to wait that does not pass by itself must last.
NEVER_S = 20.0
#: The time that a job gets beyond its own limit, and where it has none.
SLACK_S, NO_LIMIT_S = 300.0, 7 * 86_400.0
#: Refusals that another node, or another time, may cure.
_NOT_HERE = re.compile(
    r"[Nn]ode configuration is not available|[Ii]nvalid node name|[Rr]equested nodes? .*(busy|down|not avail)"
    r"|partition configuration not available now|[Rr]equested reservation is invalid|not in this partition"
    r"|Required (node|partition) not available|reservation not usable now|due to maintenance reservation"
    # Where it is a limit of submits, a line before says so.
    r"|violates accounting/QOS policy"
    r"|[Ii]nvalid feature|[Mm]emory specification can ?not be satisfied|Invalid generic resource"
)
_NOT_NOW = re.compile(r"MaxSubmitJob|MaxSubmitPU|temporarily unable|[Tt]ry again|I/O error writing script")


#: What settings and profiles say of where a job runs, by sbatch's option.
PLACEMENT = ("partition", "account", "qos", "constraint", "reservation")
CONTAINER_HAS_NETWORK = "trainings run in SLURM_CONTAINER, which has the machine's network"


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """Options of jobs by the settings; a profile may set others for its tasks."""

    #: By each word of PLACEMENT.
    placement: Mapping[str, str]
    options: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    container: str | None = None
    nodes: str = ""
    cpus_per_gpu: int = 16
    memory_per_gpu: int = 64 * 10**9
    pending_s: float = 600.0
    grace_s: float = 90.0
    poll_s: float = POLL_S

    @classmethod
    def of(cls, settings: Settings) -> SlurmOptions:
        own = settings.section(SlurmSection)
        return cls(
            placement={name: getattr(own, f"slurm_{name}") or "" for name in PLACEMENT},
            options=own.slurm_options,
            modules=own.slurm_modules,
            container=own.slurm_container,
            nodes=own.slurm_nodes or "",
            cpus_per_gpu=own.slurm_cpus_per_gpu,
            memory_per_gpu=own.slurm_memory_per_gpu,
            pending_s=own.slurm_pending_seconds,
            grace_s=settings.stop_grace_seconds,
            poll_s=POLL_S,
        )


class SlurmBackend:
    name = "slurm"

    def __init__(
        self,
        context: BackendContext,
        environment: TrainingEnvironment | None,
        commands: SlurmCommands,
        runs: SlurmRuns,
        options: SlurmOptions,
    ) -> None:
        """`environment`: None if trainings run in a container."""
        self._context = context
        self._commands = commands
        self._runs = runs
        self._options = options
        self._interpreter = environment.interpreter if environment else None
        self._code = environment.code if environment else None
        self._sandbox = environment.sandbox if environment else None
        self._why_no_sandbox = environment.why_no_sandbox if environment else CONTAINER_HAS_NETWORK
        self._wrapper_file = context.wrapper_file()
        self._jobs = SlurmJobs(commands, options.poll_s)
        self._sizes = NodeSizes(commands)
        self._locks: dict[str, asyncio.Lock] = {}
        #: By key: since when an answer must be newer (submitted, stopped), and when it was first missing or
        #: first waited for nothing.
        self._changed_at: dict[str, float] = {}
        self._missing_since: dict[str, float] = {}
        self._stuck_since: dict[str, float] = {}
        #: Since when its end is recorded while its job goes on.
        self._exited_since: dict[str, float] = {}

    @property
    def can_sandbox(self) -> bool:
        return self._sandbox is not None

    async def submit(self, spec: AttemptSpec) -> str:
        async with self._locks.setdefault(spec.key, asyncio.Lock()):
            return await _reachable(self._submit(spec))

    async def find(self, key: str) -> str | None:
        return key if await _reachable(self._known(key)) else None

    async def poll(self, ref: str, run_dir: Path) -> RunStatus:
        return await _reachable(self._poll(ref, run_dir))

    async def stop(self, ref: str, *, force: bool = False) -> None:
        await _reachable(self._stop(ref, force))

    async def dump_stacks(self, ref: str) -> None:
        await _reachable(self._cancel(ref, "--batch", "--signal=USR1"))

    async def remove(self, ref: str) -> None:
        await _reachable(self._remove(ref))

    async def missing_images(self) -> Mapping[str, str]:
        if self._interpreter is None:
            return {}
        if not self._interpreter.path.exists():
            return dict.fromkeys(("text", *TOOLS), f"{self._interpreter.path} no longer exists")
        return {
            short: f"there is no {path} here: such pictures need a container with them"
            for short, path in TOOLS.items()
            if not path.is_dir()
        }

    async def identity(self, image: str) -> str:
        container = self._options.container or ""
        kind, _, path = container.partition(":")
        if kind == "apptainer":
            container += f"@{_changed(Path(path))}"
        python = self._interpreter.identity() if self._interpreter else ""
        modules = " ".join(self._options.modules)
        sandbox = "in a sandbox" if self._sandbox else "without a sandbox"
        code = self._code.name if self._code else ""
        return " ".join(filter(None, (python, code, container, modules, sandbox)))

    async def list_runs(self) -> list[BackendRun]:
        """All that is noted, and what Slurm has of ours although its note is gone."""
        notes = {note.key: note for note in self._runs.all()}
        runs = [BackendRun(key, key, Path(note.run_dir)) for key, note in notes.items()]
        jobs = await _reachable(self._jobs.all())
        prefix = self._job_name("")
        for name, named in jobs.items():
            key = name.removeprefix(prefix)
            if name.startswith(prefix) and key not in notes and not all(job.is_over for job in named):
                runs.append(BackendRun(key, key, await _reachable(self._work_dir(named[0]))))
        return runs

    async def close(self) -> None:
        """Nothing to close: jobs go on."""

    # Submit

    async def _submit(self, spec: AttemptSpec) -> str:
        await asyncio.to_thread(check_spec, spec, self._context.redact, self._context.trusted)
        # A key without a note is a new one: notes are written before anything is submitted.
        if await asyncio.to_thread(self._runs.read, spec.key) and await self._known(spec.key):
            return spec.key
        self._check_hostile(spec)
        self._check_binds(spec)
        if self._sandbox is not None and self._sandbox.uid is not None:
            uid = self._sandbox.uid
            await asyncio.to_thread(hand_over_files, spec, mounts_of(spec), uid, self._context.trusted)
        note = RunNote(spec.key, str(spec.run_dir), time.time())
        request = await self._request(spec)
        script = job_script(request, self._parts(spec, request), self._wrapper(spec, request))
        # Before the job is there: whatever happens now, the next daemon finds it.
        await asyncio.to_thread(self._runs.write, note)
        try:
            printed = await self._commands.run(
                "sbatch", *sbatch_options(request), script=script, limit_s=SUBMIT_S
            )
        except SlurmRefused as error:
            if _NOT_NOW.search(str(error)):
                raise BackendUnreachable(f"Slurm takes no job at the moment: {error}") from None
            if not _NOT_HERE.search(str(error)):
                await asyncio.to_thread(self._runs.forget, spec.key)
                raise BackendRejected(f"{spec.key!r} cannot be submitted: {error}") from None
            note = replace(note, not_started=f"refused by Slurm: {error}")
        else:
            # `--parsable` prints "id" or "id;cluster".
            note = replace(note, job=printed.strip().partition(";")[0])
        await asyncio.to_thread(self._runs.write, note)
        self._changed_at[spec.key] = time.monotonic()
        return spec.key

    def _check_hostile(self, spec: AttemptSpec) -> None:
        if spec.hostile and self._sandbox is None:
            raise BackendRejected(
                f"{spec.key!r} runs third-party code, and there is no sandbox: {self._why_no_sandbox}"
            )
        if spec.hostile and len(spec.nodes) > 1:
            raise BackendRejected(
                f"{spec.key!r} runs third-party code, which has no network, and needs one for several nodes"
            )

    def _check_binds(self, spec: AttemptSpec) -> None:
        """Containers' options separate paths by these signs, and cannot quote them."""
        for mount in mounts_of(spec) if self._options.container else ():
            if re.search("[:,]", str(mount.path)):
                raise BackendRejected(f"{mount.path} cannot be bound into a container: a : or a , is in it")

    async def _known(self, key: str) -> bool:
        """Return True if it was ever submitted. A job that Slurm took before our record was complete is
        recorded now."""
        note = await asyncio.to_thread(self._runs.read, key)
        if note is not None and (note.job or note.not_started):
            return True
        named = await self._jobs.named(self._job_name(key), after=time.monotonic())
        if note is None:
            return any(not job.is_over for job in named)
        job = named[0].id if named else await asyncio.to_thread(self._runs.claimed_by, key)
        if job:
            await asyncio.to_thread(self._runs.write, replace(note, job=job))
        return bool(job)

    async def _request(self, spec: AttemptSpec) -> JobRequest:
        own, cluster = self._options, spec.cluster
        placement = {name: cluster.get(name) or value for name, value in own.placement.items()}
        nodes = spec.nodes
        if not nodes and own.nodes:
            # A trial, which no GPUs were chosen for: on one of the operator's nodes all the same.
            nodes = await self._sizes.one_of(own.nodes, placement["partition"])
        size = await self._sizes.least(nodes, placement["partition"])
        gpus = -(-len(gpus_of(spec)) // max(len(nodes), 1))
        cpus, memory = own.cpus_per_gpu * max(gpus, 1), own.memory_per_gpu * max(gpus, 1)
        limit = spec.timeout_s + SLACK_S + own.grace_s if spec.timeout_s is not None else NO_LIMIT_S
        if size is not None:
            # Without GPUs half of the node, so that a trial finds room beside a training.
            share = gpus / max(size.gpus, gpus) if gpus else 0.5
            cpus = max(min(cpus, int(size.cpus * share)), 1)
            memory = min(spec.memory_bytes or memory, int(size.memory_bytes * (share if gpus else 1)))
            limit = min(limit, size.limit_s or limit)
        if spec.free_s is not None:
            # Slurm counts in minutes, from a moment that is still to come.
            limit = min(limit, max(spec.free_s // 60 - 1, 1) * 60)
        extra = tuple(cluster["options"].split()) if cluster.get("options") else own.options
        return JobRequest(
            name=self._job_name(spec.key),
            run_dir=spec.run_dir,
            nodes=nodes,
            node_count=max(len(nodes), 1),
            gpus_per_node=gpus,
            cpus=cpus,
            memory_bytes=memory,
            limit_s=limit,
            grace_s=min(own.grace_s, limit / 4),
            placement=placement,
            options=extra,
            gpu_type=size.gpu_type if size is not None else "",
        )

    def _parts(self, spec: AttemptSpec, request: JobRequest) -> ScriptParts:
        container = self._options.container
        directory = self._runs.directory(spec.key)
        prefix, more = list[str](), list[str]()
        if container:
            prefix, more = container_parts(container, spec, self._wrapper_file, directory)
        home = "/tmp" if self._sandboxed(request) else str(spec.run_dir)  # noqa: S108 - the sandbox's own
        return ScriptParts(
            directory=directory,
            mark=ownership.run_mark(self._context.data_id, spec.key),
            env=script_environment(spec, self._code, home),
            modules=self._options.modules,
            prefix=tuple(prefix),
            srun_options=tuple(more),
            programs=self._interpreter.path.parent if self._interpreter else None,
        )

    def _sandboxed(self, request: JobRequest) -> bool:
        """Nodes of one job must reach each other, and the sandbox has no network."""
        return self._sandbox is not None and request.node_count == 1

    def _wrapper(self, spec: AttemptSpec, request: JobRequest) -> list[str]:
        python = str(self._interpreter.path) if self._interpreter else "python3"
        argv = [python if spec.argv[0] == "python" else spec.argv[0], *spec.argv[1:]]
        if self._sandbox is not None and self._sandboxed(request):
            argv = self._sandbox.command(spec, argv)
        options = ["--dir", FOLDER]
        for name, value in self._context.ulimits.items():
            options += ["--rlimit", f"{name}={value}"]
        # The wrapper's own limit comes before Slurm's, whose clock is coarse.
        limit = min(spec.timeout_s or request.limit_s, max(request.limit_s - request.grace_s, 30.0))
        options += ["--limit-s", f"{limit:g}"]
        return [python, "-I", "-S", str(self._wrapper_file), *options, "--", *argv]

    # Poll

    async def _poll(self, key: str, run_dir: Path) -> RunStatus:
        # One thread for all that is read: polls of running jobs are most of what the backend does.
        note, claim, start, exited = await asyncio.to_thread(
            lambda: (
                self._runs.read(key),
                self._runs.claimed_by(key),
                read_start(run_dir),
                _exists(run_dir / EXIT_FILE),
            )
        )
        try:
            job = await self._job(key, note, claim, after=0.0 if exited else self._changed_at.get(key))
        except (SlurmUnreachable, TimeoutError):
            status = await asyncio.to_thread(end_status, run_dir, BackendEndReport(here=False))
            # A success is sure without Slurm, and its submission may be due. Other ends need Slurm's word.
            if exited and status.why is EndCause.OK:
                return status
            raise
        if job is None and exited and note is not None:
            return await asyncio.to_thread(end_status, run_dir, BackendEndReport(here=False))
        if job is None:
            return await self._forgotten(key, note, claim, run_dir)
        self._missing_since.pop(key, None)
        if job.is_waiting:
            return await self._waiting(key, note, job)
        if not job.is_over:
            if exited and await self._lingers(key, job):
                return await asyncio.to_thread(end_status, run_dir, BackendEndReport(here=False))
            started_at = start.at if start else job.started_at
            # Whoever looks at the job sees the detail in the place of its progress.
            detail = "" if job.state == "RUNNING" else str(job)
            return RunStatus(RunPhase.RUNNING, started_at=started_at, detail=detail, node=job.nodes)
        if not exited:
            job = await self._jobs.details(job)
        why = note.not_started if note else ""
        return await asyncio.to_thread(ended_status, job, run_dir, why)

    async def _lingers(self, key: str, job: SlurmJob) -> bool:
        """Return True if it runs on long after its recorded end. It is cancelled, and may not end even so."""
        since = self._exited_since.setdefault(key, time.monotonic())
        if time.monotonic() - since <= LINGER_S:
            return False
        log.warning("%s goes on after its recorded end, and is cancelled", job)
        await self._cancel(key)
        return True

    async def _job(
        self, key: str, note: RunNote | None, claim: str, *, after: float | None
    ) -> SlurmJob | None:
        """The run's job, by an answer after `after` (0: a new one) and not older than the interval."""
        fresh = time.monotonic() if after == 0.0 else after
        job = _chosen(await self._jobs.named(self._job_name(key)), note, claim)
        if fresh is not None and not (job is not None and job.is_over):
            job = _chosen(await self._jobs.named(self._job_name(key), after=fresh), note, claim)
        return job

    async def _waiting(self, key: str, note: RunNote | None, job: SlurmJob) -> RunStatus:
        """A job that waits for too long, or for nothing that will come, is withdrawn."""
        never = never_begins(job.reason)
        now = time.monotonic()
        stuck_since = self._stuck_since.setdefault(key, now) if never else None
        if not never:
            self._stuck_since.pop(key, None)
        waited = time.time() - (note.noted_at if note else time.time())
        overdue = waited > self._options.pending_s
        if overdue or (stuck_since is not None and now - stuck_since > NEVER_S):
            why = f"Slurm did not begin it within {waited:.0f} s: {job.reason}"
            if note is not None and not note.not_started:
                await asyncio.to_thread(self._runs.write, replace(note, not_started=why))
            # One that has just begun goes on. A node that is being prepared may never be.
            await self._cancel(key, *([] if job.state == "CONFIGURING" else ["--state=PENDING"]))
        return RunStatus(RunPhase.QUEUED, detail=str(job), node=job.nodes)

    async def _forgotten(self, key: str, note: RunNote | None, claim: str, run_dir: Path) -> RunStatus:
        """Slurm does not know it, and no end is recorded where one was looked for."""
        nowhere = BackendEndReport(here=False)
        if note is None or self._is_stopped(run_dir):
            return await asyncio.to_thread(end_status, run_dir, nowhere)
        if note.not_started:
            return RunStatus(RunPhase.ENDED, EndCause.NOT_STARTED, detail=note.not_started)
        since = self._missing_since.setdefault(key, time.monotonic())
        job = await self._jobs.accounted(self._job_name(key), claim or note.job)
        if job is not None and job.code != TAKEN:
            return await asyncio.to_thread(ended_status, job, run_dir)
        if time.monotonic() - since < SETTLE_S:
            raise BackendUnreachable(
                f"Slurm does not know job {note.job} and no end is recorded: asked again"
            )
        return await asyncio.to_thread(end_status, run_dir, nowhere)

    def _is_stopped(self, run_dir: Path) -> bool:
        return read_stop_record(run_dir) is not None

    # Stop and remove

    async def _stop(self, key: str, force: bool) -> None:
        note, claim = await asyncio.to_thread(self._recorded, key)
        job = await self._job(key, note, claim, after=time.monotonic())
        if job is None or job.is_over:
            return
        run_dir = Path(note.run_dir) if note else await self._work_dir(job)
        started = False
        if run_dir is not None:
            await asyncio.to_thread(write_stop_record, run_dir, force=force)
            started = await asyncio.to_thread(lambda: read_start(run_dir) is not None)
        if force:
            # The wrapper kills all that it started and records the end, within KillWait.
            await self._cancel(key, "--batch", "--signal=QUIT")
        if force or not started:
            await self._cancel(key)
        else:
            await self._cancel(key, "--batch", "--signal=TERM")
        self._changed_at[key] = time.monotonic()

    async def _cancel(self, key: str, *options: str) -> None:
        """By name: whatever has this key, and nothing else."""
        if not key:
            return
        try:
            await self._commands.run(
                "scancel", f"--user={os.geteuid()}", f"--name={self._job_name(key)}", *options
            )
        except SlurmRefused as error:
            log.debug("scancel of %s: %s", key, error)  # it ended meanwhile

    async def _remove(self, key: str) -> None:
        note, claim = await asyncio.to_thread(self._recorded, key)
        job = await self._job(key, note, claim, after=0.0)
        if job is not None and not job.is_over:
            log.debug("run %s goes on and is left alone", key)
            return
        await asyncio.to_thread(self._runs.forget, key)
        for known in (
            self._changed_at,
            self._missing_since,
            self._stuck_since,
            self._exited_since,
            self._locks,
        ):
            known.pop(key, None)

    def _recorded(self, key: str) -> tuple[RunNote | None, str]:
        return self._runs.read(key), self._runs.claimed_by(key)

    async def _work_dir(self, job: SlurmJob) -> Path | None:
        try:
            text = await self._commands.run("scontrol", "--oneliner", "show", "job", job.id)
        except SlurmRefused:
            return None  # forgotten meanwhile
        folder = re.search(r"(?:^|\s)WorkDir=(/.*?)(?:\s[A-Za-z]+=|$)", text)
        return Path(folder[1]) if folder else None

    def _job_name(self, key: str) -> str:
        return job_prefix(self._context.data_id) + key


async def _reachable(call: Awaitable[T]) -> T:
    try:
        return await call
    except (SlurmUnreachable, SlurmRefused, TimeoutError, OSError) as error:
        raise BackendUnreachable(f"Slurm: {error}") from None


def _chosen(jobs: list[SlurmJob], note: RunNote | None, claim: str) -> SlurmJob | None:
    """The job that has begun, else one that can still begin, best the noted one."""
    if claim:
        return next((job for job in jobs if job.id == claim), None)
    noted = note.job if note else ""
    return min(jobs, key=lambda job: (job.is_over, job.id != noted), default=None)


def _exists(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
