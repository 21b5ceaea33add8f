"""What doctor finds of backends: real ones, tried out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from miner.backends.process import plugin as process
from miner.doctor import CheckContext, Finding, FindingStatus
from miner.doctor.checks import training
from miner.settings import load_settings
from tests.doubles import base_image
from tests.doubles.dockerd import Dockerd

pytestmark = pytest.mark.docker


def found(tmp_path: Path, **settings: Any) -> dict[str, Finding]:
    given = {"docker_host": f"unix://{tmp_path}/none", "trainer_ulimits": "core=0", **settings}
    loaded = load_settings(env={}, env_file=None, data_dir=tmp_path / "data", **given)
    findings = {one.what: one for one in training.check_backend(CheckContext(loaded))}
    # A doctor leaves nothing behind.
    assert [path.name for path in tmp_path.iterdir()] in ([], ["python"])
    return findings


def test_nothing_that_can_train_is_a_failure_with_all_reasons(tmp_path: Path) -> None:
    findings = found(tmp_path, trainer_python=tmp_path / "no-python")
    assert findings["backend"].status is FindingStatus.FAIL
    assert "does not run" in findings["docker"].detail
    assert "no-python" in findings["training python"].detail
    assert "MAX_JOBS=0" in findings["backend"].fix


def test_only_the_configured_backend_is_checked(tmp_path: Path) -> None:
    assert "docker" not in found(tmp_path, backend="process", trainer_python=tmp_path / "no")
    assert "training python" not in found(tmp_path, backend="docker")


def test_a_python_without_the_training_stack_fails(tmp_path: Path) -> None:
    findings = found(tmp_path, backend="process", trainer_python=sys.executable)
    assert findings["trial run"].status is FindingStatus.FAIL
    assert "torch" in findings["trial run"].detail
    assert "make training" in findings["trial run"].fix


@pytest.mark.parametrize(("axolotl", "status"), [("", FindingStatus.OK), ("no axolotl", FindingStatus.WARN)])
def test_local_processes_are_tried_out(tmp_path: Path, axolotl: str, status: FindingStatus) -> None:
    """The stack itself is pretended."""
    python = tmp_path / "python"
    answer = json.dumps({"axolotl": axolotl, "native": ""})
    python.write_text(
        f"#!/bin/sh\n[ \"$2\" = trainer.runner.check_engines ] && echo '{answer}' && exit\n"
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    findings = found(tmp_path, backend="process", trainer_python=python, trainer_sandbox="off")
    assert findings["backend"].status is FindingStatus.OK
    assert findings["trial run"].status is status
    assert "native can train" in findings["trial run"].detail
    assert axolotl in findings["trial run"].detail
    assert "GRPO" in findings["sandbox"].detail


@pytest.mark.parametrize(("gib", "status"), [(0.0625, FindingStatus.WARN), (64, FindingStatus.OK)])
def test_shared_memory_is_judged(gib: float, status: FindingStatus) -> None:
    assert process.shared_memory(int(gib * process.GIB)).status is status


def test_docker_is_tried_out(tmp_path: Path, docker_host: Dockerd) -> None:
    findings = found(
        tmp_path, backend="docker", docker_host=docker_host.host, trainer_text_image=base_image.NAME
    )
    assert findings["backend"].status is FindingStatus.OK
    assert "live-restore" in findings["docker"].fix
    assert findings["image text"].status is FindingStatus.WARN
    assert findings["image toolkit"].status is FindingStatus.WARN
    assert findings["trial run"].status is FindingStatus.OK
    assert "free for images" in findings["docker disk"].detail
    limits = found(
        tmp_path,
        backend="docker",
        docker_host=docker_host.host,
        trainer_text_image=base_image.NAME,
        trainer_ulimits="nofile=99999999999",
    )
    assert "TRAINER_ULIMITS" in limits["trial run"].detail


def test_a_docker_without_the_image_is_no_backend(tmp_path: Path, docker_host: Dockerd) -> None:
    findings = found(tmp_path, backend="docker", docker_host=docker_host.host)
    assert findings["backend"].status is FindingStatus.FAIL
    assert findings["image text"].fix == "god-miner images build text"
