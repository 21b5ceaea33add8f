from __future__ import annotations

import json
import socket
from pathlib import Path
from random import Random

import pytest

from core.data.facts import assumed_facts
from core.domain.choices import Engine
from core.domain.hardware import Hardware, parse_gpus
from core.domain.job_states import EndReason, StepFailed
from core.domain.tasks import FileFormat, ImageModelType, TaskType
from core.models.identify import facts_from_name
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from core.profile.resolve import load_profile
from core.recipes.dry_run import DATASETS
from core.runs.run_files import RunSpec
from miner.backends.base import IMAGE_OF
from miner.inputs.fetch import FetchedInputs, JobTask
from miner.jobs import launch
from miner.jobs.folder import job_folder
from miner.jobs.launch import AttemptReplay, Grant, JobAttempt, attempt_spec, run_spec, write_attempt
from miner.settings import Settings
from miner.store.attempts import AttemptRow
from tests.miner.jobs.harness import MODEL
from tests.miner.jobs.test_tasks import row

IMAGES = {
    ImageModelType.SDXL: "stabilityai/stable-diffusion-xl-base-1.0",
    ImageModelType.FLUX: "black-forest-labs/FLUX.1-dev",
    ImageModelType.Z_IMAGE: "Tongyi-MAI/Z-Image-Turbo",
    ImageModelType.QWEN_IMAGE: "Qwen/Qwen-Image",
}
CASES = [
    *((kind, None) for kind in TaskType if kind.is_text),
    *((TaskType.IMAGE, image) for image in IMAGES),
]


def planned(
    kind: TaskType, image: ImageModelType | None, gpus: str = "4xH100"
) -> tuple[TrainingPlan, JobTask]:
    model = IMAGES[image] if image else "unsloth/Llama-3.2-1B-Instruct"
    facts = MODEL if gpus == "cpu" else facts_from_name(model, None if image else 1_235_814_400, image)
    hardware = Hardware(gpus=parse_gpus(gpus), cpu_cores=32, memory_bytes=400 * 10**9)
    spec = TaskSpec(task_type=kind, hours=3, image_type=image)
    profile = load_profile("cpu-demo" if gpus == "cpu" else "h100x4")
    plan = plan_task(spec, facts, assumed_facts(kind, None, 3, image), hardware, profile)
    assert plan.verdict.feasible, plan.verdict
    task = JobTask(
        7, kind, model, "https://e.org/d", FileFormat.S3, Path("inputs"), DATASETS.get(kind), image
    )
    return plan, task


def attempt(
    tmp_path: Path, plan: TrainingPlan, task: JobTask, gpus: tuple[str, ...] = ("GPU-a",)
) -> JobAttempt:
    folder = job_folder(tmp_path, 7).attempt(1)
    inputs = FetchedInputs(tmp_path / "models/m", tmp_path / "jobs/7/inputs/data", plan.model, plan.data)
    grant = Grant(plan, gpus, 4000.0)
    run = run_spec(row(b"{}", task_type=task.task_type), task, inputs, folder, grant, 1000.0)
    write_attempt(folder, run, plan)
    attempt_row = AttemptRow(
        1, 7, 1, "docker", "7-1-abcdef01", None, str(folder.path), gpus, 0.0, 1.0, None, None, ""
    )
    return JobAttempt.load(attempt_row)


@pytest.mark.parametrize(("kind", "image"), CASES, ids=str)
def test_every_kind_of_task_is_written_down_and_can_be_launched_from_that(
    tmp_path: Path, kind: TaskType, image: ImageModelType | None
) -> None:
    plan, task = planned(kind, image)
    loaded = attempt(tmp_path, plan, task)
    assert loaded.plan == plan
    names = {file.name for file in loaded.folder.config.iterdir()}
    assert names, "what the engine reads is there to be looked at"
    spec = attempt_spec(row(b"{}"), loaded, 1000.0)
    assert spec.hostile is kind.generates
    assert spec.image == ("text" if image is None else IMAGE_OF[plan.engine])
    assert spec.argv[-2:] == ("--run", str(loaded.folder.run))
    assert all(mount.read_only for mount in spec.mounts)
    assert {mount.path for mount in spec.mounts} == {tmp_path / "models/m", tmp_path / "jobs/7/inputs/data"}
    assert spec.env["HF_HUB_OFFLINE"] == "1"
    assert RunSpec.from_json(loaded.folder.run.read_bytes()) == loaded.run
    asked_by = (loaded.run.stop_path, loaded.run.control_path)
    assert asked_by == (str(loaded.folder.stop), str(loaded.folder.control))


