"""Start a run: command line and environment, and scripts for other launchers.

`accelerate launch` gets only the number of processes and a port: precision and FSDP are in the engine's
configuration, and a flag would be a second place to get them wrong. Every job has its own port, because the
second job on 29500 fails with "address already in use".

On several machines accelerate is started on each, with its rank: the first has ranks 0 and up, which report
and save. torchrun on one machine and the Slurm script for one or several are for the operator's own cluster.
All start exactly the processes that the plan names. The native trainer's only process is started without
any of them.
"""

from __future__ import annotations

import ipaddress
import math
import shlex
from collections.abc import Mapping, Sequence
from enum import StrEnum

from core.domain.choices import Engine
from core.domain.errors import Problem
from core.domain.tasks import ImageModelType
from core.planning.cores import cores_in
from core.planning.plan import TrainingPlan
from core.recipes.base import RecipeError, RenderedRun, RunInputs, unsupported_target

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
    processes: int,
    port: int,
    target: tuple[str, ...],
    python: str = "python",
    *,
    machines: int = 1,
    rank: int = 0,
    head: str = "",
) -> tuple[str, ...]:
    """`accelerate launch` of a module (`-m`, name, arguments) or a script: the part of one of the machines.

    It runs as a module of the training environment's interpreter, so that no other `accelerate` on the path
    is taken. `--multi_gpu` with one process is an error, and without it several processes become one.
    """
    several = ("--multi_gpu",) if processes > 1 else ()
    counts = ("--num_processes", str(processes), "--num_machines", str(machines), "--machine_rank", str(rank))
    # With c10d the ranks would go by who came first, and another machine would be the one that saves.
    meet = ("--main_process_ip", head, "--rdzv_backend", "static") if machines > 1 else ()
    # From the path if the interpreter is from there too, else the interpreter's own.
    own = ("accelerate",) if python == "python" else (python, "-m", "accelerate.commands.accelerate_cli")
    return (*own, "launch", *several, *counts, *meet, "--main_process_port", str(port), *target)


def launch_command(plan: TrainingPlan, inputs: RunInputs, config_file: str) -> tuple[str, ...]:
    """The engine's command; `config_file` is the full path of its configuration."""
    processes, port = plan.launch.processes, inputs.port
    if plan.engine is Engine.NATIVE and processes == 1:
        # Alone it needs nothing of a launcher, which would import torch for itself first: 5 s of a core.
        return (inputs.python, "-m", "trainer.native", config_file)
    if plan.engine in (Engine.AXOLOTL, Engine.NATIVE):
        module = "axolotl.cli.train" if plan.engine is Engine.AXOLOTL else "trainer.native"
        return accelerate_command(
            processes,
            port,
            ("-m", module, config_file),
            inputs.python,
            machines=plan.launch.machines,
            rank=inputs.machine_rank,
            head=inputs.head,
        )
    if plan.engine is Engine.KOHYA:
        kind = "flux" if plan.task.image_type is ImageModelType.FLUX else "sdxl"
        script = f"{inputs.kohya_dir}/{kind}_train_network.py"
        return accelerate_command(processes, port, (script, "--config_file", config_file), inputs.python)
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
    if plan.engine in (Engine.AXOLOTL, Engine.NATIVE):  # progress of image engines is read from their bar
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
    if plan.fsdp is not None and not plan.fsdp.reshard_after_forward:
        # Axolotl hands on only a true value, and accelerate's default is true.
        env["FSDP_RESHARD_AFTER_FORWARD"] = "false"
    return env


def _is_loopback(address: str) -> bool:
    """Whether all "machines" are this one."""
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


class Launcher(StrEnum):
    ACCELERATE = "accelerate"
    TORCHRUN = "torchrun"
    SLURM = "slurm"


#: From Slurm's signal to its limit: a step, an evaluation, saving, and Slurm's own margin.
SIGNAL_S = 300
#: Requested beyond the plan's own time.
_MARGIN_S = 600
_CPUS_PER_GPU = 12
#: For one machine's loopback; wrong for a job on several machines.
_LOCAL_ONLY = ("PET_LOCAL_ADDR", "GLOO_SOCKET_IFNAME")
#: As under our own wrapper: no library uses the network.
_OFFLINE = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1")


