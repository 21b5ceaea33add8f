"""The command line and the environment of a run."""

from __future__ import annotations

from core.domain.choices import Engine, Parallelism
from core.domain.hardware import parse_gpus
from core.domain.tasks import ImageModelType, TaskType
from core.models.image_families import families_of
from core.planning.plan import ContainerPlan, FsdpPlan, GrpoPlan
from core.profile.targets import Targets
from core.recipes.launch import KOHYA_SCRIPTS, accelerate_command, launch_command, launch_environment
from core.recipes.render import render
from tests.core.recipes.cases import image_inputs, image_plan, inputs, text_plan
from tests.doubles.each import each

SFT, GRPO = TaskType.INSTRUCT, TaskType.GRPO
SEVERAL = text_plan(SFT)
ALONE = text_plan(SFT, gpus=1, parallelism=Parallelism.SINGLE)


def test_several_gpus_are_launched_as_one_group_on_the_jobs_own_port() -> None:
    group = "accelerate launch --multi_gpu --num_processes 4 --num_machines 1 --machine_rank 0"
    rest = "--main_process_port 29511 -m axolotl.cli.train config.yml"
    assert " ".join(launch_command(SEVERAL, inputs(), "config.yml")) == f"{group} {rest}"
    # With one, the flag would be an error.
    alone = group.replace("--multi_gpu ", "").replace("4", "1")
    assert " ".join(launch_command(ALONE, inputs(), "config.yml")) == f"{alone} {rest}"


def test_on_several_machines_each_starts_its_part_and_the_first_has_the_first_ranks() -> None:
    gpus = SEVERAL.gpus.model_copy(update={"nodes": 2})
    plan = SEVERAL.model_copy(
        update={"gpus": gpus, "launch": SEVERAL.launch.model_copy(update={"machines": 2})}
    )
    second = inputs().model_copy(update={"machine_rank": 1, "head": "10.0.0.1"})
    command = " ".join(launch_command(plan, second, "config.yml"))
    assert "--num_processes 4 --num_machines 2 --machine_rank 1 --main_process_ip 10.0.0.1" in command
    assert "--rdzv_backend static --main_process_port 29511 -m axolotl.cli.train" in command
    assert "PET_LOCAL_ADDR" not in launch_environment(plan, second)
    assert "PET_LOCAL_ADDR" in launch_environment(SEVERAL, inputs())


def test_only_machines_that_are_this_one_meet_on_its_loopback() -> None:
    plan = text_plan(SFT, engine=Engine.NATIVE)
    cpus = parse_gpus("2x2xcpu")
    plan = plan.model_copy(
        update={"gpus": cpus, "launch": plan.launch.model_copy(update={"machines": cpus.nodes})}
    )
    for head, loopback in (
        ("127.0.0.1", True),
        ("", False),
        ("localhost", True),
        ("10.0.0.1", False),
        ("node1", False),
    ):
        here = inputs().model_copy(update={"head": head})
        assert ("GLOO_SOCKET_IFNAME" in launch_environment(plan, here)) is loopback


def test_a_named_interpreter_brings_its_own_accelerate() -> None:
    named = inputs().model_copy(update={"python": "/opt/training/bin/python"})
    command = accelerate_command(named, 2, ("-m", "x"))
    assert command[:3] == ("/opt/training/bin/python", "-m", "accelerate.commands.accelerate_cli")


@each(
    ("kind", "script"),
    [(ImageModelType.SDXL, "sdxl_train_network.py"), (ImageModelType.FLUX, "flux_train_network.py")],
)
def test_sd_scripts_gets_its_config_file(kind: ImageModelType, script: str) -> None:
    command = render(image_plan(kind, gpus=4), image_inputs(kind)).command
    assert command[-3:] == (f"/app/sd-scripts/{script}", "--config_file", "/run/config/config.toml")
    assert "--multi_gpu" in command


def test_ai_toolkit_is_started_alone() -> None:
    kind = ImageModelType.KREA2
    command = render(image_plan(kind), image_inputs(kind)).command
    assert command == ("python", "/app/ai-toolkit/run.py", "/run/config/config.yaml")


