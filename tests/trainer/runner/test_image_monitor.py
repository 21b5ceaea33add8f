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

from core.domain.choices import Engine
from core.domain.tasks import ImageModelType
from core.planning.plan import TrainingPlan
from core.planning.time.calibration import expected_speed
from core.runs.progress import NoteEvent, StepEvent
from core.runs.run_files import RunSpec
from tests.core.submission.folders import image_adapter, safetensors
from tests.trainer.runner.test_image_runner import events, image_run, planned
from tests.trainer.session.simulated import Time
from trainer.runner import image_monitor as module
from trainer.runner.image_monitor import EngineStep, ImageMonitor, is_broken, parse_step
from trainer.session.progress_log import ProgressLog
from trainer.session.submission import TrainedSteps


@pytest.fixture
def run(tmp_path: Path) -> RunSpec:
    return planned(image_run(tmp_path, ImageModelType.SDXL))


@pytest.fixture
def watch(run: RunSpec, tmp_path: Path) -> ImageMonitor:
    (tmp_path / "output").mkdir()
    plan = TrainingPlan.from_json(Path(run.plan_path or "").read_bytes())
    monitor = ImageMonitor(run, plan, tmp_path / "output", ProgressLog(Path(run.progress_path)))
    monitor.submission.prepare()
    return monitor


def left(watch: ImageMonitor, name: str, content: bytes | None = None) -> None:
    (watch.output / name).write_bytes(image_adapter() if content is None else content)


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
    monkeypatch.setattr(module, "whole_files", lambda output: [output / "last-000001.safetensors"])
    watch.place()
    assert not watch.submission.exists
    monkeypatch.undo()
    left(watch, "last-000002.safetensors")
    watch.place()
    assert watch.submission.exists


def test_what_is_being_written_is_left_until_it_is_whole(watch: ImageMonitor) -> None:
    left(watch, "last-000001.safetensors")
    (watch.output / "last.safetensors").write_bytes(image_adapter()[:-3])
    watch.place()
    first = watch.placed
    assert first is not None
    assert "last-000001" in first
    left(watch, "last.safetensors")
    watch.place()
    assert watch.placed is not None
    assert "last.safetensors" in watch.placed


def is_up(name: str) -> bool:
    return "lora_up" in name


def test_a_file_from_before_the_training_is_passed_over_once_and_the_next_one_counts(
    run: RunSpec, watch: ImageMonitor
) -> None:
    left(watch, "last-000001.safetensors", image_adapter(zero=is_up))
    watch.place()
    watch.place()
    assert not watch.submission.exists
    (note,) = said(run)
    assert "last-000001.safetensors is passed over" in note
    assert "all add zero" in note
    left(watch, "last-000002.safetensors")
    watch.place()
    assert (watch.submission.exists, watch.problem) == (True, None)


NAN = safetensors(
    {f"lora_unet_out_2.lora_{one}.weight": ("BF16", [1], b"\xc0\x7f") for one in ("up", "down")}
)


@pytest.mark.parametrize("placed", [True, False], ids=["the older one is there", "nothing is there"])
def test_of_files_that_came_together_the_newest_good_one_counts(watch: ImageMonitor, placed: bool) -> None:
    left(watch, "last-000001.safetensors")
    if placed:
        watch.place()
    left(watch, "last-000002.safetensors", NAN)
    watch.place()
    assert watch.submission.exists
    assert watch.placed is not None
    assert "last-000001" in watch.placed


def test_odd_things_with_the_names_of_files_are_passed_over(watch: ImageMonitor) -> None:
    (watch.output / "last-000009.safetensors").mkdir()
    (watch.output / "last-000008.safetensors").symlink_to(watch.output / "nothing")
    left(watch, "last-000007.safetensors", b"")
    left(watch, "last-000006.safetensors", b"\xff" * 100)
    left(watch, "last-step00000500.safetensors", image_adapter()[:50])
    watch.place()
    assert (watch.placed, watch.problem) == (None, None)
    left(watch, "last-000001.safetensors")
    watch.place()
    assert watch.submission.exists


def test_a_later_launch_replaces_the_submission_when_it_has_come_as_far(watch: ImageMonitor) -> None:
    watch.earlier = TrainedSteps(12, 6.0 * watch.plan.steps.per_epoch * watch.plan.batch.effective)
    left(watch, "last-000005.safetensors")
    watch.place()
    assert not watch.submission.exists
    left(watch, "last-000006.safetensors")
    watch.place()
    assert watch.submission.trained == watch.earlier


def test_an_adapter_of_another_family_is_no_submission(run: RunSpec, watch: ImageMonitor) -> None:
    left(watch, "last.safetensors", image_adapter("krea2 ai-toolkit"))
    watch.place()
    assert not watch.submission.exists
    assert "must have the names of an adapter for sdxl" in said(run)[0]


def test_modules_that_were_not_trained_are_named_once(run: RunSpec, watch: ImageMonitor) -> None:
    one = "lora_te1_text_model_encoder_layers_0_mlp_fc1"
    for number in (1, 2):
        weights = image_adapter(zero=lambda name: name.startswith(one), seed=number)
        left(watch, f"last-00000{number}.safetensors", weights)
        watch.place()
    (note,) = said(run)
    assert "1 of 48 modules that add zero" in note


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
def test_whatever_an_engine_prints_is_read_at_once_and_without_an_error(
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


def test_a_files_step_is_in_its_name_and_sd_scripts_counts_epochs(watch: ImageMonitor) -> None:
    watch.on_line(BARS["kohya"].format(step=57))
    assert watch.step_of(Path("last-000005.safetensors")) == 5 * watch.plan.steps.per_epoch
    assert watch.step_of(Path("last.safetensors")) == watch.plan.steps.total
    watch.plan = watch.plan.model_copy(update={"engine": Engine.AI_TOOLKIT})
    assert watch.step_of(Path("last_000000040.safetensors")) == 40
