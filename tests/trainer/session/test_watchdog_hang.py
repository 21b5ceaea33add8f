"""A process that stands still ends, with a reason."""

from __future__ import annotations

import re
import sys
import time

import pytest

from tests.trainer.native import tiny
from trainer.native import speed
from trainer.session.watchdog import HangWatchdog, own_frame


def test_a_process_that_hangs_is_reported_with_the_place(capfd: pytest.CaptureFixture[str]) -> None:
    reasons: list[str] = []
    with HangWatchdog(0.2, reasons.append):
        until = time.monotonic() + 60
        while not reasons and time.monotonic() < until:
            time.sleep(0.02)
    (reason,) = reasons
    assert re.search(r"nothing done for \d+ s", reason)
    assert "test_a_process_that_hangs" in capfd.readouterr().err


def test_a_process_that_does_something_now_and_then_is_left_alone() -> None:
    reasons: list[str] = []
    with HangWatchdog(1.5, reasons.append) as watch:
        said, longest = time.monotonic(), 0.0
        until = said + 3
        while said < until:
            time.sleep(0.06)
            watch.heartbeat()
            longest, said = max(longest, time.monotonic() - said), time.monotonic()
    # A machine that stood still itself is none of its business.
    assert not reasons or longest > 1.4


def test_a_place_is_the_innermost_line_of_our_own() -> None:
    found: list[str] = []

    def fits(micro: int) -> bool:
        found.append(own_frame(sys._getframe()))
        return False

    speed.larger_micro(tiny.plan(micro=2, accumulation=2), fits)
    assert found[0].startswith("trainer/native/speed.py:")
    assert found[0].endswith("(larger_micro)")
    assert own_frame(None) == "foreign code"
