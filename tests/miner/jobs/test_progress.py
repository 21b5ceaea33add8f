from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.runs.progress import (
    ControlEvent,
    EvalEvent,
    NoteEvent,
    StageEvent,
    StepEvent,
    SubmissionEvent,
    encode_event,
)
from core.runs.run_files import HeldOutScore
from miner.api.samples import GpuSample
from miner.fleet.sampler import SampleHistory
from miner.jobs.progress import (
    CHUNK,
    WARM_UP_STEPS,
    ProgressTail,
    RunProgress,
    idle_since_last_event,
    stall_reason,
)
from miner.jobs.timeline import JobTimings
from tests.doubles.each import each


def step(number: int, t: float = 0.0, **more: float) -> StepEvent:
    return StepEvent(t=t, step=number, **more)  # type: ignore[arg-type]


def append(path: Path, *pieces: bytes) -> None:
    with path.open("ab") as file:
        file.write(b"".join(pieces))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "progress.jsonl"


def test_only_what_is_new_is_read_and_a_torn_line_waits_for_its_end(path: Path) -> None:
    tail = ProgressTail(path)
    assert tail.read() == []
    line = encode_event(step(2))
    append(path, encode_event(step(1)), line[:10])
    assert [event.step for event in tail.read()] == [1]  # type: ignore[union-attr]
    assert tail.read() == []
    append(path, line[10:])
    assert [event.step for event in tail.read()] == [2]  # type: ignore[union-attr]


def test_what_is_no_event_is_counted_and_skipped(path: Path) -> None:
    append(path, b"hello\n", b'{"event": "launch the missiles"}\n', encode_event(step(3)))
    tail = ProgressTail(path)
    assert len(tail.read()) == 1
    assert tail.skipped == 2


def test_a_file_larger_than_one_look_is_read_whole(path: Path) -> None:
    line = encode_event(NoteEvent(t=0, kind="k", text="x" * 1000))
    count = 2 * CHUNK // len(line) + 5
    append(path, line * count)
    assert len(ProgressTail(path).read()) == count


def test_a_line_without_end_does_not_hold_the_rest_up(path: Path) -> None:
    append(path, b"x" * (3 * CHUNK), b"\n", encode_event(step(1)))
    tail = ProgressTail(path)
    assert [event for _ in range(4) for event in tail.read()] == [step(1)]


def test_a_file_that_begins_anew_is_read_from_its_beginning(path: Path) -> None:
    append(path, encode_event(step(1)) * 3)
    tail = ProgressTail(path)
    tail.read()
    path.write_bytes(encode_event(step(9)))
    assert tail.read() == [step(9)]


