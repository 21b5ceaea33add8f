"""An image engine seen from outside: what it leaves is taken when it is whole, and that never ends it."""

# Once: it needs nothing of the training stack.

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any

import pytest

from core.plan import TrainingPlan
from core.progress import NoteEvent
from core.run_files import RunSpec
from core.tasks import ImageModelType
from tests.trainer.callbacks.simulated import safetensors
from tests.trainer.wrapper.test_image_course import events, image_run, planned
from trainer.callbacks.report import Report
from trainer.wrapper import image_watch as module
from trainer.wrapper.image_watch import ImageWatch


@pytest.fixture
def run(tmp_path: Path) -> RunSpec:
    return planned(image_run(tmp_path, ImageModelType.SDXL))


@pytest.fixture
def watch(run: RunSpec, tmp_path: Path) -> ImageWatch:
    (tmp_path / "output").mkdir()
    plan = TrainingPlan.from_json(Path(run.plan_path or "").read_bytes())
    found = ImageWatch(run, plan, tmp_path / "output", run.end_by, Report(Path(run.progress_path)))
    found.submission.prepare()
    return found


def left(watch: ImageWatch, name: str) -> None:
    (watch.output / name).write_bytes(safetensors())


def said(run: RunSpec) -> list[str]:
    return [one.text for one in events(run) if isinstance(one, NoteEvent) and one.kind == "submission"]


def test_a_full_disk_ends_no_training_is_told_once_and_is_tried_again(
    run: RunSpec, watch: ImageWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    left(watch, "last-000005.safetensors")
    monkeypatch.setattr(module, "placing", lambda *_: full)
    watch.place()
    watch.place()
    assert len(said(run)) == 1
    assert "No space left" in said(run)[0]
    assert watch.problem is not None
    monkeypatch.undo()
    watch.place()
    assert watch.problem is None
    assert watch.submission.exists


def test_a_file_that_the_engine_removes_meanwhile_is_passed_over(
    run: RunSpec, watch: ImageWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "newest_whole", lambda output: output / "last-000001.safetensors")
    watch.place()
    assert not watch.submission.exists
    monkeypatch.undo()
    left(watch, "last-000002.safetensors")
    watch.place()
    assert watch.submission.exists


def test_what_is_being_written_is_left_until_it_is_whole(watch: ImageWatch) -> None:
    left(watch, "last-000001.safetensors")
    (watch.output / "last.safetensors").write_bytes(safetensors()[:-3])
    watch.place()
    first = watch.placed
    assert first is not None
    assert "last-000001" in first
    left(watch, "last.safetensors")
    watch.place()
    assert watch.placed is not None
    assert "last.safetensors" in watch.placed


def test_a_rate_that_is_no_number_is_left_out_of_the_progress(run: RunSpec, watch: ImageWatch) -> None:
    watch.heard("steps:  5%|#    | 3/60 [00:01<00:20, 1.00s/it, lr: nan loss: 1.0e-01]")
    (step,) = events(run)
    assert (step.step, step.loss, step.lr) == (3, 0.1, None)


@pytest.mark.parametrize(
    "line",
    [
        "steps: 1%|#| " + "9" * 20_000 + "/60 [00:01<00:02, 1s/it]",
        "\0",
        "[" * 20_000,
        "1% |" * 5000,
        " " * 20_000,
    ],
    ids=["digits", "nul", "brackets", "bars", "blanks"],
)
def test_whatever_an_engine_prints_is_heard_at_once_and_without_an_error(
    watch: ImageWatch, line: str
) -> None:
    """A reader that ponders over a line keeps the engine waiting, with the clock running."""
    began = time.thread_time()
    watch.heard(line)
    assert time.thread_time() - began < 1
    assert watch.step is None
