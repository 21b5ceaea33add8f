"""The README's demo: one real job, from the offer to the published model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from miner.dev import demo_job
from miner.dev.demo_job import run_job
from tests.doubles.required import missing

PYTHON = os.environ.get("GOD_MINER_TRAINING_PYTHON")
pytestmark = pytest.mark.integration


def test_a_little_model_is_trained_published_and_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not PYTHON:
        missing("GOD_MINER_TRAINING_PYTHON is not set: run make training")
    monkeypatch.setenv("TRAINER_PYTHON", str(PYTHON))
    # Importing the stack on a busy machine takes minutes; below what `tests.doubles.watch` gives a test.
    monkeypatch.setattr(demo_job, "PATIENCE_S", 800.0)
    seen: list[dict[str, Any]] = []
    result = run_job(tmp_path, seen.append)
    assert result.trouble is None, (tmp_path / "daemon.log").read_text()[-3000:]
    assert result.skipped is None
    assert result.held
    assert result.base is not None
    assert result.best is not None
    assert result.best < result.base - 0.5
    assert result.states[-1] == "done"
    assert seen[-1]["submission"]["repo"] == result.submission


def test_without_a_training_environment_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_PYTHON", str(tmp_path / "no-python"))
    result = run_job(tmp_path)
    assert result.held
    assert result.skipped is not None
    assert "does not work" in result.skipped
