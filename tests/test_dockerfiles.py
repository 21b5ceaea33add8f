"""The training's dockerfiles: what validators demand of them, read from their text.

All are also built and started, on stand-in bases: `test_images.py` and `test_rehearsal.py` in
`tests/integration`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from miner.backends.docker.images import IMAGE_KINDS

ROOT = Path(__file__).parents[1]
TRAINERS = {kind.short: ROOT / "dockerfiles" / kind.dockerfile for kind in IMAGE_KINDS.values()}
MODULES = {"text": "trainer.text", "image": "trainer.image", "toolkit": "trainer.image"}


@pytest.fixture(params=sorted(TRAINERS))
def short(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def text(short: str) -> str:
    return TRAINERS[short].read_text("utf-8")


def test_the_entry_point_takes_the_tasks_arguments_directly(short: str, text: str) -> None:
    assert re.search(rf'^ENTRYPOINT \["python", "-m", "{MODULES[short]}"\]$', text, re.MULTILINE)
    assert not re.search(r"^CMD", text, re.MULTILINE)


def test_the_base_can_be_replaced_and_its_default_never_changes_under_us(text: str) -> None:
    assert re.search(r"^ARG BASE_IMAGE=\S+@sha256:[0-9a-f]{64}$", text, re.MULTILINE)
    assert re.search(r"^FROM \$\{BASE_IMAGE\}$", text, re.MULTILINE)


def test_what_is_copied_exists_and_reaches_the_build(text: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    copied = re.findall(r"^COPY (?!--from)(\S+) \S+$", text, re.MULTILINE)
    assert {"configs", "core", "trainer"} <= set(copied)
    for name in copied:
        assert (ROOT / name).exists()
        assert name not in ignored


def test_the_daemon_and_the_tests_stay_outside(text: str) -> None:
    assert not re.search(r"^COPY .*\b(miner|tests)\b /", text, re.MULTILINE)


def test_stopping_is_a_request_that_the_trainer_hears(text: str) -> None:
    assert "STOPSIGNAL SIGTERM" in text
    assert not re.search(r"^ENTRYPOINT .*\bsh\b", text, re.MULTILINE)


@pytest.mark.process
@pytest.mark.skipif(shutil.which("sh") is None, reason="no shell")
def test_every_command_of_a_build_is_a_command(text: str) -> None:
    lines = re.sub(r"\\\n\s*#[^\n]*", r"\\", text)
    for command in re.findall(r"^RUN ((?:.*\\\n)*.*)$", lines, re.MULTILINE):
        checked = subprocess.run(["sh", "-n", "-c", command], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, f"{command}\n{checked.stderr}"


def test_the_build_context_is_small() -> None:
    """It is sent whole, and a validator's build has half an hour for everything."""
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {"tests", "docs", "benchmarks", ".git"} <= set(ignored)
    sent = [path for name in ("configs", "core", "trainer", "miner") for path in (ROOT / name).rglob("*")]
    assert sum(path.stat().st_size for path in sent if "__pycache__" not in path.parts) < 20_000_000


@pytest.mark.process
def test_the_text_image_has_what_validators_rewards_import_and_is_built_without_them_too() -> None:
    text = TRAINERS["text"].read_text("utf-8")
    [packages] = re.findall(r'^ARG REWARD_PACKAGES="(.*)"$', text, re.MULTILINE)
    assert {"textstat", "langcheck", "detoxify"} <= set(packages.split())
    [command] = re.findall(r"^RUN ((?:.*\\\n)*?.*REWARD_PACKAGES(?:.*\\\n)*.*)$", text, re.MULTILINE)
    python = "python() { case $2 in pip) [ $3 = list ];; *) return 1;; esac; }"
    limited = 'timeout() { shift; "$@"; }; rm() { :; }'
    script = f"{python}\n{limited}\nREWARD_PACKAGES='{packages}'\n" + command.replace(
        "/tmp/kept.txt", "/dev/null"
    )
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split().count("installed") == 3