def test_a_pipe_or_a_link_in_its_place_is_nothing(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(encode_event(step(1)))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(secret)
    assert ProgressTail(tmp_path / "pipe").read() == []
    assert ProgressTail(tmp_path / "link").read() == []


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_whatever_a_training_writes_is_survived(
    tmp_path_factory: pytest.TempPathFactory, junk: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("t") / "progress.jsonl"
    append(path, *junk, b"\n", encode_event(step(7)))
    tail = ProgressTail(path)
    progress = RunProgress(began_at=100.0)
    for event in tail.read():
        progress.add(event, 200.0)
    assert progress.steps_done == 7


def test_steps_are_timed_after_the_warm_up_and_the_slow_ones_count() -> None:
    progress = RunProgress(began_at=0.0)
    assert progress.median_step_s is None
    at = 0.0
    for number in range(1, 40):
        at += 30.0 if number <= WARM_UP_STEPS else 1.0
        progress.add(step(number, at), at)
    assert progress.median_step_s == pytest.approx(1.0)
    assert progress.slow_step_s == pytest.approx(1.0)
    for number in range(40, 60):
        at += 3.0
        progress.add(step(number, at), at)
    assert progress.slow_step_s == pytest.approx(3.0)


def test_several_steps_in_one_event_share_its_time() -> None:
    progress = RunProgress(began_at=0.0)
    for number in range(10, 200, 10):
        progress.add(step(number, float(number)), float(number))
    assert progress.median_step_s == pytest.approx(1.0)


def test_the_trainers_clock_cannot_be_ahead() -> None:
    progress = RunProgress(began_at=100.0)
    progress.add(step(1, t=1e12), now=150.0)
    assert progress.last_event_at == 150.0
    progress.add(step(2, t=-5.0), now=160.0)
    assert progress.last_event_at == 150.0


def test_the_last_score_and_the_longest_evaluation_are_known() -> None:
    progress = RunProgress(began_at=0.0)
    for number, seconds in ((1, 3.0), (2, 4.0), (3, 2.0)):
        progress.add(EvalEvent(t=0, score=HeldOutScore(value=1.0, step=number), seconds=seconds), 0)
    assert (progress.score.step, progress.eval_s) == (3, 4.0)


def test_passes_have_grown_only_if_they_are_larger_than_the_engine_began_with() -> None:
    def answered(*events: tuple[int, int]) -> int | None:
        progress = RunProgress(began_at=0.0)
        for number, micro in events:
            progress.add(ControlEvent(t=0, number=number, applied=True, micro=micro), 0)
        return progress.grown_micro(4)

    assert answered() is answered((0, 8)) is answered((1, 2)) is answered((0, 8), (1, 8)) is None
    assert answered((1, 6)) == answered((1, 2), (2, 6)) == 6
    assert answered((0, 8), (1, 16)) == 16
    assert answered((1, 6), (1, 4)) is None  # undone


def test_each_submission_is_counted() -> None:
    progress = RunProgress(began_at=0.0)
    progress.add(StageEvent(t=1, stage="save"), 1)
    assert progress.stage == "save"
    for number in (1, 2):
        progress.add(SubmissionEvent(t=number, step=number), number)
    assert progress.submissions == 2


PACE = JobTimings(stall_factor=20, stall_min_s=600, start_limit_s=3600)


def progress(step_s: float, steps: int = 30) -> RunProgress:
    trained = RunProgress(began_at=0.0)
    for number in range(1, steps + 1):
        trained.add(step(number, number * step_s), number * step_s)
    return trained


@pytest.mark.parametrize(("step_s", "limit"), [(1.0, 600.0), (60.0, 1200.0)])
def test_a_training_is_hung_after_many_times_its_usual_step(step_s: float, limit: float) -> None:
    trained, last = progress(step_s), 30 * step_s
    assert stall_reason(trained, last + limit - 1, PACE) is None
    assert stall_reason(trained, last + limit + 1, PACE)


def test_loading_evaluating_and_saving_may_take_longer_but_not_for_ever() -> None:
    evaluating, silent = progress(1.0), RunProgress(began_at=31.0)
    evaluating.add(StageEvent(t=31, stage="evaluate"), 31)
    for trained, stage in ((evaluating, "'evaluate'"), (silent, "'start'")):
        assert stall_reason(trained, 31 + 3599, PACE) is None
        assert stage in (stall_reason(trained, 31 + 3601, PACE) or "")


def test_silence_while_nobody_looked_says_nothing() -> None:
    trained = progress(1.0)
    trained.excuse_silence(5000.0)
    assert stall_reason(trained, 5000 + 599, PACE) is None
    assert stall_reason(trained, 5000 + 601, PACE)
    trained.excuse_silence(100.0)  # a clock that was set back
    assert stall_reason(trained, 5000 + 601, PACE)


@each(
    ("utilization", "every_s", "gpus", "idle"),
    [
        (0.0, 5, ("a", "b"), True),
        (0.5, 5, ("a", "b"), False),
        (None, 5, ("a", "b"), False),
        (0.0, 100, ("a", "b"), False),  # too rarely measured to know
        (0.0, 5, ("a", "c"), False),  # c is not measured at all
        (0.0, 5, (), False),
    ],
)
def test_gpus_that_were_seen_to_idle_make_a_standstill_certain_sooner(
    utilization: float | None, every_s: int, gpus: tuple[str, ...], idle: bool
) -> None:
    trained, samples = progress(1.0), SampleHistory()
    for at in range(0, 400, every_s):
        # While it trained they were busy, and until its last step was over.
        samples.add(GpuSample(at, gpu, utilization=1.0 if at < 50 else utilization) for gpu in ("a", "b"))
    found = idle_since_last_event(trained, samples, gpus, 400.0)
    assert found is idle
    assert not idle_since_last_event(trained, samples, gpus, 100.0)
    assert stall_reason(trained, 30 + 299, PACE, gpus_idle=True) is None
    assert stall_reason(trained, 30 + 399, PACE, gpus_idle=True, save_s=100.0) is None
    assert "idle all the while" in (stall_reason(trained, 30 + 301, PACE, gpus_idle=True) or "")
