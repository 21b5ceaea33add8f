"""What ends a child besides itself, in time that passes at will."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.runs.run_files import RunEnd
from tests.doubles.each import each
from trainer.handoff import TrainingFailure, TrainingOutcome
from trainer.runner import supervise as module
from trainer.runner import text_runner
from trainer.runner.processes import StopRequest, TreeUse
from trainer.runner.supervise import (
    STOP_S,
    LaunchResult,
    ProcessEnd,
    SupervisionLimits,
    Termination,
    launch_result,
    supervise,
)

START = 1000.0


class FakeChild:
    pid = 0
    tail = ("last",)

    def __init__(self, ends: Callable[[float], bool], time: FakeTime) -> None:
        self._ends, self._time = ends, time
        self.closed = False

    def ended(self) -> int | None:
        return 0 if self._ends(self._time.now) else None

    def close(self) -> int:
        self.closed = True
        return 0 if self._ends(self._time.now) else -9


class FakeTime:
    def __init__(self) -> None:
        self.now = START
        self.events: list[tuple[float, Callable[[], Any]]] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.5)
        for at, action in list(self.events):
            if self.now >= at:
                self.events.remove((at, action))
                action()


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(module.time, "sleep", fake.sleep)
    monkeypatch.setattr(module, "dump_stacks", lambda: None)
    monkeypatch.setattr(module, "reap", lambda pid: None)
    monkeypatch.setattr(module, "tree_use", lambda pid: TreeUse(0.0, 0))
    return fake


def watched(
    time: FakeTime, folder: Path, ends: Callable[[float], bool] = lambda now: False, **limits: Any
) -> ProcessEnd:
    child = FakeChild(ends, time)
    supervision = SupervisionLimits(**{"hard_end": START + 10_000, **limits})
    ended = supervise(child, supervision, StopRequest(folder / "stop"), now=time)
    assert child.closed
    return ended


def test_a_child_that_ends_by_itself_is_left_alone(time: FakeTime, tmp_path: Path) -> None:
    ended = watched(time, tmp_path, lambda now: now > START + 60)
    assert ended == ProcessEnd(0, None, ("last",))


@pytest.mark.parametrize(
    ("limits", "asked", "end", "after"),
    [
        ({"hard_end": START + 100}, None, RunEnd.CLOCK, 102.5),
        # Before the first step there is nothing to wait for; after it a training gets the time to save.
        ({"begun": "not-there"}, 10, RunEnd.STOPPED, 10),
        ({"begun": "there"}, 0, RunEnd.STOPPED, STOP_S + 0.5),
        ({"marker": "not-there", "marker_s": 30.0}, None, RunEnd.CRASHED, 30.5),
    ],
    ids=["overrun", "stopped before the first step", "asked to stop and goes on", "without our plugin"],
)
def test_a_child_is_ended(
    time: FakeTime, tmp_path: Path, limits: dict[str, Any], asked: float | None, end: RunEnd, after: float
) -> None:
    (tmp_path / "there").touch()
    if asked is not None:
        time.events.append((START + asked, (tmp_path / "stop").touch))
    paths = {key: tmp_path / value for key, value in limits.items() if isinstance(value, str)}
    ended = watched(time, tmp_path, **{**limits, **paths})
    assert ended.termination is not None
    assert ended.termination.end is end
    assert time.now == pytest.approx(START + after, abs=3)


@pytest.mark.parametrize(
    ("cpu_share", "read_bytes_s", "hard_s", "after", "why"),
    [
        (0.05, 800_000, 10_000, None, ""),  # slowed down to a twentieth of a core, as measured
        (0.0, 3_000, 10_000, None, ""),  # from a disk that is hardly there
        (1.0, 1_000, 10_000, 300, "it has read nothing in its last 5 min"),  # trains without our plugin
        (0.0, 0, 10_000, 300, "neither computed nor read for 2 min"),
        (0.005, 0, 10_000, 300, "neither computed nor read for 2 min"),  # its launcher alone, as measured
        (0.5, 800_000, 1_000, 750, "75% of the time is over"),
    ],
    ids=["busy machine", "cold disk", "trains without it", "stands still", "its launcher waits", "for ever"],
)
def test_a_child_that_still_imports_is_waited_for(
    time: FakeTime,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cpu_share: float,
    read_bytes_s: float,
    hard_s: float,
    after: float | None,
    why: str,
) -> None:
    def use(pid: int) -> TreeUse:
        passed = time.now - START
        return TreeUse(cpu_share * passed, int(read_bytes_s * passed))

    monkeypatch.setattr(module, "tree_use", use)
    marker = tmp_path / "marker"
    time.events.append((START + 800, marker.touch))
    limits = {"marker": marker, "marker_s": 300.0, "hard_end": START + hard_s}
    ended = watched(time, tmp_path, lambda now: now > START + 900, **limits)
    if after is None:
        assert ended.termination is None
        return
    assert ended.termination is not None
    assert (ended.termination.end, why in ended.termination.detail) == (RunEnd.CRASHED, True), ended
    assert time.now == pytest.approx(START + after, abs=6)


def test_asked_to_stop_a_training_gets_the_time_to_save(time: FakeTime, tmp_path: Path) -> None:
    (tmp_path / "begun").touch()
    time.events.append((START + 10, (tmp_path / "stop").touch))
    gentle = watched(time, tmp_path, lambda now: now > START + 40, begun=tmp_path / "begun")
    assert gentle.termination is None


def test_a_training_without_a_sign_of_life_hangs(time: FakeTime, tmp_path: Path) -> None:
    sign = tmp_path / "progress"

    def move() -> None:
        sign.touch()
        os.utime(sign, (time.now, time.now))

    time.events += [(START + at, move) for at in (100, 200, 300)]
    ended = watched(time, tmp_path, signs=(sign,), hang_s=150.0)
    assert ended.termination is not None
    assert ended.termination.end is RunEnd.HUNG
    assert time.now == pytest.approx(START + 450, abs=5)


def test_a_trial_that_does_not_end_is_the_models_fault_by_our_clock_alone(
    time: FakeTime, tmp_path: Path
) -> None:
    """The file's time is that of another clock, an hour behind, and a second trial has time of its own."""
    trial = tmp_path / "trial"

    def begin(modified: float) -> None:
        trial.touch()
        os.utime(trial, (modified, modified))

    limit = text_runner.TrialLimit(trial, now=time)
    begin(START - 3600)
    time.events = [
        (START + 200, trial.unlink),
        (START + 400, lambda: begin(START - 3200)),
        (START + 600, lambda: begin(START - 3000)),
    ]
    ended = watched(time, tmp_path, more=limit)
    assert ended.termination is not None
    assert ended.termination.end is RunEnd.BAD_MODEL
    assert "did not encode the first rows in 5 min" in ended.termination.detail
    assert time.now - START == pytest.approx(600 + text_runner.TRIAL_S, abs=2)


