"""Doctor with a real Slurm: its test job, and what is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miner.doctor import CheckContext, Finding, FindingStatus
from miner.doctor.checks import cluster, cluster_job
from miner.settings import load_settings
from tests.doubles.slurm import OwnSlurm, own_slurm, waited_for

OK, WARN, FAIL = FindingStatus.OK, FindingStatus.WARN, FindingStatus.FAIL


@pytest.fixture(scope="module")
def slurm() -> Iterator[OwnSlurm]:
    with own_slurm(settings={"MinJobAge": "2"}) as one:
        yield one


def found(slurm: OwnSlurm, tmp_path: Path, **settings: Any) -> dict[str, Finding]:
    given = {"gpus": "cpu", "trainer_python": python(slurm.folder), "trainer_sandbox": "off", **settings}
    loaded = load_settings(
        env={}, env_file=None, engine="slurm", data_dir=tmp_path / "data", slurm_bin_dir=slurm.bin, **given
    )
    findings = {one.what: one for one in cluster.check_cluster(CheckContext(loaded))}
    # A doctor leaves nothing behind.
    assert [path.name for path in tmp_path.iterdir()] == []
    waited_for(lambda: not slurm.run("squeue", "-h"), "the test job goes on")
    return findings


def python(folder: Path) -> Path:
    """One that pretends the training stack."""
    path = folder / "python"
    path.write_text(
        "#!/bin/sh\n"
        '[ "$2" = trainer.runner.check_engines ] && echo \'{"axolotl": "", "native": ""}\' && exit\n'
        f'exec {sys.executable} "$@"\n'
    )
    path.chmod(0o755)
    return path


def test_one_job_finds_out_what_a_node_has(slurm: OwnSlurm, tmp_path: Path) -> None:
    findings = found(slurm, tmp_path, slurm_nodes="n2")
    judged = {name for name, one in findings.items() if one.status is not OK}
    assert judged == {"slurm processes", "slurm accounting"}  # no cgroups, and MinJobAge is short
    assert findings["slurm job"].detail.startswith("a test job ran on n2")
    assert "Python 3." in findings["slurm python"].detail
    assert findings["slurm clock"].detail == "n2 agrees with this machine"
    assert findings["trial run"].detail.startswith("axolotl and native can train")
    names = [call.split("--job-name=")[1] for call in slurm.calls() if call.startswith("sbatch ")]
    assert [name.startswith(cluster_job.NAME_PREFIX) for name in names] == [True, False]


def test_a_gpu_that_nobody_sees_is_found_by_the_job(slurm: OwnSlurm, tmp_path: Path) -> None:
    """Slurm gives it a pretended one."""
    gpu = found(slurm, tmp_path, gpus="auto")["slurm GPU"]
    assert (gpu.status, "on n" in gpu.detail) == (FAIL, True)


def test_a_job_that_does_not_begin_is_cancelled_with_slurms_reason(
    slurm: OwnSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_job, "PENDING_S", 0.5)
    slurm.run("scontrol", "create", "reservation=all", "starttime=now", "duration=60", "nodes=ALL",
              "users=nobody")  # fmt: skip
    try:
        job = found(slurm, tmp_path)["slurm job"]
    finally:
        slurm.run("scontrol", "delete", "reservation=all")
    assert job.status is not OK
    assert "had not begun" in job.detail


def test_an_interrupted_doctor_leaves_no_job(slurm: OwnSlurm, tmp_path: Path) -> None:
    slurm.run("scontrol", "update", "partitionname=train", "state=down")
    code = (
        "from miner.doctor import examine\n"
        "from miner.doctor.examine import CheckContext, DoctorCheck\n"
        "from miner.doctor.checks import cluster_job\n"
        "from miner.backends.registry import slurm_commands\n"
        "from miner.settings import load_settings\n"
        "from pathlib import Path\n"
        "settings = load_settings(env_file=None)\n"
        "def run(context):\n"
        "    commands = slurm_commands(settings)\n"
        "    cluster_job.run_test_job(settings, commands, Path.cwd(), python='x', with_gpu=False)\n"
        "    yield\n"
        "examine(CheckContext(settings), [DoctorCheck('slurm', run, 100)])\n"
    )
    environment = {**os.environ, "ENGINE": "slurm", "SLURM_BIN_DIR": str(slurm.bin)}
    doctor = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment)
    try:
        waited_for(lambda: slurm.run("squeue", "-h", "-o", "%j"), "no job comes")
        doctor.send_signal(signal.SIGINT)
        doctor.wait(60)
    finally:
        doctor.kill()
        slurm.run("scontrol", "update", "partitionname=train", "state=up")
    assert slurm.run("squeue", "-h", "-o", "%j") == ""
