"""Doctor with a real Slurm: its trial run, and what is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miner.backends.slurm import checks
from miner.settings import load_settings
from miner.support.findings import Finding, FindingStatus
from tests.doubles.slurm import OwnSlurm, own_slurm, waited_for

OK = FindingStatus.OK


@pytest.fixture(scope="module")
def slurm() -> Iterator[OwnSlurm]:
    with own_slurm(settings={"MinJobAge": "2"}) as one:
        yield one


def found(slurm: OwnSlurm, tmp_path: Path, **settings: Any) -> dict[str, Finding]:
    given = {"gpus": "cpu", "trainer_python": python(slurm.folder), "trainer_sandbox": "off", **settings}
    loaded = load_settings(
        env={}, env_file=None, backend="slurm", data_dir=tmp_path / "data", slurm_bin_dir=slurm.bin, **given
    )
    findings = {one.what: one for one in checks.check(loaded)}
    # A doctor leaves nothing behind.
    assert [path.name for path in tmp_path.iterdir()] == []
    waited_for(lambda: not slurm.run("squeue", "-h"), "the trial goes on")
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


def test_a_trial_on_a_node_says_what_can_be_trained(slurm: OwnSlurm, tmp_path: Path) -> None:
    findings = found(slurm, tmp_path, slurm_nodes="n2")
    judged = {name for name, finding in findings.items() if finding.status is not OK}
    assert judged == {"slurm processes", "slurm accounting"}  # no cgroups, and MinJobAge is short
    assert findings["trial run"].detail.startswith("axolotl and native can train")


def test_a_trial_that_does_not_begin_is_withdrawn_with_slurms_reason(
    slurm: OwnSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "PENDING_S", 0.5)
    slurm.run("scontrol", "create", "reservation=all", "starttime=now", "duration=60", "nodes=ALL",
              "users=nobody")  # fmt: skip
    try:
        trial = found(slurm, tmp_path)["trial run"]
    finally:
        slurm.run("scontrol", "delete", "reservation=all")
    assert trial.status is not OK
    assert "did not begin it within" in trial.detail


def test_an_interrupted_doctor_leaves_no_job(slurm: OwnSlurm, tmp_path: Path) -> None:
    slurm.run("scontrol", "update", "partitionname=train", "state=down")
    code = (
        "from miner.backends.slurm import checks\n"
        "from miner.doctor import CheckContext, examine\n"
        "from miner.doctor.checks.training import cluster_check\n"
        "from miner.settings import BackendKind, load_settings\n"
        "checks.partition_findings = lambda *_: []\n"  # it is down
        "examine(CheckContext(load_settings(env_file=None)), [cluster_check(BackendKind.SLURM)])\n"
    )
    environment = {
        **os.environ,
        "BACKEND": "slurm",
        "DATA_DIR": str(tmp_path / "data"),
        "SLURM_BIN_DIR": str(slurm.bin),
        "GPUS": "cpu",
        "TRAINER_PYTHON": str(python(slurm.folder)),
    }
    doctor = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment)
    try:
        waited_for(lambda: slurm.run("squeue", "-h", "-o", "%j"), "no job comes")
        doctor.send_signal(signal.SIGINT)
        doctor.wait(60)
    finally:
        doctor.kill()
        slurm.run("scontrol", "update", "partitionname=train", "state=up")
    assert slurm.run("squeue", "-h", "-o", "%j") == ""
