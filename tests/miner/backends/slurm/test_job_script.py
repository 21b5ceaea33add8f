"""What sbatch and the nodes are given: options, script, and the containers' command lines."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from miner.backends.base import AttemptSpec, Mount
from miner.backends.slurm.job_script import (
    FOLDER,
    JobRequest,
    ScriptParts,
    container_parts,
    job_script,
    sbatch_options,
    script_environment,
)

pytestmark = pytest.mark.process


RUN = Path("/shared/jobs/1/attempt 1")
JOB = JobRequest(
    name="god-miner-x-k1",
    run_dir=RUN,
    nodes=("n1",),
    node_count=1,
    gpus_per_node=4,
    cpus=64,
    memory_bytes=256 << 30,
    limit_s=12 * 3600 - 30,
    grace_s=90,
    placement={"partition": "preempt", "account": "lab", "qos": "", "constraint": "h100&ib"},
    options=("--nice=100",),
)
PARTS = ScriptParts(Path("/shared/runs/k1"), "x/k1", {"A": "b c'd"}, programs=Path("/shared/env/bin"))
WRAPPER = ("/shared/env/bin/python", "-I", "-S", "/shared/wrapper.py", "--dir", FOLDER, "--", "python", "x y")


def script(job: JobRequest = JOB, parts: ScriptParts = PARTS) -> str:
    text = job_script(job, parts, WRAPPER)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    return text


def srun_line(text: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith("srun --mpi=none --kill"))
    return shlex.split(line)


def step(text: str) -> str:
    words = srun_line(text)
    assert words[-4:-2] == ["bash", "-c"]
    return words[-2]


def test_sbatch_is_asked_for_what_the_plan_says() -> None:
    assert sbatch_options(JOB) == [
        "--parsable",
        "--job-name=god-miner-x-k1",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--cpus-per-task=64",
        "--mem=262144M",
        "--time=720",
        "--signal=B:TERM@90",
        "--no-requeue",
        "--export=ALL",
        "--chdir=/shared/jobs/1/attempt 1",
        "--output=/shared/jobs/1/attempt 1/slurm.out",
        "--open-mode=append",
        "--gpus-per-node=4",
        "--nodelist=n1",
        "--partition=preempt",
        "--account=lab",
        "--constraint=h100&ib",
        "--nice=100",
    ]


def test_a_percent_sign_in_a_path_is_not_slurms() -> None:
    assert "--output=/a%%j/slurm.out" in sbatch_options(replace(JOB, run_dir=Path("/a%j")))


def test_the_work_is_a_step_with_our_wrapper() -> None:
    text = script()
    assert "export A='b c'\"'\"'d'" in text
    assert "--nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=64 --export=ALL" in text
    assert step(text).endswith(
        'exec env GOD_MINER_RUN=x/k1 /shared/env/bin/python -I -S /shared/wrapper.py --dir "$dir" -- '
        "python 'x y'"
    )
    assert step(text).startswith("dir='/shared/jobs/1/attempt 1'; ")


def test_modules_are_loaded_before_the_step() -> None:
    text = script(parts=replace(PARTS, modules=("cuda/12.4",)))
    assert text.index("module load cuda/12.4 || exit 76") < text.index("srun --mpi=none")
    assert "module" not in script()


def test_a_job_without_gpus_sees_none() -> None:
    assert "CUDA_VISIBLE_DEVICES= " in step(script(replace(JOB, gpus_per_node=0)))
    assert "CUDA_VISIBLE_DEVICES" not in script()
    assert not any("gpus" in option for option in sbatch_options(replace(JOB, gpus_per_node=0)))


def test_signals_reach_the_wrapper_of_each_node() -> None:
    one, two = script(), script(replace(JOB, nodes=("n1", "n2"), node_count=2))
    assert "trap 'pass_on USR1' USR1" in one
    assert "kill -$1 $(cat /shared/runs/k1/claim/pid.0)" in one
    assert "srun --mpi=none --overlap --export=ALL --ntasks-per-node=1 bash -c" in two
    assert "--nodes=2 --ntasks=2" in two
    assert "export GOD_MINER_NODE_RANK=$SLURM_NODEID; " in step(two)
    assert "GOD_MINER_NODE_RANK" not in one


def test_only_the_first_of_two_jobs_begins(tmp_path: Path) -> None:
    """The script as it is, with `srun` replaced by what would be run."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "job").mkdir()
    job = replace(JOB, run_dir=tmp_path / "job")
    text = script(job, replace(PARTS, directory=tmp_path / "runs"))
    fake = "srun() { echo ran >> ran; }\nSLURM_JOB_ID=$1\n"
    text = text.replace("#!/bin/bash\n", f"#!/bin/bash\n{fake}")
    codes = [
        subprocess.run(["bash", "-s", "--", number], input=text, text=True, check=False).returncode
        for number in ("7", "8")
    ]
    assert codes == [0, 75]
    assert (tmp_path / "job" / "ran").read_text() == "ran\n"
    assert (tmp_path / "runs" / "claim" / "job").read_text() == "7\n"
    (tmp_path / "job" / "ran").unlink()
    (tmp_path / "job").rmdir()
    gone = subprocess.run(["bash", "-s", "--", "9"], input=text, text=True, capture_output=True, check=False)
    assert gone.returncode == 74


