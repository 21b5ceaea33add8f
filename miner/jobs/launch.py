"""One attempt on disk: what the trainer gets, what the backend gets, and how to run it again by hand.

The backend's part is made from the files again after a restart, so nothing of it lives in memory only.
A replay uses the same command and environment in a directory of its own. Each job gets its own port for
`accelerate launch`: a second job on 29500 would fail with "address in use".
"""

from __future__ import annotations

import math
import shlex
import socket
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from core.domain.choices import Engine
from core.domain.job_states import EndReason, StepFailed
from core.domain.keys import nodes_of
from core.planning.plan import TrainingPlan
from core.recipes.base import ImageFiles, RecipeError, RunInputs
from core.recipes.launch import launch_environment
from core.recipes.render import render
from core.runs.run_files import RunSpec
from miner.backends.base import IMAGE_OF, AttemptSpec, Mount
from miner.inputs.fetch import FetchedInputs, JobTask
from miner.jobs.folder import AttemptFolder, write_attempt_file
from miner.settings import Settings
from miner.store.attempts import AttemptRow
from miner.store.jobs import JobRow

#: The trainer's command by image; the backend replaces `python` by the training environment's interpreter.
TRAINERS: dict[str, tuple[str, ...]] = {
    "text": ("python", "-m", "trainer.text"),
    "image": ("python", "-m", "trainer.image"),
    "toolkit": ("python", "-m", "trainer.image"),
}
#: Everything was fetched before: what still uses the network has a bug and should fail at once.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
#: The backend's own backstop comes after ours.
_LIMIT_SLACK_S = 600.0


def read_run(folder: AttemptFolder) -> RunSpec:
    """Read the run as the daemon wrote it. Another version's is read too, whose plan is not."""
    return RunSpec.from_json(folder.given_run.read_bytes())


@dataclass(frozen=True, slots=True)
class JobAttempt:
    """Everything needed to launch an attempt, also after a restart."""

    row: AttemptRow
    folder: AttemptFolder
    run: RunSpec
    plan: TrainingPlan

    @classmethod
    def load(cls, row: AttemptRow) -> JobAttempt:
        folder = AttemptFolder(row.folder)
        return cls(row, folder, read_run(folder), TrainingPlan.from_json(folder.given_plan.read_bytes()))


@dataclass(frozen=True, slots=True)
class Grant:
    """The means of an attempt: its GPUs, the plan for them, and its time."""

    plan: TrainingPlan
    gpus: tuple[str, ...]
    #: The trainer's own deadline.
    end_by: float
    resume_from: Path | None = None


def run_spec(
    row: JobRow, task: JobTask, inputs: FetchedInputs, folder: AttemptFolder, grant: Grant, now: float
) -> RunSpec:
    return RunSpec(
        task_id=row.task_id,
        task_type=task.task_type,
        model_id=task.model,
        model_path=str(inputs.model_path),
        data_path=str(inputs.data_path),
        dataset=task.dataset,
        image_type=task.image_type,
        expected_repo_name=row.expected_repo_name,
        plan_path=str(folder.plan),
        work_dir=str(folder.work),
        submission_dir=str(folder.submission),
        progress_path=str(folder.progress),
        result_path=str(folder.result),
        stop_path=str(folder.stop),
        control_path=str(folder.control),
        began_at=now,
        end_by=grant.end_by,
        deadline_at=row.deadline_at,
        resume_from=str(grant.resume_from) if grant.resume_from else None,
        seed=grant.plan.targets.seed,
    )


def write_attempt(folder: AttemptFolder, run: RunSpec, plan: TrainingPlan) -> None:
    """Write the attempt's directory; `StepFailed` for a plan that the engine would not run as written."""
    folder.create()
    for run_file, plan_file in ((folder.given_run, folder.given_plan), (folder.run, folder.plan)):
        write_attempt_file(run_file, run.to_json() + "\n")
        write_attempt_file(plan_file, plan.to_json() + "\n")
    command = [shlex.join(trainer_command(plan, run))]
    if plan.engine is not Engine.NATIVE:
        command += _write_config(folder, run, plan)
    write_attempt_file(folder.command, "\n".join(command) + "\n")
    shown = "".join(f"{name}={value}\n" for name, value in sorted(run_environment(run, plan).items()))
    write_attempt_file(folder.environment, shown)


def _write_config(folder: AttemptFolder, run: RunSpec, plan: TrainingPlan) -> list[str]:
    """Write the engine's configuration as the trainer will render it, but with the rows as fetched."""
    try:
        rendered = render(plan, inputs_for_display(run, plan, folder.config))
    except RecipeError as error:
        raise StepFailed(EndReason.INFEASIBLE, str(error)) from None
    for name, text in rendered.files.items():
        write_attempt_file(folder.config / name, text)
    return ["# which starts", f"# {shlex.join(rendered.command)}"]


def inputs_for_display(run: RunSpec, plan: TrainingPlan, config: Path) -> RunInputs:
    model = Path(run.model_path)
    parts = model if model.is_dir() else model.parent
    return RunInputs(
        model_path=run.model_path,
        train_path=run.data_path,
        output_dir=f"{run.work_dir}/output",
        work_dir=run.work_dir,
        config_dir=str(config),
        plan_path=run.plan_path,
        dataset=run.dataset,
        resume_from=run.resume_from,
        image=ImageFiles(
            clip_l=str(parts / "clip_l.safetensors"),
            t5xxl=str(parts / "t5xxl_fp16.safetensors"),
            ae=str(parts / "ae.safetensors"),
            text_encoder=str(parts / "text_encoder"),
            vae=str(parts),
        )
        if run.dataset is None
        else ImageFiles(),
        port=plan.launch.port or 29500,
    )


