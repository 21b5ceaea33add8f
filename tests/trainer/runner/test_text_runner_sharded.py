"""Whole runs with the weights split over two processes: accelerate, Axolotl and FSDP2, on the CPU."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from core.domain.choices import Method
from core.domain.tasks import TaskType
from core.runs.progress import EvalEvent, StepEvent
from core.runs.run_files import RunEnd, RunResult, RunSpec
from tests.trainer.runner.test_text_runner import events, held_out, submitted_model
from tests.trainer.runner.test_text_runner_launches import (
    PATIENCE,
    log_of,
    result_of,
    started,
    until_submitted,
)
from tests.trainer.sharding import VARIABLES, sharded
from tests.trainer.tasks import ENDLESS, planned, task, write_profile
from trainer.axolotl.host import AVERAGE_FILE, STATE_FILE

pytestmark = pytest.mark.thorough


def really_sharded(run: RunSpec) -> bool:
    """Both processes say so."""
    return (Path(run.work_dir).parent / "log").read_text("utf-8", "replace").count("FSDP2 on the CPU") >= 2


def test_a_sharded_training_submits_its_average_stops_and_is_resumed(tmp_path: Path) -> None:
    targets = {**ENDLESS["targets"], "ema_decay": 0.9}
    profile = write_profile(tmp_path / "profile.yaml", **{**ENDLESS, "targets": targets})
    run = planned(task(tmp_path, TaskType.INSTRUCT, 900), profile, processes=2, method=Method.FULL)
    run = sharded(run)
    child = started(run, VARIABLES)
    until_submitted(run, child)
    child.terminate()
    assert child.wait(timeout=PATIENCE) == 0, log_of(run)
    assert really_sharded(run)
    first = result_of(run)
    assert (first.end, first.submission) == (RunEnd.STOPPED, True), log_of(run)
    assert first.best is not None
    assert first.base is not None
    assert first.best.value < first.base.value
    submitted_model(run)
    (checkpoint,) = (Path(run.work_dir) / "output").glob("checkpoint-*")
    assert checkpoint.name == f"checkpoint-{first.steps}"
    assert len(list(checkpoint.glob(f"{AVERAGE_FILE}.rank[01]"))) == 2
    assert json.loads((checkpoint / STATE_FILE).read_text("utf-8"))["average_updates"] == first.steps

    # Another attempt as the daemon makes one; the time is over soon after its first steps.
    Path(run.stop_path).unlink(missing_ok=True)
    seen, now = len(list(events(run))), time.time()
    again = {"began_at": now, "end_by": now + 880, "deadline_at": now + 900, "resume_from": str(checkpoint)}
    run = run.model_copy(update=again)
    child = started(run, VARIABLES)
    until = time.time() + PATIENCE
    while not (steps := _steps(run, seen)):
        assert child.poll() is None, log_of(run)
        assert time.time() < until, log_of(run)
        time.sleep(0.1)
    child.terminate()
    assert child.wait(timeout=PATIENCE) == 0, log_of(run)
    assert steps[0].step == first.steps + 1
    assert steps[0].loss is not None
    assert steps[0].loss < 0.97 * first.base.value  # with the weights that it had, not the base's
    last = result_of(run)
    assert (last.end, last.submission) == (RunEnd.STOPPED, True), log_of(run)
    assert last.best is not None
    assert last.best.value <= first.best.value


def _steps(run: RunSpec, seen: int) -> list[StepEvent]:
    return [event for event in list(events(run))[seen:] if isinstance(event, StepEvent)]


def test_a_sharded_grpo_training_is_scored_as_the_whole_model_is(tmp_path: Path) -> None:
    """With an adapter, in bf16, all weights gathered to generate, the base scored before the first step."""
    run = task(tmp_path, TaskType.GRPO, 900)
    profile = write_profile(
        tmp_path / "profile.yaml", targets={"max_steps": 8, "val_rows_max": 8, "grpo_prompt_kl": 0.5}
    )
    run = sharded(planned(run, profile, processes=2), whole=True)
    child = started(run, VARIABLES)
    assert child.wait(timeout=PATIENCE) == 0, log_of(run)
    assert really_sharded(run)
    result = RunResult.model_validate(json.loads(Path(run.result_path).read_text()))
    assert (result.end, result.steps, result.submission) == (RunEnd.FINISHED, 8, True), log_of(run)
    base_score, *scores = [event.score for event in events(run) if isinstance(event, EvalEvent)]
    assert base_score.value == 0
    assert result.best is not None
    assert result.best.value in {score.value for score in scores}
    assert result.best.rewarded is not None
    # What is sampled by one process comes from other numbers; its KL to the base does not.
    held = held_out(run)
    base = AutoModelForCausalLM.from_pretrained(run.model_path).eval()
    held.remember_base(base)
    again = held.rewarded(held.score(submitted_model(run), reference=base))
    assert again is not None
    assert again.kl == pytest.approx(result.best.rewarded.kl, abs=2e-3)  # in bf16
