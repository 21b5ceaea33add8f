"""A run made ready for a launcher that is not ours, on plain text, and concluded after it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from core.domain.choices import Parallelism
from core.domain.hardware import parse_gpus
from core.domain.tasks import TaskType
from core.planning.plan import FsdpPlan, TrainingPlan
from core.runs.progress import EvalEvent, StepEvent, parse_events
from core.runs.run_files import RunEnd, RunResult, RunSpec, TrainerExitCode
from tests.trainer.tasks import task
from tests.trainer.tiny import WORDS
from trainer.handoff import LAUNCH_SPEC_VARIABLE, TrainingFailure, write_record
from trainer.native.external_launch import finish_run, main, prepare_launch
from trainer.runner.processes import free_port

pytestmark = pytest.mark.small


PROFILE = """
extends: cpu-demo
targets:
  {engine: native, method: full, sample_packing: true, sequence_len: 32, max_steps: 24, learning_rate: 5e-3}
limits: {max_gpus: 1}
engine_config: {native: {objective: tokens, tensorboard: true, batch_ramp: 0.25}}
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    (tmp_path / "profile.yaml").write_text(PROFILE)
    monkeypatch.setenv("GOD_MINER_PROFILE", str(tmp_path / "profile.yaml"))
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{a} {b} {a} {b}\n" for a in WORDS[:12] for b in WORDS[:12]) * 4)
    changes: dict[str, Any] = {"dataset": None, "data_path": str(text)}
    spec = task(tmp_path, TaskType.INSTRUCT, 1200, **changes)
    (tmp_path / "run.json").write_text(spec.to_json())
    return spec


def test_text_is_trained_on_by_a_bare_launcher_and_the_end_is_written_down(run: RunSpec) -> None:
    spec = prepare_launch(run)
    assert spec.plan.sequence.packing
    assert spec.prepared.eval_rows > 0
    done = subprocess.run(
        [sys.executable, "-m", "trainer.native"],
        env={**os.environ, LAUNCH_SPEC_VARIABLE: str(spec.write()), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    assert finish_run(run) == TrainerExitCode.OK
    result = RunResult.model_validate_json(Path(run.result_path).read_bytes())
    assert result.submission
    assert result.base is not None
    assert result.best is not None
    assert result.best.value < result.base.value
    events = [line.event for line in parse_events(Path(run.progress_path).read_bytes())]
    assert any(isinstance(event, EvalEvent) for event in events)
    assert any(isinstance(event, StepEvent) and event.tokens_s for event in events)
    assert list(Path(run.work_dir, "tensorboard").glob("events*"))
    # A job that was requeued: its text is not read again, and old words are not taken for new ones.
    built = Path(run.work_dir, "corpus/meta.json").stat().st_mtime_ns
    again = prepare_launch(run)
    assert Path(run.work_dir, "corpus/meta.json").stat().st_mtime_ns == built
    assert not again.outcome_path.exists()
    assert not Path(run.result_path).exists()


def as_two_ranks(plan: TrainingPlan) -> TrainingPlan:
    """Each has half of the model, in bf16 and without masters."""
    batch = plan.batch.model_copy(update={"world_size": 2})
    changes: dict[str, Any] = {
        "gpus": parse_gpus("2xcpu"),
        "parallelism": Parallelism.FSDP,
        "fsdp": FsdpPlan(),
        "batch": batch,
        "launch": plan.launch.model_copy(update={"processes": 2}),
        "precision": plan.precision.model_copy(update={"bf16": True}),
        "optimizer": plan.optimizer.model_copy(update={"fp32_master": False}),
    }
    return plan.model_copy(update=changes)


def test_two_ranks_that_share_a_model_train_it_to_a_submission(run: RunSpec) -> None:
    spec = prepare_launch(run)
    Path(spec.plan_path).write_text(as_two_ranks(spec.plan).to_json())
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    group |= {"MASTER_PORT": str(free_port()), LAUNCH_SPEC_VARIABLE: str(spec.write())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "trainer.native"],
            env={**os.environ, **group, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in "01"
    ]
    said = [rank.communicate(timeout=800)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert finish_run(run) == TrainerExitCode.OK
    result = RunResult.model_validate_json(Path(run.result_path).read_bytes())
    assert result.base is not None
    assert result.best is not None
    assert result.best.value < result.base.value


def test_what_ended_the_ranks_is_the_runs_end(run: RunSpec, tmp_path: Path) -> None:
    launch = Path(run.work_dir, "launch")
    launch.mkdir(parents=True)
    lost = TrainingFailure(end=RunEnd.CRASHED, detail="another process is gone", at=1.0, consequence=True)
    write_record(launch / "failure-0.json", lost)
    write_record(launch / "failure-1.json", TrainingFailure(end=RunEnd.NAN, detail="no number", at=2.0))
    assert finish_run(run) == TrainerExitCode.NAN


def test_rows_that_cannot_be_are_the_runs_end_and_exit_code(
    run: RunSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(run.data_path).write_text("  \n")
    assert main([str(tmp_path / "run.json")]) == TrainerExitCode.BAD_DATA
    said = capsys.readouterr()
    assert said.out == ""
    assert "holds no text" in said.err
    assert RunResult.model_validate_json(Path(run.result_path).read_bytes()).end is RunEnd.BAD_DATA


def test_plain_text_is_no_other_engines(
    run: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GOD_MINER_PROFILE", "cpu-demo")
    assert main([str(tmp_path / "run.json")]) == TrainerExitCode.BAD_DATA
    assert "the native trainer alone" in capsys.readouterr().err