def trainer_command(plan: TrainingPlan, run: RunSpec) -> tuple[str, ...]:
    return (*TRAINERS[IMAGE_OF[plan.engine]], "--run", str(Path(run.progress_path).with_name("run.json")))


def run_environment(run: RunSpec, plan: TrainingPlan) -> Mapping[str, str]:
    """The run's environment, without secrets: its log may show it."""
    inputs = inputs_for_display(run, plan, Path(run.work_dir).with_name("config"))
    return {**launch_environment(plan, inputs), **_OFFLINE}


def attempt_spec(job: JobRow, attempt: JobAttempt, now: float, free_until: float = math.inf) -> AttemptSpec:
    """`free_until`: when others begin to use its GPUs. A time that is too short is not passed on: the
    scheduler then decides whether it can begin, and where it cannot it is tried elsewhere."""
    run, plan = attempt.run, attempt.plan
    paths = [Path(run.data_path), Path(run.model_path), *([Path(run.resume_from)] if run.resume_from else [])]
    return AttemptSpec(
        key=attempt.row.key,
        argv=trainer_command(plan, run),
        run_dir=attempt.folder.path,
        mounts=tuple(Mount(path) for path in paths),
        env=run_environment(run, plan),
        gpus=_real_gpus(attempt),
        nodes=tuple(filter(None, nodes_of(attempt.row.gpus))),
        memory_bytes=plan.container.memory_bytes,
        shm_bytes=plan.container.shm_bytes,
        cpus=plan.container.cpus,
        hostile=run.task_type.generates,
        cluster=plan.slurm,
        image=IMAGE_OF[plan.engine],
        timeout_s=max(run.deadline_at - now, 0.0) + _LIMIT_SLACK_S,
        free_s=free_until - now if run.end_by < free_until < math.inf else None,
        labels={"job": str(job.id), "attempt": str(attempt.row.number), "task": job.task_id},
    )


def _real_gpus(attempt: JobAttempt) -> tuple[str, ...]:
    """Return the GPUs that CUDA knows: pretended ones only count jobs."""
    return () if attempt.plan.gpus.is_cpu else attempt.row.gpus


#: Below the system's own range: no outgoing connection takes the port before the training does.
PORT_RANGE = range(20_000, 30_000)
_PORT_TRIES = 200


def free_port(taken: Collection[int], random: Random, *, is_local: bool = True) -> int:
    """Find a port that none of our jobs has and, on this machine, nobody listens on."""
    for _ in range(_PORT_TRIES):
        port = random.choice(PORT_RANGE)
        if port not in taken and (not is_local or _port_is_free(port)):
            return port
    raise OSError(f"no port of {PORT_RANGE.start}-{PORT_RANGE.stop - 1} is free on 127.0.0.1")


def _port_is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@dataclass(frozen=True, slots=True)
class AttemptReplay:
    number: int
    backend: str
    folder: str
    run_json: str
    plan_json: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    #: Paths that the command needs: inputs, which are removed a while after a job is over.
    needs: tuple[str, ...]
    #: True if reward functions from outside would run.
    hostile: bool

    @classmethod
    def from_attempt(cls, attempt: JobAttempt, settings: Settings) -> AttemptReplay:
        folder = AttemptFolder(attempt.folder.path.with_name(f"replay_{attempt.row.number}"))
        run = _redirected_run(attempt.run, folder)
        command = trainer_command(attempt.plan, run)
        python = str(settings.trainer_python or "python")
        environment = dict(run_environment(run, attempt.plan))
        if gpus := _real_gpus(attempt):
            # Only the number of a cluster's GPU: CUDA does not know nodes.
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.partition("@")[0] for gpu in gpus)
        needs = (run.model_path, run.data_path, *([run.resume_from] if run.resume_from else []))
        return cls(
            attempt.row.number,
            attempt.row.backend,
            str(folder.path),
            run.to_json(),
            attempt.plan.to_json(),
            (python, *command[1:]),
            environment,
            needs,
            run.task_type.generates,
        )

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "missing": self.missing()}

    def missing(self) -> list[str]:
        return [path for path in self.needs if not Path(path).exists()]

    def script(self) -> str:
        """Write a shell script. The trainer's packages must be on its interpreter's path."""
        lines = [
            f"# Attempt {self.number} again, by hand: it ran on {self.backend}, this is a plain process.",
            *(["# WARNING: its reward functions come from outside; run this in a sandbox."] * self.hostile),
            *(f"# MISSING: {path}" for path in self.missing()),
            f"mkdir -p {shlex.quote(self.folder)}/work {shlex.quote(self.folder)}/config",
            f"cat > {shlex.quote(self.folder)}/run.json <<'END'\n{self.run_json}\nEND",
            f"cat > {shlex.quote(self.folder)}/plan.json <<'END'\n{self.plan_json}\nEND",
            f"cd {shlex.quote(self.folder)}",
            *(f"export {name}={shlex.quote(value)}" for name, value in sorted(self.environment.items())),
            shlex.join(self.command),
        ]
        return "\n".join(lines)


def _redirected_run(run: RunSpec, folder: AttemptFolder) -> RunSpec:
    """The run in another directory, without its deadline, which has passed."""
    far = run.began_at + 10 * 365 * 86_400
    return run.model_copy(
        update={
            "plan_path": str(folder.plan) if run.plan_path else None,
            "work_dir": str(folder.work),
            "submission_dir": str(folder.submission),
            "progress_path": str(folder.progress),
            "result_path": str(folder.result),
            "stop_path": str(folder.stop),
            "control_path": str(folder.control),
            "end_by": far,
            "deadline_at": far,
        }
    )
