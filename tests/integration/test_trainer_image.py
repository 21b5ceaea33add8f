"""The text trainer's image on a real Docker Engine: what `test_rehearsal.py` does not try.

The base is a stand-in: this machine's own training environment, mounted instead of downloaded. What is
built on it, and everything that runs, is the real thing.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.runs.run_files import TrainerExitCode
from tests.doubles import base_image
from tests.doubles.backend_fixtures import own_dockerd, places_of
from tests.doubles.dockerd import Dockerd

pytestmark = [
    pytest.mark.training,
    pytest.mark.thorough,
]

ROOT = Path(__file__).parents[2]
DOCKERFILE = "dockerfiles/standalone-text-trainer.dockerfile"
BASE, IMAGE = "training-base:1", "text-trainer:1"
TASK, BAD_TASK, REPO = "0d63e5c4", "1bad", "tournament-t-0d63e5c4-5Gabc"
DATASET = {"field_instruction": "instruct", "field_input": "input", "field_output": "output"}
#: A step takes milliseconds, importing the stack on a busy machine takes minutes.
LIMIT_S = 500


@pytest.fixture(scope="module")
def training(training_python: str) -> Path:
    return Path(training_python)


@pytest.fixture(scope="module")
def dockerd(training: Path) -> Iterator[Dockerd]:
    """With the training environment, and the interpreter that it was made with, in every container."""
    with own_dockerd(mounted=places_of(training)) as dockerd:
        path = f"ENV PATH={training.parent}:/usr/local/bin:/usr/bin:/bin"
        name, _, tag = BASE.partition(":")
        with dockerd.client() as client:
            client.api.import_image_from_data(base_image.tar(), repository=name, tag=tag, changes=[path])
        yield dockerd


@pytest.fixture(scope="module")
def image(dockerd: Dockerd) -> str:
    """Built from the dockerfile as it is, with another base."""
    arguments = {"BASE_IMAGE": BASE, "REWARD_PACKAGES": ""}
    dockerd.build(IMAGE, path=str(ROOT), dockerfile=DOCKERFILE, buildargs=arguments)
    return IMAGE


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, training: Path) -> Path:
    """What a validator has downloaded: a model, the rows of one task, and nonsense for another one."""
    folder = tmp_path_factory.mktemp("validator") / "cache"
    (folder / "datasets").mkdir(parents=True)
    script = (
        "import json, sys; from pathlib import Path; from tests.trainer import tiny; "
        "cache = Path(sys.argv[1]); tiny.save(cache / 'models' / 'org--tiny'); "
        "rows = json.dumps(tiny.instruct_rows(100)); "
        f"(cache / 'datasets' / '{TASK}_train_data.json').write_text(rows)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([training, "-c", script, str(folder)], env=environment, check=True, timeout=LIMIT_S)
    nonsense = folder / "datasets" / f"{BAD_TASK}_train_data.json"
    nonsense.write_text('[{"nothing": "of use"}]', encoding="utf-8")
    for weights in folder.rglob("*.safetensors"):  # saved for their owner alone
        weights.chmod(0o644)
    return folder


def arguments(task: str) -> list[str]:
    return [
        *("--task-id", task, "--model", "org/tiny", "--dataset", "https://example.com/rows.json"),
        *("--dataset-type", json.dumps(DATASET), "--task-type", "InstructTextTask", "--file-format", "s3"),
        *("--expected-repo-name", REPO, "--hours-to-complete", "0"),
    ]


def run(
    dockerd: Dockerd, image: str, task: str, cache: Path, checkpoints: Path, **more: Any
) -> tuple[int, str]:
    """Under a validator's conditions: code and log."""
    from docker.types import Mount

    checkpoints.mkdir(exist_ok=True)
    checkpoints.chmod(0o777)
    return dockerd.run(
        image,
        arguments(task),
        mounts=[
            Mount("/app/checkpoints", str(checkpoints), type="bind"),
            Mount("/cache", str(cache), type="bind", read_only=True),
        ],
        security_opt=["no-new-privileges"],
        shm_size="1g",
        environment={"WANDB_MODE": "offline", "TRANSFORMERS_CACHE": "/cache/hf_cache"},
        **more,
    )


def test_a_tournaments_container_trains_as_any_user_and_leaves_a_model_to_upload(
    dockerd: Dockerd, image: str, cache: Path, training: Path, tmp_path: Path
) -> None:
    code, log = run(dockerd, image, TASK, cache, tmp_path / "checkpoints", user="4242:4242")
    assert code == 0, log[-4000:]
    submission = tmp_path / "checkpoints" / TASK / REPO
    names = sorted(path.name for path in submission.iterdir())
    assert names == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((submission / "adapter_config.json").read_text("utf-8"))
    assert config["base_model_name_or_path"] == "org/tiny"
    loaded = (
        "import sys; from peft import PeftModel; from transformers import AutoModelForCausalLM; "
        "base = AutoModelForCausalLM.from_pretrained(sys.argv[1]); "
        "PeftModel.from_pretrained(base, sys.argv[2]); print('loaded')"
    )
    done = subprocess.run(
        [training, "-c", loaded, str(cache / "models/org--tiny"), str(submission)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert "loaded" in done.stdout, done.stderr[-2000:]


def test_bad_rows_end_with_their_own_exit_code(
    dockerd: Dockerd, image: str, cache: Path, tmp_path: Path
) -> None:
    code, log = run(dockerd, image, BAD_TASK, cache, tmp_path / "checkpoints")
    assert code == TrainerExitCode.BAD_DATA, log[-4000:]
    assert not (tmp_path / "checkpoints" / BAD_TASK / REPO).exists()
