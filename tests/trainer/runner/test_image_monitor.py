"""An image engine seen from outside: what it leaves is taken when it is whole, and that never ends it."""

# Once: it needs nothing of the training stack.

from __future__ import annotations

import errno
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.domain.choices import LrSchedule
from core.domain.tasks import ImageModelType
from core.planning.efficiency import expected_speed
from core.planning.plan import TrainingPlan
from core.runs.progress import NoteEvent, StepEvent
from core.runs.run_files import RunEnd, RunSpec
from tests.trainer.runner.test_image_runner import events, image_run, planned
from tests.trainer.session.simulated import Time, safetensors
from trainer.runner import image_monitor as module
from trainer.runner.image_monitor import EngineStep, ImageMonitor, is_broken, parse_step
from trainer.session.progress_log import ProgressLog


@pytest.fixture
def run(tmp_path: Path) -> RunSpec:
    return planned(image_run(tmp_path, ImageModelType.SDXL))


@pytest.fixture
def watch(run: RunSpec, tmp_path: Path) -> ImageMonitor:
    (tmp_path / "output").mkdir()
    plan = TrainingPlan.from_json(Path(run.plan_path or "").read_bytes())
    monitor = ImageMonitor(run, plan, tmp_path / "output", run.end_by, ProgressLog(Path(run.progress_path)))
    monitor.submission.prepare()
    return monitor


def left(watch: ImageMonitor, name: str) -> None:
    (watch.output / name).write_bytes(safetensors())


def said(run: RunSpec) -> list[str]:
    return [one.text for one in events(run) if isinstance(one, NoteEvent) and one.kind == "submission"]


def test_a_full_disk_ends_no_training_is_noted_once_and_is_retried(
    run: RunSpec, watch: ImageMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    left(watch, "last-000005.safetensors")
    monkeypatch.setattr(module, "link_into_submission", lambda *_: full)
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
    run: RunSpec, watch: ImageMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "newest_whole_file", lambda output: output / "last-000001.safetensors")
    watch.place()
    assert not watch.submission.exists
    monkeypatch.undo()
    left(watch, "last-000002.safetensors")
    watch.place()
    assert watch.submission.exists


def test_what_is_being_written_is_left_until_it_is_whole(watch: ImageMonitor) -> None:
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


def test_a_rate_that_is_no_number_is_left_out_of_the_progress(run: RunSpec, watch: ImageMonitor) -> None:
    watch.on_line("steps:  5%|#    | 3/60 [00:01<00:20, 1.00s/it, lr: nan loss: 1.0e-01]")
    (step,) = events(run)
    assert (step.step, step.loss, step.lr) == (3, 0.1, None)


BARS = {
    "kohya": "steps:  5%|#    | {step}/60 [00:01<00:20, 1.00s/it, avr_loss=0.1]",
    "ai-toolkit": "last:   5%|#    | {step}/60 [00:01<00:20,  1.00s/it, lr: 1.0e-04 loss: 1.0e-01]",
}


@pytest.mark.parametrize("engine", BARS)
def test_pictures_per_second_follow_from_steps_and_batch_and_what_is_unknown_is_left_out(
    run: RunSpec, watch: ImageMonitor, engine: str
) -> None:
    clock = Time()
    watch.now = clock
    for step in range(60):
        clock.pass_by(2.0)
        watch.on_line(BARS[engine].format(step=step))
    *_, last = [event for event in events(run) if isinstance(event, StepEvent)]
    assert last.samples_s == pytest.approx(watch.plan.batch.effective / 2.0)
    assert (last.loss, last.lr) == (0.1, 1e-4 if engine == "ai-toolkit" else None)
    assert (last.tokens_s, last.wait, last.memory_bytes, last.grad_norm) == (None, None, None, None)
    assert (last.mfu is None) is watch.plan.gpus.is_cpu
    expected = expected_speed(watch.plan)
    assert expected is not None
    assert expected.efficiency(None, last.samples_s) == pytest.approx(expected.step_s / 2.0)


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
    watch: ImageMonitor, line: str
) -> None:
    """A reader that ponders over a line, in this case for minutes, keeps the engine waiting."""
    began = time.thread_time()
    watch.on_line(line)
    assert time.thread_time() - began < 60
    assert watch.step is None


LINES = [
    (
        "steps:   3%|▎         | 48/1600 [01:02<33:20,  1.29s/it, avr_loss=0.123]",
        1600,
        EngineStep(48, 1600, 0.123),
    ),
    (
        "steps: 100%|██████████| 1600/1600 [33:00<00:00,  1.24s/it, avr_loss=0.0871]",
        1600,
        EngineStep(1600, 1600, 0.0871),
    ),
    ("steps:   0%|          | 0/1600 [00:00<?, ?it/s]", 1600, EngineStep(0, 1600)),
    (
        "last:   1%|          | 12/2000 [00:30<1:22:00,  2.48s/it, lr: 1.0e-04 loss: 3.456e-01]",
        2000,
        EngineStep(12, 2000, 0.3456, 1e-4),
    ),
]


@pytest.mark.parametrize(("line", "total", "step"), LINES)
def test_a_bar_of_the_training_says_step_loss_and_rate(line: str, total: int, step: EngineStep) -> None:
    assert parse_step(line, total) == step


@pytest.mark.parametrize(
    "line",
    [
        "100%|██████████| 30/30 [00:04<00:00,  7.1it/s]",
        "Loading checkpoint shards: 100%|██████████| 1600/1600 [00:04<00:00,  7.1it/s]",
        "epoch 1/10",
        "steps: lots",
    ],
)
def test_other_bars_and_lines_say_nothing(line: str) -> None:
    assert parse_step(line, 1600) is None


def test_a_loss_of_nan_is_seen() -> None:
    step = parse_step("steps:   3%|▎| 48/1600 [01:02<33:20,  1.29s/it, avr_loss=nan]", 1600)
    assert step is not None
    assert step.loss is not None
    assert math.isnan(step.loss)
    assert is_broken(step)


@given(st.text(max_size=300), st.integers(0, 10_000))
def test_whatever_an_engine_prints_is_a_step_or_nothing(line: str, total: int) -> None:
    step = parse_step(line, total)
    assert step is None or step.total == total


@pytest.mark.parametrize(
    ("schedule", "at", "may_refit", "refit"),
    [
        # 964 s are left, less 5 for starting again and a twentieth.
        (LrSchedule.COSINE, 30, True, 911),
        (LrSchedule.COSINE, 30, False, None),  # it was started again already
        (LrSchedule.COSINE, 1001, True, None),  # too much of it is done
        (LrSchedule.CONSTANT, 30, True, None),  # loses nothing by being cut off
    ],
)
def test_a_decaying_schedule_that_would_be_cut_off_is_to_be_started_again(
    run: RunSpec, tmp_path: Path, schedule: LrSchedule, at: int, may_refit: bool, refit: int | None
) -> None:
    plan = TrainingPlan.from_json(Path(planned(run, 4000, schedule).plan_path or "").read_bytes())
    time = Time()
    end = time.now + at + 970
    progress = ProgressLog(Path(run.progress_path))
    watch = ImageMonitor(run, plan, tmp_path, end, progress, may_refit=may_refit, now=time)
    time.pass_by(10)
    for step in range(at - 25, at + 1):
        watch.on_line(f"steps:  5%|#    | {step}/4000 [00:01<00:20, 1.00s/it, avr_loss=0.1]")
        time.pass_by(1.0)
    termination = watch.check()
    assert watch.refit == refit
    assert (termination and termination.end) == (RunEnd.CLOCK if refit else None)
