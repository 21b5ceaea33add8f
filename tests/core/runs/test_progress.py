"""The progress file, as the trainer writes and the daemon reads it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.runs.progress import (
    MAX_LINE,
    CheckpointEvent,
    ControlEvent,
    EvalEvent,
    EventPrinter,
    NoteEvent,
    OomEvent,
    ProgressEvent,
    StageEvent,
    StepEvent,
    encode_event,
    event_line,
    parse_events,
)
from core.runs.run_files import HeldOutScore
from tests.doubles.each import each

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


def test_steps_are_reported_now_and_then_and_the_last_one_always() -> None:
    said: list[str] = []
    clock = iter([0.0, 0.5, 1.0, 2.5, 2.6])
    tell = EventPrinter(said.append, lambda: next(clock))
    for step in range(1, 6):
        tell(StepEvent(t=0, step=step, total=5, loss=1.0))
    assert [line.split()[1] for line in said] == ["1/5", "4/5", "5/5"]


@each(
    ("event", "wanted"),
    [
        (StepEvent(t=0, step=1, loss=None), "step 1  loss NaN"),
        (
            StepEvent(
                t=0,
                step=9,
                total=10,
                loss=2.5,
                lr=1e-4,
                tokens_s=1234,
                mfu=0.41,
                wait=0.01,
                memory_bytes=10**9,
                ends_at=60,
            ),
            "step 9/10  loss 2.5000  lr 1.00e-04  1,234 tokens/s  MFU 41%  waits 1.0%  1.0 GB  60 s left",
        ),
        (
            EvalEvent(t=0, score=HeldOutScore(value=1.5, step=3), best=True),
            "step 3: eval_loss 1.5000, the best so far",
        ),
        (CheckpointEvent(t=0, step=4, path="/x"), "step 4: state saved"),
        (OomEvent(t=0, text="10 GB too many"), "out of memory in train: 10 GB too many"),
        (NoteEvent(t=0, kind="fp8", text="left off"), "fp8: left off"),
        (
            ControlEvent(t=0, number=1, applied=True, micro=2, text="after step 9: 4 → 2"),
            "control: after step 9: 4 → 2",
        ),
        (StageEvent(t=0, stage="train"), ""),
    ],
)
def test_events_are_reported_in_words(event: ProgressEvent, wanted: str) -> None:
    assert event_line(event) == wanted
