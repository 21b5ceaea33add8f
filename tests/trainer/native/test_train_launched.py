"""A task through the trainer's own door, on the native engine: rows, plan, training, submission."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from core.domain.choices import CompileMode, Engine
from core.domain.tasks import TaskType
from core.planning.plan import PrecisionPlan
from core.runs.run_files import RunEnd, RunResult, RunSpec
from tests.trainer.forks import ForkServer
from tests.trainer.native import tiny
from tests.trainer.tasks import task
from trainer.native.train import hang_seconds
from trainer.runner.processes import StopRequest
from trainer.runner.text_runner import TextRunner

pytestmark = pytest.mark.small


#: For what takes half a minute on an idle machine.
PATIENCE = 800


def start(run: RunSpec, profile: Path) -> subprocess.Popen[str]:
    path = profile.with_name("run.json")
    path.write_text(run.to_json())
    return subprocess.Popen(
        [sys.executable, "-m", "trainer.text", "--run", str(path)],
        env={**os.environ, "GOD_MINER_PROFILE": str(profile), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "native-demo.yaml"
    path.write_text(
        "extends: cpu-demo\ntargets:\n  engine: native\n  max_steps: 30\n  learning_rate: 5e-3\n"
        "limits:\n  max_gpus: 1\n"
    )
    return path


@pytest.mark.parametrize("task_type", [TaskType.INSTRUCT, TaskType.DPO])
def test_a_task_ends_with_a_better_model_than_it_began_with(
    forks: ForkServer, tmp_path: Path, profile: Path, monkeypatch: pytest.MonkeyPatch, task_type: TaskType
) -> None:
    monkeypatch.setenv("GOD_MINER_PROFILE", str(profile))
    run = task(tmp_path, task_type, 1200)
    stop = StopRequest(Path(run.stop_path))
    result = TextRunner(run, stop, retries=False, start=forks.start).execute()
    assert result.end in (RunEnd.FINISHED, RunEnd.EARLY), result.detail
    assert result.best is not None
    assert result.base is not None
    assert result.best.value < result.base.value
    if task_type.has_pairs:
        assert result.base.value == pytest.approx(0.6931, abs=1e-3)
    from peft import PeftModel

    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "model"), tmp_path / "submission"
    )
    assert torch.isfinite(model(torch.arange(8)[None]).logits).all()
    plan = json.loads(next((tmp_path / "work").glob("launch-*/plan.json")).read_text())
    assert plan["engine"] == Engine.NATIVE


def test_asked_to_stop_it_submits_what_it_has_and_ends_well(tmp_path: Path, profile: Path) -> None:
    endless = profile.read_text().replace("max_steps: 30", "max_steps: null\n  num_epochs: 1000")
    profile.write_text(f"{endless}  max_steps: null\n  max_epochs: 1000\n  reserve: 1s\n  reserve_share: 0\n")
    process = start(task(tmp_path, TaskType.INSTRUCT, 1200), profile)
    deadline = time.monotonic() + PATIENCE
    while not (tmp_path / "submission").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said
    result = RunResult.model_validate_json((tmp_path / "result.json").read_bytes())
    assert (result.end, result.submission) == (RunEnd.STOPPED, True), said


def test_patience_is_ten_minutes_and_more_where_the_plan_forecasts_long_pauses_or_compiles() -> None:
    plan = tiny.plan()
    assert hang_seconds(plan) == 600
    assert hang_seconds(tiny.plan(engine_config={"hang_seconds": 700})) == 700
    slow = plan.time.model_copy(update={"step_s": 100.0})
    assert hang_seconds(plan.model_copy(update={"time": slow})) == 1000
    compiles = tiny.plan(precision=PrecisionPlan(compile_mode=CompileMode.MAX_AUTOTUNE))
    assert 900 < hang_seconds(compiles) < 1200