def launch_script(
    launcher: Launcher,
    plan: TrainingPlan,
    inputs: RunInputs,
    rendered: RenderedRun,
    source: str,
    nodes: int | None = None,
) -> str:
    """A script that starts the run, with our packages in `source`. `RecipeError` if the launcher cannot.
    `nodes`: as many as the plan's, if not named."""
    nodes = nodes or plan.launch.machines
    if launcher is not Launcher.SLURM and plan.launch.machines > 1:
        rule = f"the plan is for {plan.launch.machines} machines: use --launcher slurm"
        raise unsupported_target(plan.profile, "--launcher", launcher, rule)
    if launcher is Launcher.ACCELERATE:
        return f"{_HEAD}{_exports(rendered.env)}exec {shlex.join(rendered.command)}\n"
    if plan.engine is Engine.AI_TOOLKIT:
        rule = "starts itself, as one process; use --launcher accelerate"
        raise unsupported_target(plan.profile, "engine", plan.engine, rule)
    if plan.launch.processes % nodes:
        rule = f"{plan.launch.processes} processes cannot be split over {nodes} machines"
        raise unsupported_target(plan.profile, "--nodes", nodes, rule)
    if launcher is Launcher.SLURM:
        return _slurm(plan, inputs, rendered, source, nodes)
    if nodes > 1:
        rule = "torchrun on several machines wants --launcher slurm"
        raise unsupported_target(plan.profile, "--nodes", nodes, rule)
    return _torchrun_script(plan, inputs, rendered, source)


def _torchrun_script(plan: TrainingPlan, inputs: RunInputs, rendered: RenderedRun, source: str) -> str:
    """torchrun on this machine, on a port that it picks itself."""
    python = shlex.quote(inputs.python)
    launch = shlex.join(
        (
            *_torchrun_command(inputs),
            "--standalone",
            "--nproc-per-node",
            str(plan.launch.processes),
            *_target(plan, rendered),
        )
    )
    env = _environment(plan, inputs, rendered, source, nodes=1)
    if plan.engine is not Engine.NATIVE:
        return f"{_HEAD}{env}exec {launch}\n"
    variable, module = "GOD_MINER_LAUNCH_SPEC", f"{python} -m trainer.native.external_launch"
    launch_spec = f'{variable}="$({module} "$RUN/run.json")"\nexport {variable}\n'
    over = f'exec {module} "$RUN/run.json" --over\n'
    return f"{_HEAD}set -eu\n{_RUN.format(how='run.sh RUN')}{env}{launch_spec}{launch} || true\n{over}"


def _environment(
    plan: TrainingPlan, inputs: RunInputs, rendered: RenderedRun, source: str, nodes: int
) -> str:
    """The exports of a script; scratch space is under the run's own folder if it has one."""
    env = {key: value for key, value in rendered.env.items() if nodes == 1 or key not in _LOCAL_ONLY}
    env |= {"PYTHONPATH": source, "PYTHONSAFEPATH": "1", **_OFFLINE}
    if plan.engine is not Engine.NATIVE:
        return _exports(env)
    env.pop("GOD_MINER_PLAN", None)  # the launch spec names it
    in_run = {key: value for key, value in env.items() if value.startswith(f"{inputs.work_dir}/")}
    in_run_exports = "".join(
        f'export {key}="$RUN/work{value.removeprefix(inputs.work_dir)}"\n'
        for key, value in sorted(in_run.items())
    )
    return _exports({key: value for key, value in env.items() if key not in in_run}) + in_run_exports


def _torchrun_command(inputs: RunInputs) -> tuple[str, ...]:
    return ("torchrun",) if inputs.python == "python" else (inputs.python, "-m", "torch.distributed.run")


def _target(plan: TrainingPlan, rendered: RenderedRun) -> tuple[str, ...]:
    """What every process runs: the tail of accelerate's command."""
    return ("-m", "trainer.native") if plan.engine is Engine.NATIVE else rendered.command[-3:]


def _slurm(plan: TrainingPlan, inputs: RunInputs, rendered: RenderedRun, source: str, nodes: int) -> str:
    native, python = plan.engine is Engine.NATIVE, shlex.quote(inputs.python)
    return "".join(
        [
            "#!/bin/bash\n",
            *(f"#SBATCH {header}\n" for header in _headers(plan, nodes)),
            _SLURM_HEAD,
            _RUN.format(how="sbatch job.sbatch RUN") if native else "",
            _exports({"PATH": "/usr/local/bin:/usr/bin:/bin"}),
            _environment(plan, inputs, rendered, source, nodes),
            _SLURM_READY.format(python=python) if native else "",
            _SLURM_RENDEZVOUS,
            _SLURM_ASKED_NATIVE if native else _SLURM_ASKED,
            _step(plan, inputs, rendered, nodes),
            _SLURM_WAIT,
            _SLURM_OVER if native else _SLURM_END,
        ]
    )