def test_a_run_on_the_cpu_asks_for_no_gpu(tmp_path: Path) -> None:
    plan, task = planned(TaskType.INSTRUCT, None, "cpu")
    spec = attempt_spec(row(b"{}"), attempt(tmp_path, plan, task, ("cpu",)), 1000.0)
    assert spec.gpus == spec.nodes == ()
    assert spec.env["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize("gpus", [("0@n1", "1@n1"), ("cpu@n1",)])
def test_a_run_in_a_cluster_names_its_node(tmp_path: Path, gpus: tuple[str, ...]) -> None:
    plan, task = planned(TaskType.INSTRUCT, None, "cpu" if len(gpus) == 1 else "2xH100")
    spec = attempt_spec(row(b"{}"), attempt(tmp_path, plan, task, gpus), 1000.0)
    assert spec.nodes == ("n1",)
    assert spec.gpus == (() if len(gpus) == 1 else gpus)


def test_what_a_training_does_to_its_folder_changes_nothing_that_is_launched_next(tmp_path: Path) -> None:
    plan, task = planned(TaskType.GRPO, None)
    loaded = attempt(tmp_path, plan, task)
    evil = json.loads(loaded.folder.plan.read_text())
    evil["env"]["LD_PRELOAD"] = "/evil.so"
    loaded.folder.plan.write_text(json.dumps(evil))
    loaded.folder.run.write_text("{}")
    again = JobAttempt.load(loaded.row)
    assert (again.run, again.plan) == (loaded.run, loaded.plan)
    assert "LD_PRELOAD" not in attempt_spec(row(b"{}"), loaded, 0.0).env


def test_a_native_run_has_no_engines_configuration(tmp_path: Path) -> None:
    plan, task = planned(TaskType.INSTRUCT, None)
    native = plan.model_copy(update={"engine": Engine.NATIVE})
    assert list(attempt(tmp_path, native, task).folder.config.iterdir()) == []


def test_what_no_engine_would_run_as_written_stops_before_it_is_launched(tmp_path: Path) -> None:
    plan, task = planned(TaskType.INSTRUCT, None)
    wrong = plan.model_copy(update={"engine_config": {"sequence_length": 4096}})
    with pytest.raises(StepFailed) as failed:
        attempt(tmp_path, wrong, task)
    assert failed.value.reason is EndReason.INFEASIBLE
    assert "sequence_length" in str(failed.value)


@pytest.mark.process
def test_a_port_is_free_and_nobody_elses() -> None:
    """Neither one of our jobs' nor one that somebody listens on."""
    first = launch.free_port((), Random(3))
    assert first in launch.PORT_RANGE
    assert launch.free_port({first}, Random(3)) != first
    with socket.create_server(("127.0.0.1", launch.free_port((), Random(4)))) as server:
        assert launch.free_port((), Random(4)) != server.getsockname()[1]


def test_a_machine_without_a_free_port_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_port_is_free", lambda _port: False)
    with pytest.raises(OSError, match="no port of 20000-29999 is free"):
        launch.free_port((), Random(1))


@pytest.mark.parametrize(
    ("hardware", "gpus", "visible"),
    [
        ("2xcpu", ("cpu", "cpu:1"), ""),
        ("2xcpu", ("cpu@n1", "cpu:1@n1"), ""),
        ("2xH100", ("GPU-a", "GPU-b"), "GPU-a,GPU-b"),
        ("2xH100", ("2@n1", "3@n1"), "2,3"),
    ],
)
def test_a_replay_sees_the_gpus_of_its_attempt_as_cuda_names_them(
    tmp_path: Path, hardware: str, gpus: tuple[str, ...], visible: str
) -> None:
    plan, task = planned(TaskType.INSTRUCT, None, "cpu" if "cpu" in hardware else "4xH100")
    plan = plan.model_copy(update={"gpus": parse_gpus(hardware)})
    replay = AttemptReplay.from_attempt(attempt(tmp_path, plan, task, gpus), Settings())
    assert replay.environment["CUDA_VISIBLE_DEVICES"] == visible
