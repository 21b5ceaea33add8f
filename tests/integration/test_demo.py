"""The README's demo: one real job, from the offer to the published model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miner.dev import demo
from miner.dev.demo import run_demo
from miner.settings import BackendKind
from miner.store.attempts import attempts_of, figures_of
from miner.store.database import open_store
from tests.doubles.slurm import OwnSlurm

pytestmark = [pytest.mark.training, pytest.mark.small]


@pytest.mark.kept("process")
@pytest.mark.parametrize("backend", [BackendKind.PROCESS, BackendKind.SLURM])
def test_a_little_model_is_trained_published_and_reported(
    backend: BackendKind,
    training_python: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if backend is BackendKind.SLURM:
        slurm: OwnSlurm = request.getfixturevalue("slurm")
        monkeypatch.setenv("SLURM_BIN_DIR", str(slurm.bin))
    monkeypatch.setenv("TRAINER_PYTHON", training_python)
    # Importing the stack on a busy machine takes minutes; below what `tests.doubles.watch` gives a test.
    monkeypatch.setattr(demo, "PATIENCE_S", 800.0)
    lines: list[tuple[str, str]] = []
    result = run_demo(tmp_path, lambda step, line: lines.append((step, line)), backend)
    assert result.trouble is None, (tmp_path / "daemon.log").read_text()[-3000:]
    assert result.held
    assert result.base is not None
    assert result.best is not None
    assert result.best < result.base - 0.5
    assert result.states[-1] == "done"
    order = list(dict.fromkeys(step for step, _ in lines))
    assert order == ["daemon", "backend", "offer", "start", "fetch", "plan", "train", "publish", "submission"]
    losses = [line for step, line in lines if step == "train" and "loss" in line]
    assert len(losses) >= 2
    assert str(result.submission) in lines[-1][1]
    with open_store(tmp_path / "data") as connection:
        (attempt,) = attempts_of(connection, 1)
        assert attempt.backend == backend
        (stored,) = figures_of(connection, 1).values()
    steps, figures = json.loads(stored.curves)["steps"], json.loads(stored.figures)
    assert steps["step"] == list(range(1, figures["steps"] + 1))
    for curve in ("loss", "lr", "grad_norm", "tokens_s", "samples_s", "wait"):
        assert None not in steps[curve], curve
    assert figures["gain"] == pytest.approx((result.base - result.best) / result.base)
    assert figures["tokens_s"] > 0
    assert "efficiency" not in figures  # a plan for a CPU is no measure of its speed