def _headers(plan: TrainingPlan, nodes: int) -> list[str]:
    each, container = plan.launch.processes // nodes, plan.container
    cpus = len(cores_in(container.cpus)) if container.cpus else _CPUS_PER_GPU * each
    minutes = math.ceil((max(plan.time.deadline_s, plan.time.total_s) + _MARGIN_S) / 60)
    return [
        f"--job-name=god-miner-{plan.digest[:12]}",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        # Per node: a job's total may come from any mixture of nodes.
        *([] if plan.gpus.is_cpu else [f"--gpus-per-node={each}"]),
        f"--cpus-per-task={each if plan.gpus.is_cpu else cpus}",
        *([f"--mem={container.memory_bytes // 2**20}M"] if container.memory_bytes else []),
        f"--time={minutes}",
        f"--signal=B:USR1@{SIGNAL_S}",
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.log",
        "--export=NIL",
    ]


def _step(plan: TrainingPlan, inputs: RunInputs, rendered: RenderedRun, nodes: int) -> str:
    """An srun step even on one machine: only steps are signalled and waited for."""
    options = [
        f"--nnodes={nodes}",
        f"--nproc-per-node={plan.launch.processes // nodes}",
        "--rdzv-backend=c10d",
        '--rdzv-endpoint="$HEAD:$PORT"',
        '--rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',
        "--max-restarts=0",
    ]
    target = shlex.join(_target(plan, rendered))
    return (
        f"srun --nodes={nodes} --ntasks-per-node=1 --kill-on-bad-exit=1 --export=ALL \\\n"
        f"    {shlex.join(_torchrun_command(inputs))} {' '.join(options)} \\\n"
        f"    {target} &\n"
    )


_HEAD = "#!/bin/sh\n# Paths are those of a run in its container.\n"

_RUN = """RUN="${{1:?{how}: the folder of a run, as god-miner train native --write-only makes it}}"
"""

_SLURM_HEAD = """
# Everything named here lies on a file system that all nodes share. --export=NIL: nothing of the submitter's
# environment comes along, no token either. NCCL_SOCKET_IFNAME is the site's to set, where NCCL guesses wrong.
set -uo pipefail
"""

_SLURM_READY = """
# Rows are made once, before all ranks; a job that was requeued goes on from its newest state.
ready() {{
    srun --nodes=1 --ntasks=1 --export=ALL {python} -m trainer.native.external_launch "$RUN/run.json" "$@"
}}
GOD_MINER_LAUNCH_SPEC="$(ready)" || exit $?
export GOD_MINER_LAUNCH_SPEC
"""

_SLURM_RENDEZVOUS = """
HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)"
PORT=$((20000 + SLURM_JOB_ID % 20000))

# The limit is near: what there is is saved, and the job goes back into the queue. On scancel Slurm tells the
# steps itself; this script lives on to record the end.
asked=0
trap 'asked=1; ask_to_stop' USR1
trap : TERM
"""

_SLURM_ASKED_NATIVE = """ask_to_stop() { touch "$RUN/stop"; }

"""

_SLURM_ASKED = """ask_to_stop() { scancel --signal=TERM "$SLURM_JOB_ID"; }

"""

_SLURM_WAIT = """STEP=$!
# A trap ends `wait` early, so it is asked until the step itself is gone; its code is remembered.
while kill -0 "$STEP" 2>/dev/null; do wait "$STEP"; done
wait "$STEP"
code=$?
"""

_SLURM_END = """if [ "$asked" = 1 ] && [ "$code" != 0 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""

_SLURM_OVER = """ready --over
code=$?
if [ "$asked" = 1 ] && grep -q '"end": "stopped"' "$RUN/result.json"; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def _exports(env: Mapping[str, str]) -> str:
    return "".join(f"export {key}={shlex.quote(value)}\n" for key, value in sorted(env.items()))


def parse_launcher(name: str) -> Launcher:
    known: Sequence[str] = list(Launcher)
    if name not in known:
        raise RecipeError("plan", [Problem("--launcher", name, f"is one of {', '.join(known)}")])
    return Launcher(name)
