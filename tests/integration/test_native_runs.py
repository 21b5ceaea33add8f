"""Trainings of the operator's own, with the commands of docs/native.md and the real native trainer."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from core.planning.plan import TrainingPlan
from core.runs.run_files import RunEnd, RunResult
from core.submission.digests import check_weights
from miner.__main__ import app
from miner.dev import demo_inputs

pytestmark = pytest.mark.training

PAGE = Path(__file__).parents[2] / "docs/native.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, training_python: str) -> Path:
    """A directory with the inputs of the page's commands: MODEL, and some text."""
    monkeypatch.setenv("TRAINER_PYTHON", training_python)
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "MODEL").mkdir()
    for name, content in demo_inputs.model_files().items():
        (tmp_path / "MODEL" / name).write_bytes(content)
    (tmp_path / "text").mkdir()
    rows = json.loads(demo_inputs.training_rows())
    for at in range(0, len(rows), 10):
        lines = [f"{row['instruct']}{row['output']}\n" for row in rows[at : at + 10]]
        (tmp_path / f"text/{at}.txt").write_text("".join(lines))
    return tmp_path


def run(words: str, *more: str) -> str:
    """Run a command of the page."""
    assert f"god-miner {words}" in PAGE.read_text()
    done = CliRunner().invoke(app, [*shlex.split(words), *more])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.thorough_rows("text")
@pytest.mark.parametrize("data", ["text/", "TOKENS"])
def test_a_pretraining_from_text_or_tokens_ends_with_a_better_model(folder: Path, data: str) -> None:
    words = f"train native RUN --mode pretrain --model MODEL --data {data}"
    if data == "TOKENS":
        run("train tokens text/ TOKENS --tokenizer MODEL")
    small = ("max_steps=6", "learning_rate=2e-3", "micro_batch_size=8", "effective_batch_size=8")
    run(words, "--hours", "0.5", *(word for target in small for word in ("--set", target)))
    result = RunResult.model_validate_json((folder / "RUN/result.json").read_bytes())
    assert (result.end, result.submission) == (RunEnd.FINISHED, True), result.detail
    assert result.base is not None
    assert result.best is not None
    assert result.best.value < result.base.value - 0.3
    check_weights(folder / "RUN/model/model.safetensors")

    # The training held out what the plan says.
    work = folder / "RUN/work"
    planned, trained = (
        TrainingPlan.from_json((work / part / "plan.json").read_bytes()) for part in ("data-1", "launch-1")
    )
    assert trained.steps == planned.steps
    assert trained.steps.eval_rows > 0
    assert json.loads((work / "launch-1/launch.json").read_text())["prepared"]["eval_rows"] > 0

    # The log reports events in whole lines.
    log = (folder / "RUN/log").read_text()
    assert "\r" not in log
    assert not re.search(r"\d+%\|", log)
    assert re.search(r"^step 6/6  loss \d\.\d{4}  lr \S+  [\d,]+ tokens/s", log, re.MULTILINE)
    assert f"step {result.best.step}: eval_loss {result.best.value:.4f}, the best so far\n" in log
