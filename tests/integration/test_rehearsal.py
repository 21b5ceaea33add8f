"""A rehearsal of this repository by the real command, on a Docker Engine of the tests' own: clone to score.

The base of the image is a stand-in: this machine's training environment, mounted instead of downloaded.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from core.domain.tasks import ImageModelType
from core.models.image_families import IMAGE_FAMILIES
from miner.tournament.rehearsal.inputs import stand_in_pictures
from miner.tournament.rules import TASKS
from tests.doubles import base_image
from tests.doubles.backend_fixtures import own_dockerd, places_of
from tests.doubles.dockerd import Dockerd
from tests.integration.test_images import OFFLINE, build_base
from tests.miner.tournament.rehearsed_entries import commit_all

pytestmark = pytest.mark.training

ROOT = Path(__file__).parents[2]
BASE = "training-base:1"
#: What the image is built from.
INGREDIENTS = ("configs", "core", "dockerfiles", "requirements", "trainer")
TEXT_BASE = {"BASE_IMAGE": BASE, "REWARD_PACKAGES": ""}
#: The evaluator's stack is a stand-in that the base has already.
IMAGE_BASE = {"BASE_IMAGE": "engine-base:1", "UV_IMAGE": "uv:1", **OFFLINE}
SHELL_BASE = "shell-base:1"
#: What shell tasks are done with, beside what the base has.
COMMANDS = (
    *("bash", "find", "grep", "sed", "sort", "wc", "mawk", "awk", "cut", "head", "tail", "uniq"),
    *("tr", "cp", "mv", "touch", "md5sum", "sha1sum", "cksum", "du", "tar", "gzip", "xargs"),
    *("basename", "dirname", "ln", "od", "date", "diff", "tee", "mktemp", "readlink", "rmdir"),
    *("echo", "printf", "test", "expr", "seq", "nl", "paste", "rev"),
)
COMFYUI = ROOT / "tests/doubles/comfyui"
PICTURES_BASE = f"""
FROM {BASE}
COPY ComfyUI /app/ComfyUI
COPY sd-scripts /app/sd-scripts
COPY weights /app/weights
COPY python /opt/god-miner/pictures/bin/python
RUN chmod 755 /opt/god-miner/pictures/bin/python
"""
#: A base, an encoder and a VAE for the stand-in.
LITTLE_MODEL = "import sys, pathlib; from tests.trainer.pictures.little import picture_model as made\n" + (
    "made(pathlib.Path(sys.argv[1]))"
)
#: `uv venv --python VERSION FOLDER`: the training environment again, which has all that is then installed.
UV = """#!/bin/sh
set -eu
[ "$1" = venv ] || exit 0
mkdir -p "$4/bin"
printf '#!/bin/sh\\nexec {python} "$@"\\n' > "$4/bin/python"
chmod 755 "$4/bin/python"
"""


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
def little_flux(dockerd: Dockerd, training: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base alone. A base image has the engines for images, and the evaluator's stack with the
    encoders and the VAE, as the build would fetch them."""
    folder = tmp_path_factory.mktemp("little") / "model"
    made = [str(training), "-c", LITTLE_MODEL, str(folder)]
    subprocess.run(made, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    encoder, vae = (folder / f"{name}.safetensors" for name in ("encoder", "vae"))
    files: dict[str, str | bytes] = {
        **{f"ComfyUI/{path.relative_to(COMFYUI)}": path.read_bytes() for path in COMFYUI.rglob("*.py")},
        **{f"sd-scripts/{name}_train_network.py": "" for name in ("sdxl", "flux")},
        **{f"weights/{name}.safetensors": encoder.read_bytes() for name in ("t5xxl_fp16", "clip_l")},
        "weights/ae.safetensors": vae.read_bytes(),
        "python": f'#!/bin/sh\nexec {training} "$@"\n',
    }
    encoder.unlink()
    vae.unlink()
    build_base(dockerd, IMAGE_BASE["BASE_IMAGE"], PICTURES_BASE, files)
    uv = UV.replace("{python}", str(training))
    build_base(dockerd, IMAGE_BASE["UV_IMAGE"], f"FROM {BASE}\nCOPY uv /uv\nRUN chmod 755 /uv\n", {"uv": uv})
    return folder


@pytest.fixture(scope="module")
def shells(dockerd: Dockerd, training: Path) -> None:
    """A base with a shell and its commands, as the real one has them."""
    name, _, tag = SHELL_BASE.partition(":")
    changes = [f"ENV PATH={training.parent}:/usr/local/bin:/usr/bin:/bin"]
    with dockerd.client() as client:
        tar = base_image.tar(*COMMANDS)
        client.api.import_image_from_data(tar, repository=name, tag=tag, changes=changes)


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    """This working tree as a repository, whatever of it is committed."""
    folder = tmp_path / "entry"
    for name in INGREDIENTS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    commit_all(folder)
    return folder


def rehearse(
    dockerd: Dockerd,
    entry: Path,
    output: Path,
    *kinds: str,
    arguments: Mapping[str, str] = TEXT_BASE,
    more: Sequence[str] = (),
) -> tuple[int, dict[str, Any], str]:
    """Exit code, report, and what was said meanwhile."""
    command = [sys.executable, "-m", "miner", "tournament", "rehearse", str(entry), "--json"]
    command += ["--output", str(output), "--gpu", "none", "--build-network", "none"]
    command += more
    command += [word for kind in kinds for word in ("--task", kind)]
    for name, value in arguments.items():
        command += ["--build-arg", f"{name}={value}"]
    environment = {**os.environ, "DOCKER_HOST": dockerd.host, "DATA_DIR": str(output.parent / "data")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr[-4000:]
    return done.returncode, json.loads(done.stdout), done.stderr


def logs(output: Path) -> str:
    """For a failure's message."""
    return "\n".join(path.read_text("utf-8", "replace")[-3000:] for path in sorted(output.glob("*/*.*og*")))


def test_a_text_task_passes_from_clone_to_score(dockerd: Dockerd, entry: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    code, report, said = rehearse(dockerd, entry, output, "instruct")
    assert code == 0, f"{report}\n{said[-3000:]}\n{logs(output)}"
    assert report["passed"]
    (build,) = report["builds"]
    assert build["steps"][-1]["instruction"].startswith("ENTRYPOINT")
    (task,) = report["tasks"]
    assert [attempt["exit_code"] for attempt in task["attempts"]] == [0]
    names = {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert set(task["upload"]["files"]) == names
    assert task["score"]["beats_base"]
    assert task["log"]["findings"] == []
    assert task["log"]["lines"] > 0
    # The engine's own output, with its configuration, is kept for the operator.
    assert "learning_rate" in (output / "instruct/console-1.log").read_text("utf-8")
    # No price of a GPU is set.
    assert json.loads((output / "report.json").read_text("utf-8")) | {"cost": None} == report
    with dockerd.client() as client:
        assert client.api.containers(all=True) == []
        assert not [tag for one in client.api.images() for tag in one["RepoTags"] or [] if "rehears" in tag]


def test_an_image_task_passes_from_clone_to_score(
    dockerd: Dockerd, little_flux: Path, entry: Path, tmp_path: Path
) -> None:
    data, hub = tmp_path / "pictures.zip", tmp_path / "hub"
    data.write_bytes(stand_in_pictures(21))
    for repository in IMAGE_FAMILIES[ImageModelType.FLUX].companions:
        (hub / f"models--{repository.replace('/', '--')}").mkdir(parents=True)
    output = tmp_path / "out"
    more = [
        "--model",
        str(little_flux),
        "--hub-cache",
        str(hub),
        "--data",
        str(data),
        "--keep",
        "--hours",
        "0.03",
    ]
    code, report, said = rehearse(dockerd, entry, output, "flux", arguments=IMAGE_BASE, more=more)
    assert code == 0, f"{report}\n{said[-3000:]}\n{logs(output)}"
    (task,) = report["tasks"]
    assert [attempt["exit_code"] for attempt in task["attempts"]] == [0]
    assert task["upload"]["files"] == ["checkpoints/README.md", "checkpoints/last.safetensors"]
    assert task["log"]["findings"] == []
    # Nothing of the family is missing in the cache, and all pictures but those of the test are trained on.
    assert not [text for text in task["deviations"] if "the cache has no" in text]
    (zipped,) = (output / "flux/cache/datasets").iterdir()
    assert sum(name.endswith(".png") for name in zipfile.ZipFile(zipped).namelist()) == 18
    assert task["score"]["metric"] == "flow error"
    assert task["score"]["beats_base"]
    assert "on 3 pictures" in task["score"]["notes"][0]


@pytest.mark.thorough
@pytest.mark.usefixtures("shells")
def test_an_environment_task_passes_from_clone_to_score(
    dockerd: Dockerd, entry: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    arguments = {**TEXT_BASE, "BASE_IMAGE": SHELL_BASE}
    code, report, said = rehearse(
        dockerd, entry, output, "environment", arguments=arguments, more=["--hours", "0.05"]
    )
    assert code == 0, f"{report}\n{said[-3000:]}\n{logs(output)}"
    (task,) = report["tasks"]
    assert [attempt["exit_code"] for attempt in task["attempts"]] == [0]
    assert task["log"]["findings"] == []
    notes = "\n".join(task["score"]["notes"])
    assert "othello against base: " in notes
    assert "intercode, ours: reward " in notes
    assert "not everything was played" not in notes
    assert task["score"]["metric"].endswith("othello, intercode")
    console = (output / "environment/console-1.log").read_text("utf-8")
    assert all(re.search(rf"{name}: [1-9][0-9,]* rows of", console) for name in ("intercode", "othello"))


@pytest.mark.thorough
def test_every_other_kind_of_text_passes(dockerd: Dockerd, entry: Path, tmp_path: Path) -> None:
    kinds = [task.name for task in TASKS.values() if task.tournament == "text" and task.name != "instruct"]
    output = tmp_path / "out"
    code, report, said = rehearse(dockerd, entry, output, *kinds)
    assert code == 0, f"{report}\n{said[-3000:]}\n{logs(output)}"
    assert [task["task"] for task in report["tasks"] if task["passed"]] == kinds
