"""What a profile may ask for beyond the ordinary, through real Axolotl: each is seen to do something."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from core.domain.choices import Method
from core.domain.evaluation import Era
from core.domain.tasks import TaskType
from core.runs.progress import NoteEvent, StepEvent
from core.runs.run_files import RunEnd, RunSpec
from tests.trainer.forks import ForkServer
from tests.trainer.runner.test_text_runner import events, execute, gone_on, rates, rescored, stopped
from tests.trainer.tasks import planned, task, write_profile
from trainer.axolotl.host import AVERAGE_FILE, STATE_FILE


def shaped(tmp_path: Path, **targets: Any) -> Path:
    return write_profile(tmp_path / "shaped.yaml", targets=targets)


@pytest.mark.thorough_rows("full")
@pytest.mark.parametrize("method", [Method.LORA, Method.FULL])
def test_with_the_kl_term_the_model_stays_nearer_to_the_base_and_is_scored_by_it(
    forks: ForkServer, tmp_path: Path, method: Method
) -> None:
    """The untouched base has no KL, so the first score is the loss alone, and it is beaten all the same."""
    profile = shaped(tmp_path, learning_rate=3e-3)
    ends = {}
    for coefficient in (None, 2.0):
        changes = {"era": Era.TOURNAMENTS, "kl_coefficient": coefficient}
        run = task(tmp_path / f"{coefficient}", TaskType.INSTRUCT, **changes)
        run = planned(run, profile, method=method)
        result = execute(run, forks, patch="judged_every:10")
        assert result.end is RunEnd.FINISHED, result.detail
        assert result.best is not None
        base, ours = rescored(run)
        assert ours == pytest.approx(result.best.value, abs=2e-3)
        assert ours < base
        ends[coefficient] = kl_to_base(run)
    assert ends[2.0] < ends[None]


def kl_to_base(run: RunSpec) -> float:
    """Of what was submitted, on the held-out rows."""
    with_it, without = (
        rescored(run.model_copy(update={"kl_coefficient": coefficient}))[1] for coefficient in (1.0, None)
    )
    return with_it - without


def test_the_averaged_weights_are_scored_submitted_and_resumed_after_a_stop(
    forks: ForkServer, tmp_path: Path
) -> None:
    profile = shaped(tmp_path, ema_decay=0.9, learning_rate=3e-3, max_steps=30, eval_steps=5)
    first = planned(task(tmp_path / "first", TaskType.INSTRUCT), profile)
    checkpoint, steps = stopped(first, forks)
    state = json.loads((checkpoint / STATE_FILE).read_text("utf-8"))
    assert state["average_updates"] == steps
    # What goes on training are the weights themselves; the average lies beside them and is another one.
    average = load_file(checkpoint / AVERAGE_FILE)
    weights = load_file(checkpoint / "adapter_model.safetensors")
    for name, mean in average.items():
        own = weights[name.replace(".default.", ".")]
        assert not torch.equal(mean, own)
        assert (mean - own).norm() < own.norm()

    again = gone_on(first, tmp_path / "second", checkpoint)
    result = execute(again, forks)
    assert (result.end, result.steps) == (RunEnd.FINISHED, 30), result.detail
    assert result.best is not None
    base, ours = rescored(again)
    assert ours == pytest.approx(result.best.value, abs=1e-3)
    assert ours < base


def test_stages_shape_the_rate(forks: ForkServer, tmp_path: Path) -> None:
    stages = [{"share": 0.5, "factor": 1.0}, {"share": 0.3, "factor": 0.5}, {"share": 0.2, "factor": 0.25}]
    said = {"lr_scheduler": "constant", "warmup_steps": 0, "lr_stages": stages, "eval_steps": 20}
    run = planned(task(tmp_path / "stages", TaskType.INSTRUCT), shaped(tmp_path, **said))
    assert execute(run, forks).end is RunEnd.FINISHED
    assert rates(run) == pytest.approx([1e-3] * 10 + [5e-4] * 6 + [2.5e-4] * 4)


def test_a_plateau_lowers_the_rate_and_patience_ends_the_run(forks: ForkServer, tmp_path: Path) -> None:
    said: dict[str, Any] = {
        "warmup_steps": 0,
        "lr_scheduler": "constant",
        "max_steps": 50,
        "eval_steps": 2,
        "plateau_factor": 0.5,
        "plateau_patience": 1,
        "early_stopping_patience": 2,
    }
    run = planned(task(tmp_path, TaskType.INSTRUCT), shaped(tmp_path, **said))
    result = execute(run, forks, patch="worse_every_time judged_every:2")
    assert result.end is RunEnd.EARLY, result.detail
    assert "no better score in 2 evaluations" in result.detail
    assert result.steps < 50
    notes = [event.text for event in events(run) if isinstance(event, NoteEvent)]
    assert any("learning rate × 0.5 (was × 1)" in note for note in notes), notes
    assert rates(run)[-1] == pytest.approx(1e-3 / 2)


def losses(run: RunSpec) -> list[float | None]:
    return [event.loss for event in events(run) if isinstance(event, StepEvent)]


@pytest.mark.thorough_rows("GrpoTask")
@pytest.mark.parametrize("task_type", [TaskType.INSTRUCT, TaskType.GRPO])
def test_rates_are_tried_out_without_a_trace(forks: ForkServer, tmp_path: Path, task_type: TaskType) -> None:
    """Only the planned rate is tried, so what follows is the training that would have been: every loss is the
    same to the last digit, of sampled completions too."""
    trained = {}
    for share in (0.0, 0.05):
        said = {"lr_search_share": share, "lr_search_most": 1, "max_steps": 4, "lora_dropout": 0.1}
        run = planned(task(tmp_path / f"{share}", task_type, 1000), shaped(tmp_path, **said))
        result = execute(run, forks, patch="searches_in_few_steps:8")
        assert (result.end, result.steps) == (RunEnd.FINISHED, 4), result.detail
        trained[share] = losses(run), rates(run)
    notes = [event.text for event in events(run) if isinstance(event, NoteEvent)]
    assert notes[-1].endswith("is trained with"), notes
    assert trained[0.0] == trained[0.05]


@pytest.mark.thorough
def test_preferences_are_trained_at_a_rate_that_was_found(forks: ForkServer, tmp_path: Path) -> None:
    said = {"lr_search_share": 0.06, "learning_rate": 1e-5, "max_steps": 12, "warmup_steps": 0}
    run = planned(task(tmp_path, TaskType.DPO, 1800), shaped(tmp_path, **said))
    result = execute(run, forks, patch="searches_in_few_steps:30")
    assert result.end is RunEnd.FINISHED, result.detail
    assert max(rates(run)) > 2e-5
    assert result.best is not None
    assert result.base is not None
    assert result.best.beats(result.base)
    # Another launch of the same run finds it beside the submission.
    (tmp_path / "again").mkdir()
    again = planned(run.model_copy(update={"work_dir": str(tmp_path / "again")}), shaped(tmp_path, **said))
    assert execute(again, forks).end is RunEnd.FINISHED
    last = [event.text for event in events(again) if isinstance(event, NoteEvent)][-1]
    assert "as was found before" in last
