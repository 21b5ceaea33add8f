"""A process that stands still ends, with a reason."""

from __future__ import annotations

import re
import sys
import time

import pytest

from tests.trainer.native import tiny
from trainer.native import fit
from trainer.native.watch import Watch, place_of


def test_who_does_nothing_for_too_long_is_told_on_with_the_place(capfd: pytest.CaptureFixture[str]) -> None:
    reasons: list[str] = []
    with Watch(0.2, reasons.append):
        until = time.monotonic() + 60
        while not reasons and time.monotonic() < until:
            time.sleep(0.02)
    (reason,) = reasons
    assert re.search(r"nothing done for \d+ s", reason)
    assert "test_who_does_nothing" in capfd.readouterr().err


def test_who_does_something_now_and_then_is_left_alone() -> None:
    reasons: list[str] = []
    with Watch(1.5, reasons.append) as watch:
        said, longest = time.monotonic(), 0.0
        until = said + 3
        while said < until:
            time.sleep(0.06)
            watch.alive()
            longest, said = max(longest, time.monotonic() - said), time.monotonic()
    # A machine that stood still itself is none of its business.
    assert not reasons or longest > 1.4


def test_a_place_is_the_innermost_line_of_our_own() -> None:
    found: list[str] = []

    def fits(micro: int) -> bool:
        found.append(place_of(sys._getframe()))
        return False

    fit.larger_micro(tiny.plan(micro=2, accumulation=2), fits)
    assert found[0].startswith("trainer/native/fit.py:")
    assert found[0].endswith("(larger_micro)")
    assert place_of(None) == "foreign code"
