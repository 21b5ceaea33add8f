"""Text runs through real Axolotl, each in a few seconds: what is learned, when it ends, what goes wrong."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from core.choices import Method
from core.progress import Event, events_in
from core.run_files import RunEnd, RunResult, RunSpec
from core.tasks import TaskType
from tests.trainer import tiny
from tests.trainer.forks import ForkServer
from tests.trainer.tasks import ENDLESS, planned, task, write_profile
from trainer.callbacks.submission import kind_of
from trainer.inputs.text import PreparedText
from trainer.scoring.held_out import HeldOut
from trainer.sheet import Sheet
from trainer.wrapper.course import TextCourse
from trainer.wrapper.signals import StopRequest

SUPERVISED = (TaskType.INSTRUCT, TaskType.CHAT)


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return write_profile(tmp_path / "profile.yaml")


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    return write_profile(tmp_path / "endless.yaml", **ENDLESS)


def follow(run: RunSpec, forks: ForkServer, *, retries: bool = False, patch: str | None = None) -> RunResult:
    start = functools.partial(forks.start, patch=patch)
    return TextCourse(run, StopRequest(Path(run.stop_path)), retries=retries, start=start).follow()


def events(run: RunSpec) -> list[Event]:
    data = Path(run.progress_path).read_bytes()
    return [line.event for line in events_in(data) if line.event is not None]


def sheet_of(run: RunSpec, launch: int = 1) -> Sheet:
    return Sheet.model_validate_json((Path(run.work_dir) / f"launch-{launch}" / "sheet.json").read_bytes())


def submitted_model(run: RunSpec) -> Any:
    """As anybody loads it, with plain transformers and peft."""
    if kind_of(Path(run.submission_dir)) == "adapter":
        base = AutoModelForCausalLM.from_pretrained(run.model_path)
        return PeftModel.from_pretrained(base, run.submission_dir).eval()
    return AutoModelForCausalLM.from_pretrained(run.submission_dir).eval()


def rescored(run: RunSpec) -> tuple[float, float]:
    """Base and submission, scored anew on the held-out rows by the validator's metric."""
    prepared = sheet_of(run).prepared
    assert prepared.eval_path is not None
    files = PreparedText(
        Path(prepared.train_path),
        Path(prepared.eval_path),
        prepared.train_rows,
        prepared.eval_rows,
        {},
        prepared.digest,
        Path(prepared.rewards_dir) if prepared.rewards_dir else None,
    )
    held = HeldOut.open(run, files, tiny.tokenizer(adds_begin=True))
    base = AutoModelForCausalLM.from_pretrained(run.model_path).eval()
    return held.remember_base(base).value, held.score(submitted_model(run), reference=base).value


@pytest.mark.parametrize("method", [Method.LORA, Method.FULL])
@pytest.mark.parametrize("task_type", [TaskType.INSTRUCT, TaskType.CHAT, TaskType.DPO])
def test_what_is_submitted_loads_anywhere_and_is_better_than_the_base_on_held_out_rows(
    forks: ForkServer, profile: Path, tmp_path: Path, task_type: TaskType, method: Method
) -> None:
    run = planned(task(tmp_path, task_type), profile, method=method)
    result = follow(run, forks)
    assert (result.end, result.submission, result.steps) == (RunEnd.FINISHED, True, 20), result.detail
    assert result.best is not None
    assert result.base is not None
    base, ours = rescored(run)
    assert base == pytest.approx(result.base.value, abs=1e-3)
    assert ours == pytest.approx(result.best.value, abs=1e-3)
    assert ours < base
    assert kind_of(Path(run.submission_dir)) == ("adapter" if method is Method.LORA else "full")


@pytest.mark.parametrize("method", [Method.LORA, Method.FULL])
def test_a_task_with_rewards_raises_them(forks: ForkServer, tmp_path: Path, method: Method) -> None:
    faster = {"learning_rate": 5e-3, "max_steps": 40, "val_rows_max": 8, "grpo_generations": 4}
    profile = write_profile(
        tmp_path / "grpo.yaml", targets=faster, sections={"grpo": {"targets": {"grpo_generations": 4}}}
    )
    run = planned(task(tmp_path, TaskType.GRPO, rows=100), profile, method=method)
    result = follow(run, forks)
    assert result.end is RunEnd.FINISHED, result.detail
    assert result.best is not None
    assert not result.best.lower_is_better
    assert result.best.value > 0  # gains over the base's rewards, less KL
    assert submitted_model(run) is not None