def test_the_native_trainer_reads_the_plan() -> None:
    plan = text_plan(SFT, engine=Engine.NATIVE)
    rendered = render(plan, inputs())
    assert rendered.command[-3:] == ("-m", "trainer.native", "/run/config/plan.json")
    assert type(plan).from_json(rendered.files["plan.json"]) == plan


def test_the_native_trainers_only_process_needs_no_launcher() -> None:
    alone = text_plan(SFT, engine=Engine.NATIVE, gpus=1, parallelism=Parallelism.SINGLE)
    command = launch_command(alone, inputs(), "plan.json")
    assert command == ("python", "-m", "trainer.native", "plan.json")


@each(
    ("cpus", "gpus", "threads"),
    [("0-63", 4, "16"), ("0-63", 8, "8"), ("0-3", 8, "1"), ("0,2,4-7", 2, "3"), (None, 4, "4")],
)
def test_the_containers_cores_are_split(cpus: str | None, gpus: int, threads: str) -> None:
    plan = text_plan(SFT, gpus=gpus, container=ContainerPlan(cpus=cpus))
    assert launch_environment(plan, inputs())["OMP_NUM_THREADS"] == threads


def test_the_environment_is_the_attempts_own_and_the_profiles_variables_win() -> None:
    env = launch_environment(text_plan(SFT, env={"NCCL_NTHREADS": "8", "OMP_NUM_THREADS": "3"}), inputs())
    assert (env["NCCL_NTHREADS"], env["OMP_NUM_THREADS"]) == ("8", "3")
    assert env["HF_HOME"].startswith("/run/work/")
    assert env["PYTORCH_CUDA_ALLOC_CONF"] == env["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    asleep = launch_environment(text_plan(GRPO, grpo=GrpoPlan(vllm=True, vllm_sleep=True)), inputs())
    assert asleep["PYTORCH_CUDA_ALLOC_CONF"] == asleep["PYTORCH_ALLOC_CONF"] == "expandable_segments:False"
    assert "GOD_MINER_PLAN" not in env
    assert launch_environment(SEVERAL, inputs(plan_path="/run/p.json"))["GOD_MINER_PLAN"] == "/run/p.json"


def test_several_processes_find_each_other_without_a_name_server() -> None:
    assert launch_environment(SEVERAL, inputs())["PET_LOCAL_ADDR"] == "127.0.0.1"
    assert "PET_LOCAL_ADDR" not in launch_environment(ALONE, inputs())


def test_ranks_on_gpus_leave_their_last_collectives_and_the_profile_says_how_errors_are_handled() -> None:
    env = launch_environment(SEVERAL, inputs())
    assert env["TORCH_FR_DUMP_TEMP_FILE"] == "/run/work/collectives_rank_"
    assert (env["TORCH_FR_BUFFER_SIZE"], env["TORCH_NCCL_DUMP_ON_TIMEOUT"]) == ("2000", "1")
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in env
    assert not {name for name in launch_environment(ALONE, inputs()) if "NCCL" in name or "_FR_" in name}
    own = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_FR_BUFFER_SIZE": "0"}
    of_profile = launch_environment(SEVERAL.model_copy(update={"env": own}), inputs())
    assert {name: of_profile[name] for name in own} == own


@each(("reshard", "variable"), [(False, "false"), (True, None)])
def test_keeping_layers_gathered_is_set_by_a_variable(reshard: bool, variable: str | None) -> None:
    plan = text_plan(
        SFT,
        parallelism=Parallelism.FSDP,
        fsdp=FsdpPlan(),
        targets=Targets(fsdp_reshard_after_forward=reshard),
    )
    assert launch_environment(plan, inputs()).get("FSDP_RESHARD_AFTER_FORWARD") == variable


def test_a_plan_without_gpus_hides_the_machines() -> None:
    plan = text_plan(SFT, gpus=2).model_copy(update={"gpus": parse_gpus("cpu")})
    env = launch_environment(plan, inputs())
    assert (env["ACCELERATE_USE_CPU"], env["CUDA_VISIBLE_DEVICES"]) == ("true", "")
    assert (env["GLOO_SOCKET_IFNAME"], env["OMP_NUM_THREADS"]) == ("lo", "1")


def test_every_family_that_kohya_trains_has_a_script() -> None:
    assert set(KOHYA_SCRIPTS) == set(families_of(Engine.KOHYA))
