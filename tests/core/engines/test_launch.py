"""The command line and the environment of a run."""

from __future__ import annotations

import pytest

from core.domain.choices import Engine, Parallelism
from core.domain.hardware import parse_gpus
from core.domain.tasks import ImageModelType, TaskType
from core.engines.launch import accelerate_command, launch_command, launch_environment
from core.engines.render import render
from core.planning.plan import ContainerPlan, FsdpPlan
from tests.core.engines.cases import image_inputs, image_plan, inputs, text_plan
from tests.doubles.each import each


def test_several_gpus_are_launched_as_one_group_on_the_jobs_own_port() -> None:
    made = launch_command(text_plan(TaskType.INSTRUCT), inputs(), "config.yml")
    assert " ".join(made) == (
        "accelerate launch --multi_gpu --num_processes 4 --num_machines 1 --machine_rank 0 "
        "--main_process_port 29511 -m axolotl.cli.train config.yml"
    )


def test_one_gpu_is_launched_without_the_flag_that_would_be_an_error() -> None:
    alone = text_plan(TaskType.INSTRUCT, gpus=1, parallelism=Parallelism.SINGLE)
    made = launch_command(alone, inputs(), "config.yml")
    assert "--multi_gpu" not in made
    assert made[made.index("--num_processes") + 1] == "1"


def test_a_named_interpreter_brings_its_own_accelerate() -> None:
    made = accelerate_command(2, 29600, ("-m", "x"), python="/opt/training/bin/python")
    assert made[:3] == ("/opt/training/bin/python", "-m", "accelerate.commands.accelerate_cli")


@pytest.mark.parametrize(
    ("kind", "script"),
    [(ImageModelType.SDXL, "sdxl_train_network.py"), (ImageModelType.FLUX, "flux_train_network.py")],
)
def test_sd_scripts_gets_its_config_file(kind: ImageModelType, script: str) -> None:
    made = render(image_plan(kind, gpus=4), image_inputs(kind)).command
    assert f"/app/sd-scripts/{script}" in made
    assert made[-2:] == ("--config_file", "/run/config/config.toml")
    assert "--multi_gpu" in made


def test_ai_toolkit_is_started_alone() -> None:
    kind = ImageModelType.KREA2
    made = render(image_plan(kind), image_inputs(kind)).command
    assert made == ("python", "/app/ai-toolkit/run.py", "/run/config/config.yaml")


def test_the_native_trainer_reads_the_plan() -> None:
    plan = text_plan(TaskType.INSTRUCT, engine=Engine.NATIVE)
    rendered = render(plan, inputs())
    assert rendered.command[-3:] == ("-m", "trainer.native", "/run/config/plan.json")
    assert type(plan).from_json(rendered.files["plan.json"]) == plan


def test_the_profiles_variables_win() -> None:
    plan = text_plan(TaskType.INSTRUCT, env={"NCCL_NTHREADS": "8", "OMP_NUM_THREADS": "3"})
    env = launch_environment(plan, inputs())
    assert (env["NCCL_NTHREADS"], env["OMP_NUM_THREADS"]) == ("8", "3")


@each(
    ("cpus", "gpus", "threads"),
    [("0-63", 4, "16"), ("0-63", 8, "8"), ("0-3", 8, "1"), ("0,2,4-7", 2, "3"), (None, 4, "4")],
)
def test_the_containers_cores_are_split(cpus: str | None, gpus: int, threads: str) -> None:
    plan = text_plan(TaskType.INSTRUCT, gpus=gpus, container=ContainerPlan(cpus=cpus))
    assert launch_environment(plan, inputs())["OMP_NUM_THREADS"] == threads


def test_several_processes_find_each_other_without_a_name_server() -> None:
    assert launch_environment(text_plan(TaskType.CHAT), inputs())["PET_LOCAL_ADDR"] == "127.0.0.1"
    alone = text_plan(TaskType.CHAT, gpus=1, parallelism=Parallelism.SINGLE)
    assert "PET_LOCAL_ADDR" not in launch_environment(alone, inputs())


def test_caches_lie_in_the_attempts_own_folder() -> None:
    env = launch_environment(text_plan(TaskType.INSTRUCT), inputs())
    assert env["HF_HOME"].startswith("/run/work/")
    assert env["PYTORCH_CUDA_ALLOC_CONF"] == env["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_keeping_layers_gathered_is_set_by_a_variable() -> None:
    kept = text_plan(
        TaskType.INSTRUCT, parallelism=Parallelism.FSDP, fsdp=FsdpPlan(reshard_after_forward=False)
    )
    assert launch_environment(kept, inputs())["FSDP_RESHARD_AFTER_FORWARD"] == "false"
    freed = text_plan(TaskType.INSTRUCT, parallelism=Parallelism.FSDP)
    assert "FSDP_RESHARD_AFTER_FORWARD" not in launch_environment(freed, inputs())


def test_a_plan_without_gpus_hides_the_machines() -> None:
    plan = text_plan(TaskType.INSTRUCT, gpus=2).model_copy(update={"gpus": parse_gpus("cpu")})
    env = launch_environment(plan, inputs())
    assert (env["ACCELERATE_USE_CPU"], env["CUDA_VISIBLE_DEVICES"]) == ("true", "")
    assert (env["GLOO_SOCKET_IFNAME"], env["OMP_NUM_THREADS"]) == ("lo", "1")


def test_the_plugin_finds_the_plan_by_a_variable() -> None:
    assert launch_environment(text_plan(TaskType.DPO), inputs(plan_path="/run/plan.json"))[
        "GOD_MINER_PLAN"
    ] == ("/run/plan.json")
    assert "GOD_MINER_PLAN" not in launch_environment(text_plan(TaskType.DPO), inputs())
