from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.progress import EvalEvent, NoteEvent, StageEvent, StepEvent, SubmissionEvent, line_of
from core.run_files import Score
from miner.watch.progress import CHUNK, WARM_UP, Course, Tail


def step(number: int, t: float = 0.0, **more: float) -> StepEvent:
    return StepEvent(t=t, step=number, **more)  # type: ignore[arg-type]


def append(path: Path, *pieces: bytes) -> None:
    with path.open("ab") as file:
        for piece in pieces:
            file.write(piece)


def test_only_what_is_new_is_read_and_a_torn_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    line = line_of(step(2))
    append(path, line_of(step(1)), line[:10])
    assert [one.step for one in tail.read()] == [1]  # type: ignore[union-attr]
    assert tail.read() == []
    append(path, line[10:])
    assert [one.step for one in tail.read()] == [2]  # type: ignore[union-attr]


def test_what_is_no_event_is_counted_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    append(path, b"hello\n", b'{"event": "launch the missiles"}\n', line_of(step(3)))
    tail = Tail(path)
    assert len(tail.read()) == 1
    assert tail.skipped == 2


def test_a_file_larger_than_one_look_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    line = line_of(NoteEvent(t=0, kind="k", text="x" * 1000))
    count = 2 * CHUNK // len(line) + 5
    append(path, line * count)
    assert len(Tail(path).read()) == count


def test_a_line_without_end_does_not_hold_the_rest_up(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    append(path, b"x" * (3 * CHUNK), b"\n", line_of(step(1)))
    tail = Tail(path)
    found = [*tail.read(), *tail.read(), *tail.read(), *tail.read()]
    assert found == [step(1)]


def test_a_file_that_begins_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    append(path, line_of(step(1)) * 3)
    tail = Tail(path)
    tail.read()
    path.write_bytes(line_of(step(9)))
    assert tail.read() == [step(9)]


def test_a_pipe_or_a_link_in_its_place_is_nothing(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(line_of(step(1)))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(secret)
    assert Tail(tmp_path / "pipe").read() == []
    assert Tail(tmp_path / "link").read() == []


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_whatever_a_training_writes_is_survived(
    tmp_path_factory: pytest.TempPathFactory, junk: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("t") / "progress.jsonl"
    append(path, *junk, b"\n", line_of(step(7)))
    tail = Tail(path)
    course = Course(began_at=100.0)
    for event in tail.read():
        course.take(event, 200.0)
    assert course.steps_done == 7


def test_steps_are_timed_after_the_warm_up_and_the_slow_ones_count() -> None:
    course = Course(began_at=0.0)
    assert course.median_step_s is None
    at = 0.0
    for number in range(1, 40):
        at += 30.0 if number <= WARM_UP else 1.0
        course.take(step(number, at), at)
    assert course.median_step_s == pytest.approx(1.0)
    assert course.slow_step_s == pytest.approx(1.0)
    for number in range(40, 60):
        at += 3.0
        course.take(step(number, at), at)
    assert course.slow_step_s == pytest.approx(3.0)


def test_several_steps_in_one_event_share_its_time() -> None:
    course = Course(began_at=0.0)
    for number in range(10, 200, 10):
        course.take(step(number, float(number)), float(number))
    assert course.median_step_s == pytest.approx(1.0)


def test_the_trainers_clock_can_not_promise_the_future() -> None:
    course = Course(began_at=100.0)
    course.take(step(1, t=1e12), now=150.0)
    assert course.heard_at == 150.0
    course.take(step(2, t=-5.0), now=160.0)
    assert course.heard_at == 150.0


def test_a_running_score_and_the_best_one_are_told_apart() -> None:
    course = Course(began_at=0.0)
    for number, value in ((1, 2.0), (2, 1.0), (3, 1.5)):
        course.take(EvalEvent(t=0, score=Score(value=value, step=number), seconds=4.0), 0)
    assert course.score is not None
    assert course.best is not None
    assert (course.score.value, course.best.value, course.eval_s) == (1.5, 1.0, 4.0)


def test_each_submission_is_counted() -> None:
    course = Course(began_at=0.0)
    course.take(StageEvent(t=1, stage="save"), 1)
    assert course.stage == "save"
    for number in (1, 2):
        course.take(SubmissionEvent(t=number, step=number), number)
    assert course.submissions == 2
