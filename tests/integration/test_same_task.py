"""One task file with each backend: the same plan, the same seed, the same submission to the byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.runs.run_files import PLAN_FILE
from miner.dev import demo_inputs
from tests.doubles import base_image
from tests.doubles.backend_fixtures import own_dockerd, places_of
from tests.doubles.slurm import OwnSlurm

pytestmark = [pytest.mark.training, pytest.mark.thorough]

ROOT = Path(__file__).parents[2]
IMAGE = "training:1"
#: Importing the stack on a busy machine takes minutes.
LIMIT_S = 800


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The task's file, with model and rows beside it."""
    folder = tmp_path_factory.mktemp("task")
    for name, content in demo_inputs.model_files().items():
        path = folder / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (folder / "rows.json").write_bytes(demo_inputs.training_rows(120))
    asked_for = {
        "task_id": "same",
        "model": demo_inputs.MODEL_ID,
        "model_folder": "model",
        "hours_to_complete": 0.5,
        "expected_repo_name": "same",
        "dataset": "rows.json",
        "dataset_type": {"field_instruction": "instruct", "field_output": "output"},
    }
    (folder / "task.json").write_text(json.dumps(asked_for))
    (folder / "quick.yaml").write_text(
        "extends: cpu-native\ntargets: {max_steps: 12, eval_steps: 6, save_steps: 6}\n"
    )
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)  # a container's user reads it too
    return folder


def comparable(plan: dict[str, Any]) -> dict[str, Any]:
    """Without a port that was free, the seconds that were left when the inputs were there, and the memory of
    the machine or node."""
    del plan["launch"]["port"], plan["task"]["hours"], plan["time"], plan["container"]
    return plan


def trained(task: Path, data_dir: Path, settings: dict[str, str]) -> tuple[dict[str, Any], bytes]:
    """The plan, and the submission's tensors."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(data_dir.parent),
        "PYTHONPATH": str(ROOT),
        "DATA_DIR": str(data_dir),
        "GPUS": "cpu",
        "PROFILE": str(task / "quick.yaml"),
        "HUB": f"local:{data_dir / 'hub'}",
        "HF_USER": "tester",
        "MIN_FREE_DISK_BYTES": "0",
        "TRAINER_ULIMITS": "core=0",
        **settings,
    }
    command = [sys.executable, "-m", "miner", "run", "--task", str(task / "task.json"), "--json"]
    done = subprocess.run(
        command,
        cwd=data_dir.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    (attempt,) = data_dir.glob("jobs/*/attempt_1")
    log = attempt / "log"
    assert done.returncode == 0, f"{done.stderr[-2000:]}\n{log.read_text()[-2000:] if log.exists() else ''}"
    (tensors,) = data_dir.glob("hub/tester/same/*.safetensors")
    return comparable(json.loads((attempt / PLAN_FILE).read_text())), tensors.read_bytes()


@pytest.fixture(scope="module")
def by_processes(
    task: Path, training_python: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], bytes]:
    folder = tmp_path_factory.mktemp("process")
    settings = {"BACKEND": "process", "TRAINER_PYTHON": training_python, "TRAINER_SANDBOX": "off"}
    return trained(task, folder / "data", settings)


@pytest.fixture
def docker_settings(training_python: str) -> Iterator[dict[str, str]]:
    """A Docker whose containers see this machine's training environment, and our code."""
    changes = [
        f"ENV PATH={Path(training_python).parent}:/usr/local/bin:/usr/bin:/bin",
        f"ENV PYTHONPATH={ROOT}",
    ]
    with own_dockerd(mounted=[*places_of(training_python), ROOT]) as dockerd:
        name, _, tag = IMAGE.partition(":")
        with dockerd.client() as client:
            client.api.import_image_from_data(base_image.tar(), repository=name, tag=tag, changes=changes)
        yield {"BACKEND": "docker", "DOCKER_HOST": dockerd.host, "TRAINER_TEXT_IMAGE": IMAGE}


@pytest.fixture
def slurm_settings(training_python: str, slurm: OwnSlurm) -> dict[str, str]:
    return {
        "BACKEND": "slurm",
        "SLURM_BIN_DIR": str(slurm.bin),
        "TRAINER_PYTHON": training_python,
        "TRAINER_SANDBOX": "off",
    }


@pytest.mark.parametrize("kind", ["docker", "slurm"])
def test_a_task_is_trained_to_the_same_submission_by_each_backend(
    kind: str,
    task: Path,
    by_processes: tuple[dict[str, Any], bytes],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    settings = request.getfixturevalue(f"{kind}_settings")
    plan, tensors = trained(task, tmp_path / "data", settings)
    assert plan == by_processes[0]
    assert tensors == by_processes[1]
