"""Every end of an image run: the right reason, a whole submission or none, and exit code 0 only with one."""

# Once: it needs nothing of the training stack.

from __future__ import annotations

import errno
import time
import zipfile
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from core.domain.tasks import ImageModelType, TaskType
from core.runs.run_files import RunEnd, RunResult, RunSpec, TrainerExitCode
from core.submission.check import BaseModelRef
from core.submission.prepare import check_submission
from miner.tournament.rehearsal.upload import what_is_uploaded
from tests.core.submission.folders import image_adapter, safetensors
from tests.trainer.runner.pictures import png
from tests.trainer.runner.scripted import EngineScript, ScriptedEngine, adapter, carried_out
from tests.trainer.runner.test_image_runner import image_run, planned
from tests.trainer.session.simulated import Time
from trainer.runner import image_monitor, image_runner, supervise

pytestmark = pytest.mark.process


Script = Generator[None, None, int | None]
NAN = safetensors(
    {
        f"diffusion_model.transformer_blocks.0.attn.to_q.lora_{one}.weight": ("BF16", [1], b"\xc0\x7f")
        for one in "AB"
    }
)
ZERO = image_adapter("qwen-image ai-toolkit", zero=lambda name: "lora_B" in name)


def for_ever() -> Script:
    while True:
        yield


def stopped_in_load(engine: ScriptedEngine) -> Script:
    engine.stop()
    yield from for_ever()


def stopped_in_step_1(engine: ScriptedEngine) -> Script:
    engine.steps(0, 1)
    yield
    engine.stop()
    yield from for_ever()


def stopped_in_a_save(engine: ScriptedEngine) -> Script:
    engine.steps(30)
    engine.save(30)
    yield
    engine.steps(45)
    engine.save(45, adapter(45)[:-9])
    engine.stop()
    yield from for_ever()


def stopped_after_an_empty_file(engine: ScriptedEngine) -> Script:
    engine.save(0, ZERO)
    yield
    engine.stop()
    yield from for_ever()


def dies(engine: ScriptedEngine) -> Script:
    engine.steps(12)
    yield
    engine.says("KeyError: 'down_blocks'")
    return 1


def dies_after_a_save(engine: ScriptedEngine) -> Script:
    engine.steps(30)
    engine.save(30)
    return (yield from dies(engine))


def is_killed(engine: ScriptedEngine) -> Script:
    engine.steps(12)
    yield
    return -9


def runs_out_of_memory(engine: ScriptedEngine) -> Script:
    engine.save(0, ZERO)
    yield
    engine.says("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB.")
    return 1


def fills_the_disk(engine: ScriptedEngine) -> Script:
    engine.steps(30)
    yield
    engine.says("OSError: [Errno 28] No space left on device")
    return 1


def fills_the_disk_later(engine: ScriptedEngine) -> Script:
    engine.save(30)
    return (yield from fills_the_disk(engine))


def finds_no_pictures(engine: ScriptedEngine) -> Script:
    engine.says("No data found. Please verify arguments")
    yield
    return 0


def loses_its_loss(engine: ScriptedEngine) -> Script:
    engine.steps(*range(20, 30), loss="nan")
    yield from for_ever()


def loses_its_loss_later(engine: ScriptedEngine) -> Script:
    engine.save(15)
    yield from loses_its_loss(engine)


def saves_what_is_no_number(engine: ScriptedEngine) -> Script:
    engine.steps(60)
    engine.save(60, NAN)
    yield
    return 0


def ends_without_a_file(engine: ScriptedEngine) -> Script:
    engine.steps(60)
    yield
    return 0


def finishes(engine: ScriptedEngine) -> Script:
    for step in (15, 30, 45, 60):
        engine.steps(step)
        engine.save(step)
        yield
    return 0


def finishes_without_a_bar(engine: ScriptedEngine) -> Script:
    engine.says("training")
    engine.save(60)
    yield
    return 0


class Ending(NamedTuple):
    scripts: tuple[EngineScript, ...]
    end: RunEnd
    code: TrainerExitCode
    #: The step of the submission.
    step: int | None
    reason: str


OK, STOPPED, FINISHED = TrainerExitCode.OK, RunEnd.STOPPED, RunEnd.FINISHED
DONE = "all 60 steps done"
ENDINGS: dict[str, Ending] = {
    "stop in load": Ending(
        (stopped_in_load,), STOPPED, TrainerExitCode.STOPPED, None, "asked to stop before the first step"
    ),
    "stop in step 1": Ending(
        (stopped_in_step_1,), STOPPED, TrainerExitCode.STOPPED, None, "asked to stop after step 1"
    ),
    "stop in a save": Ending((stopped_in_a_save,), STOPPED, OK, 30, "asked to stop after step 45"),
    "stop after an empty file": Ending(
        (stopped_after_an_empty_file,), STOPPED, TrainerExitCode.STOPPED, None, "asked to stop before"
    ),
    "dies": Ending((dies,), RunEnd.CRASHED, TrainerExitCode.CRASHED, None, "down_blocks"),
    "dies after a save": Ending((dies_after_a_save,), RunEnd.CRASHED, OK, 30, "down_blocks"),
    "killed": Ending((is_killed,), RunEnd.KILLED, TrainerExitCode.KILLED, None, "killed from outside"),
    "out of memory": Ending(
        (runs_out_of_memory,), RunEnd.OOM, TrainerExitCode.OOM, None, "ran out of GPU memory"
    ),
    "disk full": Ending(
        (fills_the_disk,), RunEnd.DISK_FULL, TrainerExitCode.DISK_FULL, None, "no room for its files"
    ),
    "disk full after a save": Ending(
        (fills_the_disk_later,), RunEnd.DISK_FULL, OK, 30, "no room for its files"
    ),
    "no pictures": Ending(
        (finds_no_pictures,), RunEnd.BAD_DATA, TrainerExitCode.BAD_DATA, None, "no pictures to train on"
    ),
    "loss is NaN": Ending((loses_its_loss,), RunEnd.NAN, TrainerExitCode.NAN, None, "since step 29"),
    "loss is NaN after a save": Ending((loses_its_loss_later,), RunEnd.NAN, OK, 15, "since step 29"),
    "weights are NaN": Ending(
        (saves_what_is_no_number,), RunEnd.CRASHED, TrainerExitCode.CRASHED, None, "NaN or infinity"
    ),
    "no file": Ending(
        (ends_without_a_file,), RunEnd.CRASHED, TrainerExitCode.CRASHED, None, "the engine ended with 0"
    ),
    "no bar": Ending((finishes_without_a_bar,), FINISHED, OK, 60, DONE),
    "all steps": Ending((finishes,), FINISHED, OK, 60, DONE),
}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "dump_stacks", lambda: False)
    monkeypatch.setattr(supervise, "POLL_S", 0.0)
    monkeypatch.setattr(image_monitor, "CHECK_EVERY_S", 0.0)


