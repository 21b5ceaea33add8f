"""A test that hangs fails with its stacks instead of taking the whole run with it, and in CI a failure is
shown when it happens: what is cut off later has still said why.

A plugin of pytest's: `tests/conftest.py` takes its hooks in.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest

#: No part of a test takes a third of this, on a machine that does something else beside it.
LIMIT_S = float(os.environ.get("GOD_MINER_TEST_LIMIT_S", "900"))
#: What the code under test may swallow comes again; a test that outlives this is beyond Python's reach.
AGAIN_S = 30.0
GRACE_S = 300.0
SHOWN_LINES = 60


class Hung(BaseException):
    """Not an `Exception`: the code under test shall not handle it."""


@contextmanager
def watched(name: str, limit_s: float, where: int) -> Iterator[None]:
    """Raises `Hung` in the main thread after `limit_s`, the stacks of all threads written to `where` before;
    ends the process where even that helps nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    problem: Hung | None = None

    def over(*_: object) -> None:
        nonlocal problem
        os.write(where, f"\n{name}: not done after {limit_s:g} s; where every thread is:\n".encode())
        faulthandler.dump_traceback(where)
        problem = Hung(f"not done after {limit_s:g} s")
        raise problem

    process = os.getpid()
    former = signal.signal(signal.SIGALRM, over)
    before = signal.setitimer(signal.ITIMER_REAL, limit_s, AGAIN_S)
    faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=where)
    try:
        yield
        if problem is not None:  # a callback of an event loop, say, whose errors are only logged
            raise problem
    finally:
        if os.getpid() == process:  # and not a child of its own making, where neither timer runs
            faulthandler.cancel_dump_traceback_later()
            signal.setitimer(signal.ITIMER_REAL, *before)
            signal.signal(signal.SIGALRM, signal.SIG_DFL if former is None else former)


def signals_given_back() -> None:
    """A shell that starts the tests in the background has SIGINT and SIGQUIT ignored, which every process
    that they start would inherit: a daemon told to stop by SIGINT would not hear it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


class Watch:
    def __init__(self) -> None:
        # The tests' own output is captured; this one is not.
        self.where = os.dup(2)

    def _part(self, item: pytest.Item, part: str) -> Generator[None, object, object]:
        with watched(f"{item.nodeid} ({part})", LIMIT_S, self.where):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self._part(item, "setup"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self._part(item, "call"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self._part(item, "teardown"))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and os.environ.get("CI") == "true":
            lines = report.longreprtext.splitlines()
            reported = [
                f"\n{report.nodeid} failed ({report.when}); the end of what it says:",
                *lines[-SHOWN_LINES:],
            ]
            print("\n".join(reported), file=sys.__stdout__, flush=True)


def start(config: pytest.Config) -> None:
    signals_given_back()
    config.pluginmanager.register(Watch(), "god-miner-watch")
