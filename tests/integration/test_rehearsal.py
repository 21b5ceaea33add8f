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

from miner.tournament.rehearsal.inputs import stand_in_pictures
from miner.tournament.rules import TASKS
from tests.doubles import ai_toolkit, base_image
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
IMAGE_BASE = {"BASE_IMAGE": "engine-base:1", "UV_IMAGE": "uv:1", **OFFLINE}
SHELL_BASE = "shell-base:1"
#: What shell tasks are done with, beside what the base has.
COMMANDS = (
    *("bash", "find", "grep", "sed", "sort", "wc", "mawk", "awk", "cut", "head", "tail", "uniq"),
    *("tr", "cp", "mv", "touch", "md5sum", "sha1sum", "cksum", "du", "tar", "gzip", "xargs"),
    *("basename", "dirname", "ln", "od", "date", "diff", "tee", "mktemp", "readlink", "rmdir"),
    *("echo", "printf", "test", "expr", "seq", "nl", "paste", "rev"),
)
#: What validators put into the cache for this family.
ADAPTER = "zimage_turbo_training_adapter_v2.safetensors"
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
def toolkit(dockerd: Dockerd, training: Path) -> None:
    """A base with an engine for images, on the one for texts."""
    files = {f"ai-toolkit/{name}": text for name, text in ai_toolkit.FILES.items()}
    build_base(dockerd, IMAGE_BASE["BASE_IMAGE"], f"FROM {BASE}\nCOPY ai-toolkit /app/ai-toolkit\n", files)
    uv = UV.replace("{python}", str(training))
    build_base(dockerd, IMAGE_BASE["UV_IMAGE"], f"FROM {BASE}\nCOPY uv /uv\nRUN chmod 755 /uv\n", {"uv": uv})


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
    assert json.loads((output / "report.json").read_text("utf-8")) == report
    with dockerd.client() as client:
        assert client.api.containers(all=True) == []
        assert not [tag for one in client.api.images() for tag in one["RepoTags"] or [] if "rehears" in tag]


@pytest.mark.usefixtures("toolkit")
def test_an_image_task_passes_up_to_what_evaluators_load(
    dockerd: Dockerd, entry: Path, tmp_path: Path
) -> None:
    model, hub, data = tmp_path / "model", tmp_path / "hub", tmp_path / "pictures.zip"
    for folder, name in ((model, "weights.safetensors"), (hub, ADAPTER)):
        folder.mkdir()
        (folder / name).write_bytes(b"weights")
    data.write_bytes(stand_in_pictures(21))
    output = tmp_path / "out"
    more = ["--model", str(model), "--hub-cache", str(hub), "--data", str(data), "--keep"]
    code, report, said = rehearse(dockerd, entry, output, "z-image", arguments=IMAGE_BASE, more=more)
    assert code == 0, f"{report}\n{said[-3000:]}\n{logs(output)}"
    (task,) = report["tasks"]
    assert [attempt["exit_code"] for attempt in task["attempts"]] == [0]
    assert task["upload"]["files"] == ["checkpoints/README.md", "checkpoints/last.safetensors"]
    assert task["log"]["findings"] == []
    # Nothing of the family is missing in the cache, and all pictures but those of the test are trained on.
    assert not [text for text in task["deviations"] if "the cache has no" in text]
    (zipped,) = (output / "z-image/cache/datasets").iterdir()
    assert sum(name.endswith(".png") for name in zipfile.ZipFile(zipped).namelist()) == 18
    assert len(list((output / "z-image/test-pictures").glob("*.png"))) == 3
    # Built without the evaluator's stack.
    assert task["score"] is None
    assert "the image has no scorer of ours: it is only checked what evaluators load" in task["deviations"]


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
