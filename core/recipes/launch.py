"""Start a run: command line and environment.

`accelerate launch` gets only the number of processes and a port: precision and FSDP are in the engine's
configuration, and a flag would be a second place to get them wrong. Every job has its own port, because the
second job on 29500 fails with "address already in use".

On several machines accelerate is started on each, with its rank: the first has ranks 0 and up, which report
and save. The native trainer's only process is started without it.
"""

from __future__ import annotations

import ipaddress
import shlex

from core.domain.choices import Engine
from core.domain.cores import cores_in
from core.domain.tasks import ImageModelType
from core.planning.plan import TrainingPlan
from core.recipes.base import RenderedRun, RunInputs

#: What sd-scripts trains a family with.
KOHYA_SCRIPTS: dict[ImageModelType | None, str] = {
    ImageModelType.SDXL: "sdxl_train_network.py",
    ImageModelType.FLUX: "flux_train_network.py",
}
#: The runner writes it beside the recipe: a `PictureRun`.
PICTURE_RUN_FILE = "run.json"
#: Threads per process when no cores are assigned. torchrun's own choice is 1.
_THREADS = 4
_MOST_THREADS = 16
#: When a rank does not arrive, each writes its last collectives (torch's flight recorder) into the run's
#: folder: torch's default folder is deleted with the container. The variable names are torch 2.13's.
_FLIGHT = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "NCCL_DEBUG": "WARN"}
#: A progress bar rewrites its line, and a log keeps every state of it. Steps get lines of their own.
NO_PROGRESS_BARS = dict.fromkeys(
    ("TQDM_DISABLE", "HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS"), "1"
)


def accelerate_command(
    inputs: RunInputs, processes: int, target: tuple[str, ...], machines: int = 1
) -> tuple[str, ...]:
    """`accelerate launch` of a module (`-m`, name, arguments) or a script, on one of the machines.

    It runs as a module of the training environment's interpreter, so that no other `accelerate` on the path
    is taken. `--multi_gpu` with one process is an error, and without it several processes become one.
    """
    python, rank = inputs.python, str(inputs.machine_rank)
    several = ("--multi_gpu",) if processes > 1 else ()
    counts = ("--num_processes", str(processes), "--num_machines", str(machines), "--machine_rank", rank)
    # With c10d the ranks would go by who came first, and another machine would be the one that saves.
    meet = ("--main_process_ip", inputs.head, "--rdzv_backend", "static") if machines > 1 else ()
    # From the path if the interpreter is from there too, else the interpreter's own.
    own = ("accelerate",) if python == "python" else (python, "-m", "accelerate.commands.accelerate_cli")
    return (*own, "launch", *several, *counts, *meet, "--main_process_port", str(inputs.port), *target)


def launch_command(plan: TrainingPlan, inputs: RunInputs, config_file: str) -> tuple[str, ...]:
    """The engine's command; `config_file` is the full path of its configuration."""
    processes = plan.launch.processes
    if plan.engine is Engine.NATIVE and processes == 1:
        # Alone it needs nothing of a launcher, which would import torch for itself first: 5 s of a core.
        return (inputs.python, "-m", "trainer.native", config_file)
    if plan.engine in (Engine.AXOLOTL, Engine.NATIVE):
        module = "axolotl.cli.train" if plan.engine is Engine.AXOLOTL else "trainer.native"
        return accelerate_command(inputs, processes, ("-m", module, config_file), plan.launch.machines)
    if plan.engine is Engine.PICTURES:
        return (inputs.python, "-m", "trainer.pictures.train", f"{inputs.config_dir}/{PICTURE_RUN_FILE}")
    if plan.engine is Engine.KOHYA:
        script = f"{inputs.kohya_dir}/{KOHYA_SCRIPTS[plan.task.image_type]}"
        return accelerate_command(inputs, processes, (script, "--config_file", config_file))
    return (inputs.python, f"{inputs.ai_toolkit_dir}/run.py", config_file)


def launch_environment(plan: TrainingPlan, inputs: RunInputs) -> dict[str, str]:
    """The environment of the training process; the profile's own variables win."""
    processes = plan.launch.processes
    # One growing segment instead of many fixed ones: the difference between fitting and not at the edge.
    # vLLM's own allocator, by which it sleeps, refuses that.
    segments = f"expandable_segments:{plan.grpo is None or not plan.grpo.vllm_sleep}"
    env = {
        # The second name is torch 2.10's; older releases know only the first.
        "PYTORCH_CUDA_ALLOC_CONF": segments,
        "PYTORCH_ALLOC_CONF": segments,
        "OMP_NUM_THREADS": str(_threads(plan)),
        # Loader processes are forked after the tokenizer was used, which its threads would not survive.
        "TOKENIZERS_PARALLELISM": "false",
        # Not shared: an accelerate/default_config.yaml left in a shared home changes the launch.
        "HF_HOME": f"{inputs.work_dir}/hf",
        "TRITON_CACHE_DIR": f"{inputs.work_dir}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{inputs.work_dir}/inductor",
        "WANDB_MODE": "offline",
        "AXOLOTL_DO_NOT_TRACK": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if inputs.plan_path is not None:
        env["GOD_MINER_PLAN"] = inputs.plan_path
    if plan.engine not in (
        Engine.KOHYA,
        Engine.AI_TOOLKIT,
    ):  # their progress is their bar
        env |= NO_PROGRESS_BARS
    if processes > 1:
        env |= _distributed(plan, inputs)
    if plan.gpus.is_cpu:
        env |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    return {**env, **plan.env}


def _distributed(plan: TrainingPlan, inputs: RunInputs) -> dict[str, str]:
    env = dict[str, str]()
    if not plan.gpus.is_cpu:  # torch adds the rank to the name
        env |= {**_FLIGHT, "TORCH_FR_DUMP_TEMP_FILE": f"{inputs.work_dir}/collectives_rank_"}
    if plan.launch.machines == 1:
        # torchrun's --local-addr, which accelerate has no flag for. Without it a container without a
        # network and without its own name in /etc/hosts waits forever for the name to resolve.
        env["PET_LOCAL_ADDR"] = "127.0.0.1"
    if plan.gpus.is_cpu and (plan.launch.machines == 1 or _is_loopback(inputs.head)):
        env["GLOO_SOCKET_IFNAME"] = "lo"
    if plan.fsdp is not None and not plan.targets.fsdp_reshard_after_forward:
        # Axolotl hands on only a true value, and accelerate's default is true.
        env["FSDP_RESHARD_AFTER_FORWARD"] = "false"
    return env


def _is_loopback(address: str) -> bool:
    """Return True if all "machines" are this one."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _threads(plan: TrainingPlan) -> int:
    """OpenMP threads of one process: its share of the container's cores."""
    if plan.container.cpus is not None:
        return max(1, min(_MOST_THREADS, len(cores_in(plan.container.cpus)) // plan.gpus.per_node))
    # More threads than cores made a step on a small machine take four times as long.
    return 1 if plan.gpus.is_cpu else _THREADS


def run_script(rendered: RenderedRun) -> str:
    """A shell script that starts the run in its container."""
    exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in sorted(rendered.env.items()))
    head = "#!/bin/sh\n# Paths are those of a run in its container.\n"
    return f"{head}{exports}exec {shlex.join(rendered.command)}\n"
