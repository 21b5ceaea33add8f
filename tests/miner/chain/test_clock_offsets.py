"""How far our clock is off, by the times that validators sign."""

from __future__ import annotations

from miner.chain.clock_offsets import MAX_AGE_SECONDS, ClockOffset, ClockOffsets
from tests.doubles.each import each

A, B, C, D = (bytes([byte]) * 32 for byte in range(4))


class Heard:
    """What validators sent: each value is how far our clock was ahead."""

    def __init__(self, **_: object) -> None:
        self.now, self.stamp = 0.0, 0
        self.offsets = ClockOffsets(lambda: self.now)

    def hear(self, key: bytes, *ahead: float) -> None:
        for value in ahead:
            self.stamp += 1
            self.offsets.note(key, self.stamp, value)


@each(
    ("by_validator", "seconds"),
    [
        ({A: [50.0] * 3}, None),
        ({A: [0.1] * 3, B: [90.0] * 3}, 0.1),
        ({A: [40.0] * 3, B: [90.0] * 3}, 40.0),
        ({A: [-40.0] * 3, B: [-90.0] * 3}, -40.0),
        ({A: [0.2] * 3, B: [0.1] * 3, C: [1e9] * 3}, 0.2),
        ({A: [0.2, 60.0, 0.1], B: [0.2, 0.1, 60.0]}, 0.2),
        ({A: [-45.0] * 3, B: [-46.0] * 3, C: [0.0] * 3, D: [-44.0] * 3}, -44.0),
    ],
)
def test_several_validators_must_agree(by_validator: dict[bytes, list[float]], seconds: float | None) -> None:
    heard = Heard()
    for key, values in by_validator.items():
        heard.hear(key, *values)
    measured = heard.offsets.measure()
    assert measured == (None if seconds is None else ClockOffset(seconds, len(by_validator)))


def test_the_newest_requests_count_and_old_ones_are_forgotten() -> None:
    heard = Heard()
    for key in (A, B):
        heard.hear(key, 100.0, 100.0, 100.0, 0.0)
    assert heard.offsets.measure() == ClockOffset(100.0, 2)
    for key in (A, B):
        heard.hear(key, 0.0)
    assert heard.offsets.measure() == ClockOffset(0.0, 2)
    heard.now = MAX_AGE_SECONDS + 1
    heard.hear(A, 0.0)
    assert heard.offsets.measure() is None


def test_an_old_request_that_is_sent_again_says_nothing() -> None:
    heard = Heard()
    for key in (A, B):
        heard.hear(key, 0.0)
        for again in range(5):
            heard.offsets.note_refused(key, heard.stamp, 600.0 + again)
    assert heard.offsets.measure() == ClockOffset(0.0, 2)