@pytest.fixture
def spec() -> AttemptSpec:
    mounts = (Mount(Path("/shared/models/m")), Mount(Path("/shared/out"), read_only=False))
    return AttemptSpec("k1", ("python", "-m", "trainer.text"), RUN, mounts=mounts, gpus=("0@n1",))


def test_apptainer_runs_the_wrapper_with_its_files_and_the_gpus(spec: AttemptSpec) -> None:
    """Rendered only: there is no Apptainer here to run it."""
    prefix, srun = container_parts(
        "apptainer:/shared/t.sif", spec, Path("/shared/wrapper.py"), PARTS.directory
    )
    assert srun == []
    assert prefix == [
        *("apptainer", "exec", "--nv", "--home", str(RUN), "--pwd", str(RUN)),
        *("--bind", "/shared/wrapper.py:/shared/wrapper.py:ro", "--bind", f"{RUN}:{RUN}"),
        *("--bind", "/shared/models/m:/shared/models/m:ro", "--bind", "/shared/out:/shared/out"),
        "/shared/t.sif",
    ]
    assert "exec env GOD_MINER_RUN=x/k1 apptainer exec --nv" in step(
        script(parts=replace(PARTS, prefix=tuple(prefix)))
    )
    on_cpu, _ = container_parts(
        "apptainer:/shared/t.sif", replace(spec, gpus=()), Path("/w.py"), PARTS.directory
    )
    assert "--nv" not in on_cpu


def test_pyxis_gets_its_container_by_options_of_srun(spec: AttemptSpec) -> None:
    """Rendered only: there is no pyxis here to run it."""
    prefix, srun = container_parts(
        "pyxis:registry.example.org#team/t:1", spec, Path("/shared/wrapper.py"), PARTS.directory
    )
    assert prefix == []
    assert srun == [
        "--container-image=registry.example.org#team/t:1",
        f"--container-mounts=/shared/wrapper.py:/shared/wrapper.py:ro,{RUN}:{RUN},"
        "/shared/models/m:/shared/models/m:ro,/shared/out:/shared/out,/shared/runs/k1/claim:/shared/runs/k1/claim",
        f"--container-workdir={RUN}",
        "--no-container-mount-home",
    ]
    assert set(srun) <= set(srun_line(script(parts=replace(PARTS, srun_options=tuple(srun)))))


def test_the_environment_is_the_runs_own(spec: AttemptSpec) -> None:
    given = script_environment(replace(spec, env={"HOME": "/x", "B": "1"}), Path("/shared/code"), "/tmp")
    assert (given["HOME"], given["B"], given["PYTHONPATH"]) == ("/x", "1", "/shared/code")
    assert "PYTHONPATH" not in script_environment(spec, None, "/tmp")
