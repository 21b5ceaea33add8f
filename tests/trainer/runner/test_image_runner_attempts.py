"""Another attempt on the folder of an earlier one: what is there is replaced by what is at least as good."""

# Once: it needs nothing of the training stack.

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from core.domain.choices import LrSchedule
from core.domain.tasks import ImageModelType
from core.runs.progress import NoteEvent
from core.runs.run_files import RunEnd, RunSpec
from tests.core.submission.folders import image_adapter
from tests.trainer.runner.scripted import EngineScript, ScriptedEngine, adapter, carried_out
from tests.trainer.runner.test_image_runner import events, image_run, planned
from tests.trainer.runner.test_image_runner_ends import Script, _impatient
from trainer.runner.image_monitor import LAST_FILE

pytestmark = pytest.mark.process


__all__ = ["_impatient"]

CONSTANT, COSINE = LrSchedule.CONSTANT, LrSchedule.COSINE
#: Added to the number of a step, for the contents of the second attempt's files.
SECOND = 1000


def saves(*steps: int, number: int = 0, code: int = 1) -> EngineScript:
    """An engine that dies after these files; with 60 among them it ends well."""

    def script(engine: ScriptedEngine) -> Script:
        for step in steps:
            engine.steps(step)
            engine.save(step, adapter(number + step))
            yield
        if engine.total in steps:
            return 0
        engine.says("Killed")
        return code

    return script


def run_of(folder: Path, schedule: LrSchedule = CONSTANT, micro: int = 4) -> RunSpec:
    return planned(image_run(folder, ImageModelType.QWEN_IMAGE), 60, schedule, micro)


def again(run: RunSpec, schedule: LrSchedule = CONSTANT, micro: int = 4) -> RunSpec:
    """The second attempt of a container: nothing of the first one's scratch files is there."""
    for path in (run.progress_path, run.result_path, run.stop_path):
        Path(path).unlink(missing_ok=True)
    return planned(run, 60, schedule, micro)


def lies_there(run: RunSpec) -> bytes:
    return (Path(run.submission_dir) / LAST_FILE).read_bytes()


def notes(run: RunSpec) -> str:
    return "\n".join(f"{one.kind}: {one.text}" for one in events(run) if isinstance(one, NoteEvent))


@pytest.mark.parametrize(
    ("schedule", "first", "second", "submitted"),
    [
        (CONSTANT, (15, 30), (15,), 30),
        (CONSTANT, (15, 30), (15, 30), SECOND + 30),
        (CONSTANT, (15, 30), (45,), SECOND + 45),
        (CONSTANT, (15, 30), (), 30),
        (CONSTANT, (15, 60), (15, 45), 60),
        (CONSTANT, (15, 60), (15, 60), SECOND + 60),
        # Where a decay is cut off, its steps count half; at 50 the rate is low.
        (COSINE, (15, 30), (15,), 30),
        (COSINE, (15, 50), (15, 30, 45), 50),
        (COSINE, (15, 45), (15, 30), 45),
        (COSINE, (15, 45), (60,), SECOND + 60),
    ],
)
def test_a_second_attempt_replaces_what_is_not_worth_more(
    tmp_path: Path, schedule: LrSchedule, first: tuple[int, ...], second: tuple[int, ...], submitted: int
) -> None:
    run = run_of(tmp_path, schedule)
    carried_out(run, saves(*first))
    run = again(run, schedule)
    result = carried_out(run, saves(*second, number=SECOND))
    assert lies_there(run) == adapter(submitted)
    assert (result.submission, result.exit_code) == (True, 0)
    assert f"an earlier attempt has left one, of step {first[-1]}" in notes(run)
    assert ("stays: no file came as far" in notes(run)) is (submitted < SECOND)


def test_attempts_with_other_batches_are_compared_by_pictures(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    carried_out(run, saves(15, 30))
    run = again(run, micro=2)
    carried_out(run, saves(15, 30, 45, number=SECOND))
    assert lies_there(run) == adapter(30)
    carried_out(again(run, micro=2), saves(15, 60, number=SECOND))
    assert lies_there(run) == adapter(SECOND + 60)


@pytest.mark.parametrize(
    "broken",
    [
        lambda whole: whole[:-9],
        lambda whole: b"",
        lambda whole: image_adapter("qwen-image ai-toolkit", zero=lambda name: "lora_B" in name),
        lambda whole: image_adapter("sdxl kohya"),
    ],
    ids=["truncated", "empty", "zero delta", "another family's keys"],
)
def test_what_is_broken_is_replaced_by_any_file_and_counts_for_nothing(
    tmp_path: Path, broken: Callable[[bytes], bytes]
) -> None:
    run = run_of(tmp_path)
    carried_out(run, saves(15, 45))
    # Within the same folder, so that what was noted of it still holds.
    with (Path(run.submission_dir) / LAST_FILE).open("r+b") as file:
        content = broken(file.read())
        file.seek(0)
        file.truncate()
        file.write(content)
    run = again(run)
    nothing = carried_out(run, saves(code=-9))
    assert (nothing.end, nothing.submission, nothing.exit_code == 0) == (RunEnd.KILLED, False, False)
    result = carried_out(again(run), saves(15, number=SECOND))
    assert (result.submission, lies_there(run)) == (True, adapter(SECOND + 15))
