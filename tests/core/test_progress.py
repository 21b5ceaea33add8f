"""The one line per event that trainer and daemon share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.progress import MAX_LINE, EvalEvent, StepEvent, events_in, line_of
from core.run_files import Score

STEP = StepEvent(t=1.0, step=3, loss=0.5)
EVAL = EvalEvent(t=2.0, score=Score(value=0.4, step=3), best=True)


def test_what_is_written_is_read_back_with_the_offset_to_go_on_from() -> None:
    data = line_of(STEP) + line_of(EVAL)
    read = list(events_in(data))
    assert [line.event for line in read] == [STEP, EVAL]
    assert read[-1].offset == len(data)
    assert list(events_in(data[read[0].offset :], read[0].offset)) == read[1:]


def test_an_unfinished_last_line_waits_for_its_end() -> None:
    data = line_of(STEP) + line_of(EVAL)[:-5]
    read = list(events_in(data))
    assert [line.event for line in read] == [STEP]
    assert read[-1].offset == len(line_of(STEP))


def test_a_line_that_never_ends_is_passed_over() -> None:
    data = b"x" * (MAX_LINE + 1)
    assert [(line.event, line.offset) for line in events_in(data, 10)] == [(None, 10 + len(data))]


@given(st.binary(max_size=300))
def test_no_bytes_from_a_container_can_raise_or_stop_the_reading(noise: bytes) -> None:
    data = noise + b"\n" + line_of(STEP)
    read = list(events_in(data))
    assert read[-1].event == STEP
    assert read[-1].offset == len(data)