def result_of(
    *failures: TrainingFailure | None,
    code: int = 1,
    ended: Termination | None = None,
    tail: tuple[str, ...] = (),
    oom_kills: int = 0,
    outcome: TrainingOutcome | None = None,
    marked: bool = True,
) -> LaunchResult:
    return launch_result(ProcessEnd(code, ended, tail, oom_kills), outcome, failures, marked)


def failure(end: RunEnd, at: float = 0.0, **changes: Any) -> TrainingFailure:
    return TrainingFailure(end=end, at=at, detail=f"because {end}", **changes)


CRASHED = failure(RunEnd.CRASHED)
LOST = failure(RunEnd.CRASHED, 1, consequence=True)
KILLED_RANK = "exitcode  : -9 (pid: 8)  (SIGKILL)"
SUMMARY = ("Failures:", "exitcode  : 1 (pid: 7)", "Root Cause (first observed failure):", "[0]:")


def test_the_trainings_own_outcome_counts_first() -> None:
    outcome = TrainingOutcome(end=RunEnd.FINISHED, detail="all done", steps=7)
    attempt = result_of(CRASHED, code=0, outcome=outcome)
    assert (attempt.end, attempt.outcome) == (RunEnd.FINISHED, outcome)


def test_memory_is_the_cause_before_all_with_its_moment() -> None:
    memory = result_of(failure(RunEnd.CRASHED, 1), failure(RunEnd.OOM, 9, moment="evaluation"))
    assert (memory.end, memory.moment) == (RunEnd.OOM, "evaluation")


