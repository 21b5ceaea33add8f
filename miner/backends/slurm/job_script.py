"""Write an attempt as a job of Slurm: sbatch's options and the script.

Nothing of the daemon's environment reaches the training: commands of Slurm get few variables, and the script
unsets those. Without `--export=ALL` Slurm would load the user's login environment. The work is an srun step:
one wrapper on each node. Signals go to the script (`scancel --batch`), which passes them on to the wrappers.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from miner.backends.base import STOP_RECORD_FILE, AttemptSpec
from miner.backends.ownership import MARK_VARIABLE
from miner.backends.preflight import mounts_of
from miner.backends.slurm.commands import NOT_FOR_JOBS
from miner.backends.slurm.runs import CLAIM

#: What Slurm itself and the script print, in the run directory.
OUTPUT_FILE = "slurm.out"
#: Exit codes of the script: another job has the key, the directory is not there, a module cannot be loaded.
TAKEN, NO_DIRECTORY, NO_MODULE = 75, 74, 76
#: In the wrapper's command: the directory of its records. Needs no quotes.
FOLDER = "@FOLDER@"
#: A step beside the training's. Without `--export` it would have no PATH either.
_ON_EACH_NODE = "srun --mpi=none --overlap --export=ALL --ntasks-per-node=1"
#: What the trainer asks of several machines, by Slurm's variables of a step: `srun` is called on the first.
_MACHINES = {
    "GOD_MINER_NODE_RANK": "SLURM_NODEID",
    "GOD_MINER_NODES": "SLURM_STEP_NUM_NODES",
    "GOD_MINER_HEAD": "SLURM_LAUNCH_NODE_IPADDR",
}
_SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MODULE_INITS = (
    "/etc/profile.d/lmod.sh /etc/profile.d/z00_lmod.sh /etc/profile.d/modules.sh "
    "/usr/share/lmod/lmod/init/bash /usr/share/modules/init/bash"
)


@dataclass(frozen=True, slots=True)
class JobRequest:
    """Everything that a job asks of Slurm, beside its script."""

    name: str
    run_dir: Path
    nodes: tuple[str, ...]
    node_count: int
    gpus_per_node: int
    cpus: int
    memory_bytes: int
    limit_s: float
    #: Before the end of its time it gets SIGTERM, as a backstop: the wrapper's own limit comes first.
    grace_s: float
    #: partition, account, qos, constraint, reservation
    placement: Mapping[str, str]
    options: tuple[str, ...] = ()
    #: As Slurm calls it, where the nodes have several.
    gpu_type: str = ""


def sbatch_options(job: JobRequest) -> list[str]:
    options = [
        "--parsable",
        f"--job-name={job.name}",
        f"--nodes={job.node_count}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={job.cpus}",
        f"--mem={max(job.memory_bytes >> 20, 1)}M",
        f"--time={max(math.ceil(job.limit_s / 60), 1)}",
        f"--signal=B:TERM@{math.ceil(job.grace_s)}",
        "--no-requeue",
        "--export=ALL",
        f"--chdir={job.run_dir}",
        f"--output={str(job.run_dir / OUTPUT_FILE).replace('%', '%%')}",
        "--open-mode=append",
    ]
    if job.gpus_per_node:
        kind = f"{job.gpu_type}:" if job.gpu_type else ""
        options.append(f"--gpus-per-node={kind}{job.gpus_per_node}")
    if job.nodes:
        options.append(f"--nodelist={','.join(job.nodes)}")
    options += [f"--{name}={value}" for name, value in job.placement.items() if value]
    return [*options, *job.options]


@dataclass(frozen=True, slots=True)
class ScriptParts:
    #: Of the run, on the shared file system.
    directory: Path
    mark: str
    env: Mapping[str, str]
    modules: tuple[str, ...] = ()
    #: What runs the wrapper's command on the node: `apptainer exec …`, and options of srun for pyxis.
    prefix: tuple[str, ...] = ()
    srun_options: tuple[str, ...] = ()
    #: Where programs are looked for first: beside the training environment's interpreter.
    programs: Path | None = None


def job_script(job: JobRequest, parts: ScriptParts, wrapper: Sequence[str]) -> str:
    """`wrapper`: the command of our wrapper, with FOLDER as the directory of its records."""
    run_dir, claim = shlex.quote(str(job.run_dir)), shlex.quote(str(parts.directory / CLAIM))
    lines = [
        "#!/bin/bash",
        f"export PATH={_SEARCH_PATH}",
        f"unset {' '.join(NOT_FOR_JOBS)}",
        f"cd {run_dir} || exit {NO_DIRECTORY}",
        "# Only one job of a run begins, whatever was submitted twice.",
        f"if ! mkdir {claim}; then [ -d {claim} ] && exit {TAKEN}; exit {NO_DIRECTORY}; fi",
        f'echo "$SLURM_JOB_ID" > {claim}/job.part && mv {claim}/job.part {claim}/job',
        *_module_lines(parts.modules),
        *(f"export {name}={shlex.quote(value)}" for name, value in parts.env.items()),
        *([f"export PATH={shlex.quote(str(parts.programs))}:$PATH"] if parts.programs else []),
        *_signal_lines(job, claim),
        f"[ -e {STOP_RECORD_FILE} ] && exit 143",
        f"{shlex.join(_srun(job, parts.srun_options))} {_step(job, parts, wrapper)} &",
        "step=$!",
        "# A signal ends the wait, not the step.",
        'while :; do signalled=; wait $step; code=$?; [ -n "$signalled" ] || break; done',
        *_clean_up(job, parts.mark),
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def batch_file(
    job: JobRequest, command: Sequence[str], env: Mapping[str, str], modules: Sequence[str]
) -> str:
    """Write a file for `sbatch` that runs a command on a node, for a run that no daemon watches."""
    # The signal would end the command, which minds the time itself. Nothing of the submitter's environment
    # comes along, no token either: unlike the daemon's, it is whole.
    left_out = ("--parsable", "--signal", "--export")
    options = [option for option in sbatch_options(job) if not option.startswith(left_out)] + ["--export=NIL"]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {shlex.quote(option)}" for option in options),
        f"export PATH={_SEARCH_PATH}",
        *_module_lines(modules),
        *(f"export {name}={shlex.quote(value)}" for name, value in env.items()),
        f"exec {shlex.join([*_srun(job, ()), *command])}",
    ]
    return "\n".join(lines) + "\n"


def _signal_lines(job: JobRequest, claim: str) -> Iterator[str]:
    """Pass the signals of the daemon on to our wrappers. Slurm's own way to a step is to all its processes,
    which would end the workers of a trainer that is saving, and whatever does not handle SIGUSR1."""
    kill = f"kill -$1 $(cat {claim}/pid.${{SLURM_PROCID:-0}})"
    if job.node_count > 1:
        kill = f"{_ON_EACH_NODE} bash -c {shlex.quote(kill)} - $1"
    else:
        kill = kill.replace("${SLURM_PROCID:-0}", "0")
    yield f"pass_on() {{ signalled=1; [ -e {claim}/pid.0 ] && {kill}; }}"
    yield from (f"trap 'pass_on {name}' {name}" for name in ("TERM", "QUIT", "USR1"))


def _srun(job: JobRequest, options: Sequence[str]) -> list[str]:
    return [
        "srun",
        "--mpi=none",
        "--kill-on-bad-exit=1",
        "--input=none",
        f"--nodes={job.node_count}",
        f"--ntasks={job.node_count}",
        "--ntasks-per-node=1",
        # Not handed on from sbatch since 22.05.
        f"--cpus-per-task={job.cpus}",
        "--export=ALL",
        *options,
    ]


def _step(job: JobRequest, parts: ScriptParts, wrapper: Sequence[str]) -> str:
    """The wrapper on each node. The first node's keeps its records in the run directory, the others' in
    directories in it."""
    variables = [f"{MARK_VARIABLE}={parts.mark}"]
    if not job.gpus_per_node:
        # It would see all GPUs where Slurm does not confine devices. In the step: Slurm unsets it before.
        variables.append("CUDA_VISIBLE_DEVICES=")
    command = shlex.join(("env", *variables, *parts.prefix, *wrapper))
    command = command.replace(FOLDER, '"$dir"')
    pid = f"{shlex.quote(str(parts.directory / CLAIM))}/pid.$SLURM_PROCID"
    machines = (f"export {name}=${value}; " for name, value in _MACHINES.items() if job.node_count > 1)
    text = (
        f"{''.join(machines)}dir={shlex.quote(str(job.run_dir))}; "
        '[ "$SLURM_PROCID" = 0 ] || { dir=$dir/node_$SLURM_PROCID; mkdir -p "$dir" || exit 74; }; '
        f"echo $$ > {pid}; "
        f"exec {command}"
    )
    return shlex.join(("bash", "-c", text))


def _module_lines(modules: Sequence[str]) -> Iterator[str]:
    if modules:
        yield f'for file in {_MODULE_INITS}; do [ -r "$file" ] && . "$file" && break; done'
        yield from (f"module load {shlex.quote(module)} || exit {NO_MODULE}" for module in modules)


def _clean_up(job: JobRequest, mark: str) -> Iterator[str]:
    """End what outlived a killed wrapper. Slurm does so itself where it tracks processes by cgroups."""
    kill = (
        f"for file in $(grep -lzx {MARK_VARIABLE}={mark} /proc/[0-9]*/environ 2>/dev/null); "
        'do kill -KILL "${file//[!0-9]/}" 2>/dev/null; done'
    )
    if job.node_count > 1:
        kill = f"{_ON_EACH_NODE} bash -c {shlex.quote(kill)}"
    yield f'[ "$code" -lt 128 ] || {{ {kill}; }}'


def container_parts(
    container: str, spec: AttemptSpec, wrapper: Path, directory: Path
) -> tuple[list[str], list[str]]:
    """The prefix of the wrapper's command, and options of srun, for a container: apptainer's, or pyxis'. The
    whole step is in the latter, and writes to the claim in the run's `directory`."""
    kind, _, image = container.partition(":")
    binds = [(str(wrapper), True), *((str(mount.path), mount.read_only) for mount in mounts_of(spec))]
    if kind == "pyxis":
        binds.append((str(directory / CLAIM), False))
        mounts = ",".join(f"{path}:{path}{':ro' if closed else ''}" for path, closed in binds)
        return [], [
            f"--container-image={image}",
            f"--container-mounts={mounts}",
            f"--container-workdir={spec.run_dir}",
            "--no-container-mount-home",
        ]
    prefix = ["apptainer", "exec", *(["--nv"] if spec.gpus else [])]
    prefix += ["--home", str(spec.run_dir), "--pwd", str(spec.run_dir)]
    for path, closed in binds:
        prefix += ["--bind", f"{path}:{path}{':ro' if closed else ''}"]
    return [*prefix, image], []


def script_environment(spec: AttemptSpec, code: Path | None, home: str) -> dict[str, str]:
    """The training's variables, beside Slurm's. `code`: our packages; a container has its own."""
    return {
        "LANG": "C.UTF-8",
        "HOME": home,
        "USER": "trainer",
        "LOGNAME": "trainer",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONFAULTHANDLER": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        **({"PYTHONPATH": str(code)} if code else {}),
        **spec.env,
    }
