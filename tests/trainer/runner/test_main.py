"""From a command line to an exit code: a validator goes by nothing else."""

# Once: it needs nothing of the training stack.

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.domain.evaluation import Era
from core.domain.tasks import TaskType
from core.runs.progress import StageEvent, StepEvent, encode_event
from core.runs.run_files import HeldOutScore, RunEnd, RunResult, RunSpec, TrainerExitCode
from tests.core.submission.folders import image_adapter
from tests.trainer.run_specs import run_spec
from trainer import handoff
from trainer.errors import BadModel
from trainer.runner import main as main_module
from trainer.runner.command_line import UsageError
from trainer.runner.main import run_to_end, write_result
from trainer.runner.processes import StopRequest
from trainer.runner.supervise import LaunchResult
from trainer.session.submission import Submission


@pytest.fixture(autouse=True)
def this_process_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("adopt_orphans", "kill_descendants"):
        monkeypatch.setattr(main_module, name, lambda: None)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def run_in(folder: Path, **changes: Any) -> RunSpec:
    """Of a tournament: its files lie in the work folder."""
    work = folder / "work"
    values = {
        "task_type": TaskType.IMAGE,
        "era": Era.TOURNAMENTS,
        "submission_dir": str(folder / "place" / "repo"),
    }
    files = {"progress_path": "progress.jsonl", "result_path": "result.json", "stop_path": "stop"}
    return run_spec(folder, **{**values, **{key: str(work / name) for key, name in files.items()}, **changes})


def submit(run: RunSpec) -> None:
    place = Submission(Path(run.submission_dir), run.model_id, Path(run.model_path), TaskType.IMAGE)
    place.prepare()
    place.put(lambda folder: _write(folder / "last.safetensors"), HeldOutScore(value=1.0, step=3))


def _write(path: Path) -> None:
    path.write_bytes(image_adapter())


class FakeRunner:
    def __init__(self, run: RunSpec, act: Any) -> None:
        self.run, self.act = run, act

    def execute(self) -> RunResult:
        self.act(self.run)
        return write_result(self.run, LaunchResult(RunEnd.FINISHED, "all done"))


def exit_of(run: RunSpec, act: Any) -> int:
    return run_to_end(lambda _: run, lambda run, *_: FakeRunner(run, act), [])


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_training_that_ended_within_an_exchange_of_two_steps_has_its_submission(tmp_path: Path) -> None:
    """Some file systems cannot exchange folders in one."""

    def act(run: RunSpec) -> None:
        submit(run)
        place = Path(run.submission_dir)
        place.rename(place.with_name(f".{place.name}.old"))

    run = run_in(tmp_path)
    assert exit_of(run, act) == 0
    assert RunResult.model_validate_json(Path(run.result_path).read_bytes()).submission


def test_a_submission_at_its_place_is_exit_code_zero_whatever_the_end(tmp_path: Path) -> None:
    def act(run: RunSpec) -> None:
        submit(run)
        raise ZeroDivisionError("a mistake of ours")

    run = run_in(tmp_path)
    assert exit_of(run, act) == 0
    result = RunResult.model_validate_json(Path(run.result_path).read_bytes())
    assert (result.end, result.submission, result.best) == (
        RunEnd.CRASHED,
        True,
        HeldOutScore(value=1.0, step=3),
    )
    assert "ZeroDivisionError" in result.detail


def test_on_a_full_disk_a_submission_is_exit_code_zero_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing can be written any more, not even the reason: validators upload nothing after another code."""

    def act(run: RunSpec) -> None:
        submit(run)
        monkeypatch.setattr(handoff, "write_atomically", full)
        full()

    run = run_in(tmp_path)
    assert exit_of(run, act) == 0
    assert not Path(run.result_path).exists()
    assert "No space left on device" in caplog.text


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), TrainerExitCode.DISK_FULL),
        (BadModel("no such folder"), TrainerExitCode.BAD_MODEL),
        (KeyError("surprise"), TrainerExitCode.CRASHED),
    ],
)
def test_without_a_submission_the_exit_code_is_the_reason(
    tmp_path: Path, error: Exception, code: TrainerExitCode
) -> None:
    def act(run: RunSpec) -> None:
        raise error

    assert exit_of(run_in(tmp_path), act) == code


def test_folders_that_cannot_be_made_end_with_a_code_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    run = run_in(tmp_path, work_dir=str(tmp_path / "file/work"), result_path=str(tmp_path / "file/r.json"))
    assert exit_of(run, lambda run: None) == TrainerExitCode.CRASHED


def test_a_command_line_without_a_task_is_a_usage_error() -> None:
    def parse(_: Any) -> RunSpec:
        raise UsageError("no task")

    assert run_to_end(parse, lambda run, *_: FakeRunner(run, None), []) == TrainerExitCode.USAGE


def test_a_tournaments_second_attempt_knows_nothing_of_the_first_but_its_submission(tmp_path: Path) -> None:
    """Both have the same volume: the first one's request to stop would end the second before it began."""
    run = run_in(tmp_path)
    submit(run)
    left = Path(run.work_dir) / "launch-1"
    left.mkdir(parents=True)
    (left / "outcome.json").write_text("{}")
    Path(run.stop_path).touch()
    seen: list[bool] = []

    def act(run: RunSpec) -> None:
        seen.append(left.exists() or Path(run.stop_path).exists())

    assert exit_of(run, act) == 0
    assert seen == [False]


def test_a_work_folder_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    """It is named by the environment and a task's id."""
    run = run_in(tmp_path)
    Path(run.work_dir).mkdir()
    mine = Path(run.work_dir) / "thesis.tex"
    mine.touch()
    exit_of(run, lambda run: None)
    assert mine.exists()


def test_a_daemons_attempt_keeps_its_folder_and_its_stop_file(tmp_path: Path) -> None:
    run = run_in(tmp_path, era=Era.OFFERS, plan_path=str(tmp_path / "plan.json"))
    Path(run.work_dir).mkdir()
    Path(run.stop_path).touch()
    stops: list[StopRequest] = []

    def runner(run: RunSpec, stop: StopRequest, retries: bool) -> FakeRunner:
        stops.append(stop)
        assert not retries
        return FakeRunner(run, lambda _: None)

    run_to_end(lambda _: run, runner, [])
    assert stops[0].asked


def test_a_result_says_how_fast_and_how_full_the_training_was(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    steps = [
        StepEvent(t=1, step=step, tokens_s=speed, memory_bytes=memory)
        for step, speed, memory in ((1, 10.0, 5), (2, 100.0, 9), (3, 110.0, 7), (4, None, None))
    ]
    events = [StageEvent(t=0, stage="train"), *steps]
    Path(run.progress_path).parent.mkdir(parents=True, exist_ok=True)
    Path(run.progress_path).write_bytes(b"".join(map(encode_event, events)) + b'{"torn')
    write_result(run, LaunchResult(RunEnd.FINISHED, ""), steps=4)
    result = RunResult.model_validate_json(Path(run.result_path).read_bytes())
    assert (result.tokens_s, result.memory_bytes) == (100.0, 9)
    Path(run.progress_path).unlink()
    assert write_result(run, LaunchResult(RunEnd.CRASHED, "")).tokens_s is None