def test_what_the_runner_did_counts_where_the_training_has_no_outcome() -> None:
    attempt = result_of(None, code=-9, ended=Termination(RunEnd.CLOCK, "time"))
    assert (attempt.end, attempt.detail) == (RunEnd.CLOCK, "time")


@pytest.mark.parametrize(
    ("failures", "ended", "end"),
    [
        ((failure(RunEnd.CRASHED, 5), None, failure(RunEnd.BAD_DATA, 3)), {}, RunEnd.BAD_DATA),
        ((failure(RunEnd.OOM),), {"code": -9, "ended": Termination(RunEnd.HUNG, "quiet")}, RunEnd.OOM),
        ((CRASHED,), {"tail": (*SUMMARY, KILLED_RANK)}, RunEnd.KILLED),
        ((CRASHED,), {"tail": (KILLED_RANK, *SUMMARY)}, RunEnd.KILLED),
        ((CRASHED,), {"tail": (*SUMMARY, "exitcode  : 1 (pid: 8)")}, RunEnd.CRASHED),
        ((failure(RunEnd.BAD_DATA),), {"tail": (*SUMMARY, KILLED_RANK)}, RunEnd.BAD_DATA),
        ((LOST,), {"tail": (KILLED_RANK,)}, RunEnd.KILLED),
        ((LOST, failure(RunEnd.NAN, 5)), {}, RunEnd.NAN),
        ((LOST,), {}, RunEnd.CRASHED),
    ],
    ids=[
        "the first failure",
        "others that hang after it",
        "a rank that was killed",
        "a rank that was killed, seen first",
        "none that was killed",
        "a rank's own word",
        "a rank that only lost one that was killed",
        "a rank that only lost one that failed",
        "a rank that only lost others",
    ],
)
def test_the_cause_counts_and_not_what_follows_from_it(
    failures: tuple[TrainingFailure | None, ...], ended: dict[str, Any], end: RunEnd
) -> None:
    assert result_of(*failures, **ended).end is end


def test_an_engine_that_exits_without_our_plugin_has_failed_even_with_zero() -> None:
    attempt = result_of(None, code=0, tail=("some", "last words"), marked=False)
    assert attempt.end is RunEnd.CRASHED
    assert "never loaded our plugin" in attempt.detail
    assert "last words" in attempt.detail


@each("how", [{"code": -9}, {"tail": (KILLED_RANK,)}])
def test_a_kill_is_the_hosts_memory_where_the_kernel_counted_one_and_else_just_a_kill(
    how: dict[str, Any],
) -> None:
    assert result_of(None, **how).end is RunEnd.KILLED
    assert result_of(None, **how, oom_kills=1).end is RunEnd.OOM


@each(
    "line",
    [
        "OSError: [Errno 28] No space left on device: '/run/x'",
        "SafetensorError: Error while serializing: I/O error: (os error 28)",
        "RuntimeError: PytorchStreamWriter failed writing file data/3: file write failed",
        "  exitcode  : 32 (pid: 77)",
    ],
)
def test_a_full_disk_is_named_although_its_record_was_lost_with_it(line: str) -> None:
    for failures, marked in (((None,), True), ((CRASHED,), True), ((None,), False)):
        assert result_of(*failures, tail=(line,), marked=marked).end is RunEnd.DISK_FULL


def test_a_silent_end_is_a_crash_with_its_code() -> None:
    attempt = result_of(None, code=3)
    assert attempt.end is RunEnd.CRASHED
    assert "ended with 3 without a word" in attempt.detail
