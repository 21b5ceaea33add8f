"""One attempt on disk: what the trainer is told, what the engine is told, and what a person can read.

The engine's part is made from the files again after a restart, so nothing of it lives in memory only.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from core.choices import Engine as TrainingEngine
from core.hardware import Device
from core.plan import TrainingPlan
from core.recipes.launch import environment
from core.recipes.render import render
from core.recipes.run import ImageFiles, RecipeError, RunInputs
from core.run_files import RunSpec
from miner.engines.base import IMAGE_OF, EngineSpec, Mount
from miner.fleet.base import CPU_ID
from miner.jobs.folder import AttemptFolder, write
from miner.jobs.ports import Fetched, StepFailed
from miner.jobs.states import EndReason
from miner.jobs.tasks import Task
from miner.jobs.times import Timeline
from miner.store.work import AttemptRow, JobRow

#: The trainer's command by image; the engine puts the training environment's interpreter in.
TRAINERS: dict[str, tuple[str, ...]] = {
    "text": ("python", "-m", "trainer.text"),
    "image": ("python", "-m", "trainer.image"),
    "toolkit": ("python", "-m", "trainer.image"),
}
#: Everything was fetched before: what still asks for the network has a mistake in it, and should say so now.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
#: The engine's own backstop comes after ours.
_LIMIT_SLACK_S = 600.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """What is needed to launch, whichever life of the daemon does it."""

    row: AttemptRow
    folder: AttemptFolder
    run: RunSpec
    plan: TrainingPlan

    @classmethod
    def load(cls, row: AttemptRow) -> Attempt:
        folder = AttemptFolder(Path(row.folder))
        run = RunSpec.from_json(folder.told_run.read_bytes())
        return cls(row, folder, run, TrainingPlan.from_json(folder.told_plan.read_bytes()))


def run_spec(
    row: JobRow,
    task: Task,
    fetched: Fetched,
    folder: AttemptFolder,
    plan: TrainingPlan,
    times: Timeline,
    now: float,
    resume_from: Path | None,
) -> RunSpec:
    return RunSpec(
        task_id=row.task_id,
        task_type=task.task_type,
        model_id=task.model,
        model_path=str(fetched.model_path),
        data_path=str(fetched.data_path),
        dataset=task.dataset,
        image_type=task.image_type,
        expected_repo_name=row.expected_repo_name,
        plan_path=str(folder.plan),
        work_dir=str(folder.work),
        submission_dir=str(folder.submission),
        progress_path=str(folder.progress),
        result_path=str(folder.result),
        stop_path=str(folder.stop),
        began_at=now,
        end_by=times.end_by,
        deadline_at=row.deadline_at,
        resume_from=str(resume_from) if resume_from else None,
        seed=plan.seed,
    )


def write_attempt(folder: AttemptFolder, run: RunSpec, plan: TrainingPlan) -> None:
    """The whole folder. What the engine would not run as written stops here, before anything is launched."""
    folder.make()
    for place, text in ((folder.told_run, run.to_json()), (folder.told_plan, plan.to_json())):
        write(place, text + "\n")
    write(folder.run, run.to_json() + "\n")
    write(folder.plan, plan.to_json() + "\n")
    command = [shlex.join(trainer_command(plan, run))]
    if plan.engine is not TrainingEngine.NATIVE:
        command += _write_config(folder, run, plan)
    write(folder.command, "\n".join(command) + "\n")
    shown = "".join(f"{name}={value}\n" for name, value in sorted(run_environment(run, plan).items()))
    write(folder.environment, shown)


def _write_config(folder: AttemptFolder, run: RunSpec, plan: TrainingPlan) -> list[str]:
    """As the trainer will render it: the same code, with the rows as they come rather than as adapted."""
    try:
        made = render(plan, shown_inputs(run, plan, folder.config))
    except RecipeError as error:
        raise StepFailed(EndReason.INFEASIBLE, str(error)) from None
    for name, text in made.files.items():
        write(folder.config / name, text)
    return ["# which starts", f"# {shlex.join(made.command)}"]


def shown_inputs(run: RunSpec, plan: TrainingPlan, config: Path) -> RunInputs:
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
    """Nothing of ours is in it: a training gets no token, and its log may show its environment."""
    inputs = shown_inputs(run, plan, Path(run.work_dir).with_name("config"))
    return {**environment(plan, inputs), **_OFFLINE}


def engine_spec(job: JobRow, attempt: Attempt, *, hostile: bool, now: float) -> EngineSpec:
    run, plan = attempt.run, attempt.plan
    on_cpu = plan.gpus.kind.device is Device.CPU
    paths = [Path(run.data_path), Path(run.model_path), *([Path(run.resume_from)] if run.resume_from else [])]
    return EngineSpec(
        key=attempt.row.key,
        argv=trainer_command(plan, run),
        run_dir=attempt.folder.path,
        mounts=tuple(Mount(path) for path in paths),
        env=run_environment(run, plan),
        gpus=() if on_cpu else tuple(one for one in attempt.row.gpus if one != CPU_ID),
        memory_bytes=plan.container.memory_bytes,
        shm_bytes=plan.container.shm_bytes,
        cpus=plan.container.cpus,
        hostile=hostile,
        image=IMAGE_OF[plan.engine],
        limit_s=max(run.deadline_at - now, 0.0) + _LIMIT_SLACK_S,
        labels={"job": str(job.id), "attempt": str(attempt.row.number), "task": job.task_id},
    )