def run_of(folder: Path, seconds: float = 900.0) -> RunSpec:
    return planned(image_run(folder, ImageModelType.QWEN_IMAGE, seconds), 60)


def check_left(run: RunSpec, result: RunResult, step: int | None) -> None:
    """Exit code 0 exactly when what lies there is uploaded, whole and of this step."""
    place = Path(run.submission_dir)
    assert (result.exit_code == 0) is result.submission is (step is not None)
    if step is None:
        assert not place.exists()
        return
    assert what_is_uploaded(place, run.model_id, image=True).problems == ()
    base = BaseModelRef(image_type=run.image_type)
    assert check_submission(place, base, TaskType.IMAGE, as_is=True).faults == ()
    assert (place / "last.safetensors").read_bytes() == adapter(step)


@pytest.mark.parametrize("name", ENDINGS)
def test_each_end_has_its_reason_its_exit_code_and_a_whole_submission_or_none(
    tmp_path: Path, name: str
) -> None:
    ending = ENDINGS[name]
    run = run_of(tmp_path)
    result = carried_out(run, *ending.scripts)
    assert (result.end, result.exit_code) == (ending.end, ending.code), result.detail
    assert ending.reason in result.detail
    check_left(run, result, ending.step)


def test_a_full_disk_where_the_submission_is_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(image_monitor, "link_into_submission", lambda *_: full)
    run = run_of(tmp_path)
    result = carried_out(run, finishes)
    assert (result.end, result.exit_code) == (RunEnd.DISK_FULL, TrainerExitCode.DISK_FULL)
    assert "no file could be put in place" in result.detail
    check_left(run, result, None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    """That of the monitor and of the supervision."""
    clock, real = Time(time.time()), supervise.supervise
    monkeypatch.setattr(image_runner, "ImageMonitor", partial(image_monitor.ImageMonitor, now=clock))
    monkeypatch.setattr(image_runner, "supervise", lambda *given: real(*given, now=clock))
    return clock


def test_a_hanging_engine_is_ended_and_one_that_prints_anything_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Time
) -> None:
    def is_silent(engine: ScriptedEngine) -> Script:
        silent.append(engine)
        clock.now += 10_000
        yield from for_ever()

    def encodes(engine: ScriptedEngine) -> Script:
        for _ in range(4):
            clock.now += 800
            engine.says("Caching latents: 1%|# | 1/100 [00:01<00:20, 1.00s/it]")
            yield
        return (yield from is_silent(engine))

    silent: list[ScriptedEngine] = []
    monkeypatch.setattr(image_runner, "HANG_S", 2000.0)
    for number, script in enumerate((is_silent, encodes)):
        run = run_of(tmp_path / str(number), 100_000.0)
        result = carried_out(run, script)
        assert (result.end, result.exit_code) == (RunEnd.HUNG, TrainerExitCode.HUNG)
        assert "no sign of life for" in result.detail
        assert len(silent) == number + 1
        check_left(run, result, None)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [({}, "no picture"), ({"a.txt": b"a caption"}, "no picture"), ({"a.png": b"not one"}, "picture")],
    ids=["empty", "captions alone", "a broken picture"],
)
def test_a_zip_without_pictures_is_bad_data(tmp_path: Path, entries: dict[str, bytes], reason: str) -> None:
    run = run_of(tmp_path)
    with zipfile.ZipFile(run.data_path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    result = carried_out(run)
    assert (result.end, result.exit_code) == (RunEnd.BAD_DATA, TrainerExitCode.BAD_DATA)
    assert reason in result.detail
    check_left(run, result, None)


def test_a_broken_zip_is_bad_data(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    whole = Path(run.data_path).read_bytes()
    Path(run.data_path).write_bytes(whole[: len(whole) // 2])
    result = carried_out(run)
    assert (result.end, result.exit_code) == (RunEnd.BAD_DATA, TrainerExitCode.BAD_DATA)
    check_left(run, result, None)


def test_without_captions_the_pictures_are_trained(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    with zipfile.ZipFile(run.data_path, "w") as archive:
        for at in range(6):
            archive.writestr(f"{at}.png", png(shade=40 * at))
    result = carried_out(run, finishes)
    assert (result.end, result.exit_code) == (RunEnd.FINISHED, TrainerExitCode.OK), result.detail
    check_left(run, result, 60)
