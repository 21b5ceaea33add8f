"""The command line and the environment of a run.

`accelerate launch` gets the number of processes and a port, and nothing else: precision and FSDP are in the
engine's configuration, and a flag would only be a second place to be wrong. Every job has its own port,
because the second job on 29500 dies with "address already in use".
"""

from __future__ import annotations

from core.choices import Engine
from core.plan import TrainingPlan
from core.recipes.run import RunInputs
from core.tasks import ImageModelType

#: Threads per process where nobody said which cores the run has. torchrun's own choice is 1.
_THREADS = 4
_MOST_THREADS = 16


def accelerate(processes: int, port: int, target: tuple[str, ...], python: str = "python") -> tuple[str, ...]:
    """`accelerate launch` of a module (`-m`, name, arguments) or a script on one machine.

    Started as a module of the training environment's interpreter, so that no other `accelerate` on the path
    can answer. `--multi_gpu` with one process is an error, and without it several processes are one.
    """
    several = ("--multi_gpu",) if processes > 1 else ()
    counts = ("--num_processes", str(processes), "--num_machines", "1", "--machine_rank", "0")
    return (*launcher(python), "launch", *several, *counts, "--main_process_port", str(port), *target)


def launcher(python: str) -> tuple[str, ...]:
    """`accelerate` itself when the interpreter is whatever the path says, else the one beside it."""
    if python == "python":
        return ("accelerate",)
    return (python, "-m", "accelerate.commands.accelerate_cli")


def command(plan: TrainingPlan, inputs: RunInputs, config_file: str) -> tuple[str, ...]:
    """The command of an engine; `config_file` is the full path of what it reads."""
    processes, port = plan.launch.processes, inputs.port
    if plan.engine is Engine.AXOLOTL:
        return accelerate(processes, port, ("-m", "axolotl.cli.train", config_file), inputs.python)
    if plan.engine is Engine.KOHYA:
        script = f"{inputs.kohya_dir}/{kohya_script(plan)}"
        return accelerate(processes, port, (script, "--config_file", config_file), inputs.python)
    if plan.engine is Engine.AI_TOOLKIT:
        return (inputs.python, f"{inputs.ai_toolkit_dir}/run.py", config_file)
    return accelerate(processes, port, ("-m", "trainer.native", config_file), inputs.python)


def kohya_script(plan: TrainingPlan) -> str:
    flux = plan.task.image_type is ImageModelType.FLUX
    return "flux_train_network.py" if flux else "sdxl_train_network.py"


def environment(plan: TrainingPlan, inputs: RunInputs) -> dict[str, str]:
    """What the training process is started with; the profile's own variables win."""
    processes = plan.launch.processes
    env = {
        # One growing segment instead of many fixed ones: the difference between fitting and not at the edge.
        # The second name is torch 2.10's; older releases know only the first.
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "OMP_NUM_THREADS": str(_threads(plan)),
        # Tokenizers are forked into loader processes after use, which their own threads do not survive.
        "TOKENIZERS_PARALLELISM": "false",
        # A home of its own: an accelerate/default_config.yaml left in a shared one changes the launch.
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
    if processes > 1:
        env |= _distributed(plan)
    if plan.gpus.is_cpu:
        env |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    return {**env, **plan.env}


def _distributed(plan: TrainingPlan) -> dict[str, str]:
    env = {
        # torchrun's --local-addr, which accelerate has no flag for. Without it a container that has no
        # network and no entry for its own name in /etc/hosts waits for ever for the name to resolve.
        "PET_LOCAL_ADDR": "127.0.0.1",
        # A rank that died takes the others down at once instead of after the timeout.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    if plan.gpus.is_cpu:
        env["GLOO_SOCKET_IFNAME"] = "lo"
    if plan.fsdp is not None and not plan.fsdp.reshard_after_forward:
        # Axolotl hands on only a true value, and accelerate's default is true.
        env["FSDP_RESHARD_AFTER_FORWARD"] = "false"
    return env


def _threads(plan: TrainingPlan) -> int:
    """The cores of the container, shared out over the processes."""
    if plan.container.cpus is not None:
        return max(1, min(_MOST_THREADS, count_cpus(plan.container.cpus) // plan.launch.processes))
    # More threads than cores made a step on a small machine four times as long.
    return 1 if plan.gpus.is_cpu else _THREADS


def count_cpus(cpus: str) -> int:
    """How many cores a docker cpuset such as `0-31,64` names."""
    spans = (part.partition("-") for part in cpus.split(","))
    return sum(int(last or first) - int(first) + 1 for first, _, last in spans)
