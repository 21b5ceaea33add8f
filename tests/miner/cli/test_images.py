"""`god-miner images` against a real Docker Engine: build, pin, list, check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import docker
import pytest
from click.testing import Result
from typer.testing import CliRunner

from miner.backends.docker import images
from miner.cli.images import app
from tests.doubles import base_image
from tests.doubles.dockerd import Dockerd

pytestmark = [
    pytest.mark.docker,
    pytest.mark.usefixtures("unread_replies_collected"),
]

DOCKERFILE = f"""\
ARG BASE={base_image.NAME}
FROM ${{BASE}}
ARG SAYS=nothing
COPY core /usr/local/god-miner/core
COPY trainer /usr/local/god-miner/trainer
ENV PYTHONPATH=/usr/local/god-miner NVIDIA_VISIBLE_DEVICES=void
RUN echo said $SAYS
"""


@pytest.fixture
def checkout(tmp_path: Path, docker_host: Dockerd, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of the smallest kind."""
    root = tmp_path / "checkout"
    (root / "dockerfiles").mkdir(parents=True)
    (root / "dockerfiles" / "standalone-text-trainer.dockerfile").write_text(DOCKERFILE)
    for name in ("core", "trainer"):
        (root / name).mkdir()
        (root / name / "__init__.py").write_text("")
    (root / "trainer" / "runner").mkdir()
    (root / "trainer" / "runner" / "__init__.py").write_text("")
    (root / "trainer" / "runner" / "check_engines.py").write_text(base_image.READY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DOCKER_HOST", docker_host.host)
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("TRAINER_ULIMITS", "core=0")
    monkeypatch.setenv("TRAINER_TEXT_IMAGE", f"test/{tmp_path.name[-30:].lower().strip('_')}:1")
    return root


def said(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def reported(*words: str) -> Any:
    done = said(*words, "--json")
    return json.loads(done.stdout)


def test_an_image_is_built_pinned_and_usable(checkout: Path, docker_host: Dockerd) -> None:
    assert {one["state"] for one in reported("list")} == {"missing"}
    assert reported("check", "text")[0]["usable"] is False
    done = said("build", "text", "--context", str(checkout), "--build-arg", "SAYS=hello", "--network", "none")
    assert done.exit_code == 0, done.output
    assert "said hello" in done.stderr
    (found,) = (one for one in reported("list") if one["short"] == "text")
    assert found["id"] in done.stdout
    assert found["size_bytes"] > 1_000_000
    (checked,) = reported("check", "text")
    assert checked["usable"], checked["problem"]
    assert said("check", "text").exit_code == 0

    # Somebody gives the name to another image: the build still runs, and it is told.
    api = docker.APIClient(docker_host.host, version="auto")
    repository, _, tag = found["name"].partition(":")
    api.tag(base_image.NAME, repository, tag, force=True)
    api.close()
    (moved,) = (one for one in reported("list") if one["short"] == "text")
    assert (moved["state"], moved["id"]) == ("moved", found["id"])
    assert reported("check", "text")[0]["usable"]


def test_an_image_of_other_sources_is_reported(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "source_root", lambda: checkout)
    assert said("build", "text", "--context", str(checkout), "--network", "none").exit_code == 0
    assert reported("list")[0]["state"] == "ok"
    (checkout / "trainer" / "new.py").write_text("")
    assert reported("list")[0]["state"] == "stale"
    assert "→ god-miner images build text" in said("list").stdout


def test_an_image_from_elsewhere_runs_by_its_name_and_that_is_reported(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_TEXT_IMAGE", base_image.NAME)
    (found,) = (one for one in reported("list") if one["short"] == "text")
    assert found["state"] == "unpinned"
    (checked,) = reported("check", "text")
    assert checked["usable"], checked["problem"]


def test_an_image_that_cannot_train_is_reported(checkout: Path) -> None:
    (checkout / "trainer" / "runner" / "check_engines.py").unlink()
    assert said("build", "text", "--context", str(checkout), "--network", "none").exit_code == 0
    (checked,) = reported("check", "text")
    assert "trainer.runner.check_engines" in checked["problem"]
    assert said("check", "text").exit_code == 1


def test_only_images_that_the_policy_needs_decide_and_lists_can_be_narrowed(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_TEXT_IMAGE", base_image.NAME)
    assert said("check").exit_code == 1
    monkeypatch.setenv("TASK_TYPES", "instruct,dpo")
    done = said("check")
    assert done.exit_code == 0, done.output
    assert "no task for it" in done.stdout
    assert [one["short"] for one in reported("list", "text")] == ["text"]
    assert "no image 'other'" in str(said("list", "other").exception)


def test_earlier_builds_are_pruned_and_those_in_use_are_kept(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> str:
        assert said("build", "text", "--context", str(checkout), "--network", "none").exit_code == 0
        return str(reported("list", "text")[0]["id"])

    # Other tests share the Docker Engine: the same content would be the same image, under their names.
    (checkout / "core" / "first.py").write_text("")
    earlier = build()
    (checkout / "core" / "new.py").write_text("")
    present = build()
    assert earlier != present
    assert earlier in [one["id"] for one in reported("prune", "--dry-run")]
    assert earlier in [one["id"] for one in reported("prune")]
    assert earlier not in [one["id"] for one in reported("prune")]
    assert reported("list", "text")[0]["id"] == present
    assert reported("check", "text")[0]["usable"]

    # Another data directory of the same Docker builds under the same name: both are in use.
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "other"))
    (checkout / "core" / "newer.py").write_text("")
    newest = build()
    reported("prune")
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "data"))
    assert reported("list", "text")[0]["id"] == present
    assert reported("check", "text")[0]["usable"]
    assert newest not in [one["id"] for one in reported("prune")]


def test_a_failing_build_is_an_error_and_pins_nothing(checkout: Path, tmp_path: Path) -> None:
    (checkout / "dockerfiles" / "standalone-text-trainer.dockerfile").write_text(DOCKERFILE + "RUN exit 9\n")
    done = said("build", "text", "--context", str(checkout), "--network", "none")
    assert done.exit_code == 1
    assert "could not be built" in str(done.exception)
    assert not (tmp_path / "data" / "images.json").exists()


def test_names_that_are_none_are_reported(checkout: Path) -> None:
    assert "text, image, toolkit" in str(said("build", "other", "--context", str(checkout)).exception)
    assert said("build", "text", "--build-arg", "nothing").exit_code == 2
