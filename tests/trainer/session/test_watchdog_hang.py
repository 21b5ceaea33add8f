"""A process that stands still ends, with a reason."""

from __future__ import annotations

import re
import sys
import threading
from typing import Any

import pytest

from tests.trainer.native import tiny
from trainer.native import speed
from trainer.session import watchdog
from trainer.session.watchdog import HangWatchdog, own_frame

pytestmark = pytest.mark.small


def test_only_a_process_that_does_nothing_is_reported_and_with_the_place(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    now, looked, hung = 0.0, threading.Semaphore(0), threading.Event()
    reasons: list[str] = []

    def monotonic() -> float:
        if threading.current_thread().name == "watch":
            looked.release()
        return now

    def on_hang(reason: str) -> None:
        reasons.append(reason)
        hung.set()

    monkeypatch.setattr(watchdog.time, "monotonic", monotonic)
    monkeypatch.setattr(watchdog, "_CHECK_EVERY_S", 0.01)
    with HangWatchdog(100.0, on_hang) as watch:
        for _ in range(5):
            now += 60
            watch.heartbeat()
            assert looked.acquire(timeout=60)
        assert not reasons
        now += 101
        assert hung.wait(timeout=60)
    (reason,) = reasons
    assert "nothing done for 101 s" in reason
    assert "test_only_a_process_that_does_nothing" in capfd.readouterr().err


#: A function of torch's, as far as its file's name says.
_WAIT = compile("def wait(then): return then()", "/x/torch/distributed/c10d.py", "exec")


def test_a_place_is_the_innermost_line_of_our_own_and_whether_it_waits_for_others() -> None:
    torchs: dict[str, Any] = {}
    exec(_WAIT, torchs)
    places: list[str] = []

    def fits(micro: int) -> bool:
        places.append(own_frame(sys._getframe()))
        places.append(torchs["wait"](lambda: own_frame(sys._getframe())))
        return False

    speed.larger_micro(tiny.plan(micro=2, accumulation=2), fits)
    assert re.fullmatch(r"trainer/native/speed\.py:\d+ \(larger_micro\)", places[0])
    assert places[1].endswith("(larger_micro, waiting for the other processes)")
    assert own_frame(None) == "foreign code"
