"""The progress file, as the trainer writes and the daemon reads it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.runs.progress import MAX_LINE, EvalEvent, StepEvent, encode_event, parse_events
from core.runs.run_files import HeldOutScore

STEP = StepEvent(t=1.0, step=3, loss=0.5)
EVAL = EvalEvent(t=2.0, score=HeldOutScore(value=0.4, step=3), best=True)


def test_what_is_written_is_read_back_with_the_offset_to_go_on_from() -> None:
    data = encode_event(STEP) + encode_event(EVAL)
    read = list(parse_events(data))
    assert [line.event for line in read] == [STEP, EVAL]
    assert read[-1].offset == len(data)
    assert list(parse_events(data[read[0].offset :], read[0].offset)) == read[1:]


def test_an_unfinished_last_line_waits_for_its_end() -> None:
    data = encode_event(STEP) + encode_event(EVAL)[:-5]
    read = list(parse_events(data))
    assert [line.event for line in read] == [STEP]
    assert read[-1].offset == len(encode_event(STEP))


def test_a_line_that_never_ends_is_passed_over() -> None:
    data = b"x" * (MAX_LINE + 1)
    assert [(line.event, line.offset) for line in parse_events(data, 10)] == [(None, 10 + len(data))]


@given(st.binary(max_size=300))
def test_no_bytes_from_a_container_can_raise_or_stop_the_reading(noise: bytes) -> None:
    data = noise + b"\n" + encode_event(STEP)
    read = list(parse_events(data))
    assert read[-1].event == STEP
    assert read[-1].offset == len(data)
