"""The same run under other launchers: torchrun on one machine, and a Slurm script for one or several.

`accelerate launch` (`core.recipes.launch`) is what the daemon and the wrapper use. These are for a cluster of
the operator's own; both start exactly the processes that the plan names.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from enum import StrEnum

from core.choices import Engine
from core.errors import Problem
from core.plan import TrainingPlan
from core.recipes.launch import count_cpus, kohya_script
from core.recipes.run import RecipeError, Rendered, RunInputs


class Launcher(StrEnum):
    ACCELERATE = "accelerate"
    TORCHRUN = "torchrun"
    SLURM = "slurm"


#: From Slurm's signal to its limit: a step, an evaluation and a state, and what Slurm may be early by.
SIGNAL_S = 300
#: Asked for beside the plan's own time.
_MARGIN_S = 600
_CPUS_PER_GPU = 12
#: Of one machine's loopback; a job on several must not have them.
_LOCAL_ONLY = ("PET_LOCAL_ADDR", "GLOO_SOCKET_IFNAME")
#: What a hang leaves behind: NCCL's last collectives of every rank.
_FLIGHT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "NCCL_DEBUG": "WARN",
}

#: As under our own wrapper: no library asks the network.
_OFFLINE = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1")


def script(
    launcher: Launcher, plan: TrainingPlan, inputs: RunInputs, made: Rendered, source: str, nodes: int = 1
) -> str:
    """What starts the run, our packages lying in `source`. `RecipeError` for what a launcher cannot do."""
    if launcher is Launcher.ACCELERATE:
        return f"{_HEAD}{_exports(made.env)}exec {shlex.join(made.command)}\n"
    if plan.engine is Engine.AI_TOOLKIT:
        raise _refused(
            plan, "engine", plan.engine, "starts itself, as one process; use --launcher accelerate"
        )
    if plan.launch.processes % nodes:
        rule = f"{plan.launch.processes} processes cannot be shared out over {nodes} machines"
        raise _refused(plan, "--nodes", nodes, rule)
    if launcher is Launcher.SLURM:
        return _slurm(plan, inputs, made, source, nodes)
    if nodes > 1:
        raise _refused(plan, "--nodes", nodes, "torchrun on several machines wants --launcher slurm")
    return _alone(plan, inputs, made, source)


def _alone(plan: TrainingPlan, inputs: RunInputs, made: Rendered, source: str) -> str:
    """torchrun on this machine, on a port that it finds by itself."""
    python = shlex.quote(inputs.python)
    launch = shlex.join(
        (
            *_torchrun(inputs),
            "--standalone",
            "--nproc-per-node",
            str(plan.launch.processes),
            *_target(plan, inputs, made),
        )
    )
    env = _environment(plan, inputs, made, source)
    if plan.engine is not Engine.NATIVE:
        return f"{_HEAD}{env}exec {launch}\n"
    sheet = f'GOD_MINER_SHEET="$({python} -m trainer.native.ready "$RUN/run.json")"\nexport GOD_MINER_SHEET\n'
    over = f'exec {python} -m trainer.native.ready "$RUN/run.json" --over\n'
    return f"{_HEAD}set -eu\n{_RUN.format(how='run.sh RUN')}{env}{sheet}{launch} || true\n{over}"


def _environment(plan: TrainingPlan, inputs: RunInputs, made: Rendered, source: str, nodes: int = 1) -> str:
    """Scratch is under the run's own folder where there is one."""
    env = {key: value for key, value in made.env.items() if nodes == 1 or key not in _LOCAL_ONLY}
    if plan.launch.processes > 1:
        env |= _FLIGHT
    env |= {"PYTHONPATH": source, "PYTHONSAFEPATH": "1", **_OFFLINE}
    if plan.engine is not Engine.NATIVE:
        return _exports(env)
    env.pop("GOD_MINER_PLAN", None)  # the sheet says it
    in_run = {key: value for key, value in env.items() if value.startswith(f"{inputs.work_dir}/")}
    own = "".join(
        f'export {key}="$RUN/work{value.removeprefix(inputs.work_dir)}"\n'
        for key, value in sorted(in_run.items())
    )
    return _exports({key: value for key, value in env.items() if key not in in_run}) + own


def _torchrun(inputs: RunInputs) -> tuple[str, ...]:
    return ("torchrun",) if inputs.python == "python" else (inputs.python, "-m", "torch.distributed.run")


def _target(plan: TrainingPlan, inputs: RunInputs, made: Rendered) -> tuple[str, ...]:
    """What every process runs: the end of accelerate's command."""
    if plan.engine is Engine.KOHYA:
        return (f"{inputs.kohya_dir}/{kohya_script(plan)}", *made.command[-2:])
    if plan.engine is Engine.NATIVE:
        return ("-m", "trainer.native")
    return made.command[-3:]


def _slurm(plan: TrainingPlan, inputs: RunInputs, made: Rendered, source: str, nodes: int) -> str:
    native, python = plan.engine is Engine.NATIVE, shlex.quote(inputs.python)
    return "".join(
        [
            "#!/bin/bash\n",
            *(f"#SBATCH {header}\n" for header in _headers(plan, nodes)),
            _SLURM_HEAD,
            _RUN.format(how="sbatch job.sbatch RUN") if native else "",
            _exports({"PATH": "/usr/local/bin:/usr/bin:/bin"}),
            _environment(plan, inputs, made, source, nodes),
            _SLURM_READY.format(python=python) if native else "",
            _SLURM_RENDEZVOUS,
            _SLURM_ASKED_NATIVE if native else _SLURM_ASKED,
            _step(plan, inputs, made, nodes),
            _SLURM_WAIT,
            _SLURM_OVER if native else _SLURM_END,
        ]
    )


def _headers(plan: TrainingPlan, nodes: int) -> list[str]:
    each, container = plan.launch.processes // nodes, plan.container
    cpus = count_cpus(container.cpus) if container.cpus else _CPUS_PER_GPU * each
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


def _step(plan: TrainingPlan, inputs: RunInputs, made: Rendered, nodes: int) -> str:
    """An srun step also on one machine: only steps are signalled, and only they are waited for."""
    words = [
        f"--nnodes={nodes}",
        f"--nproc-per-node={plan.launch.processes // nodes}",
        "--rdzv-backend=c10d",
        '--rdzv-endpoint="$HEAD:$PORT"',
        '--rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',
        "--max-restarts=0",
    ]
    target = shlex.join(_target(plan, inputs, made))
    return (
        f"srun --nodes={nodes} --ntasks-per-node=1 --kill-on-bad-exit=1 --export=ALL \\\n"
        f"    {shlex.join(_torchrun(inputs))} {' '.join(words)} \\\n"
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
    srun --nodes=1 --ntasks=1 --export=ALL {python} -m trainer.native.ready "$RUN/run.json" "$@"
}}
GOD_MINER_SHEET="$(ready)" || exit $?
export GOD_MINER_SHEET
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


def _refused(plan: TrainingPlan, what: str, value: object, rule: str) -> RecipeError:
    return RecipeError(f"profile {plan.profile}", [Problem(what, str(value), rule)])


def parse(word: str) -> Launcher:
    known: Sequence[str] = list(Launcher)
    if word not in known:
        raise RecipeError("plan", [Problem("--launcher", word, f"is one of {', '.join(known)}")])
    return Launcher(word)
