"""Run the checks, all at the same time, each within its own time limit, and collect their findings.

A check that raises or hangs is a finding too: the operator needs no traceback.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from miner.settings import Settings
from miner.support.findings import Finding, fail

log = logging.getLogger(__name__)

DEFAULT_LIMIT_SECONDS = 15.0


@dataclass(frozen=True)
class CheckContext:
    """The input of every check."""

    settings: Settings
    env_file: Path = Path(".env")


@dataclass(frozen=True)
class DoctorCheck:
    """One check. It may have several findings."""

    name: str
    run: Callable[[CheckContext], Iterable[Finding]]
    limit_seconds: float = DEFAULT_LIMIT_SECONDS


def examine(context: CheckContext, checks: Iterable[DoctorCheck]) -> list[Finding]:
    """Run all checks at once; return their findings in the order of the checks."""
    running = [_CheckRun(check, context) for check in checks]
    return [finding for run in running for finding in run.findings()]


@dataclass
class _CheckRun:
    """A check in a daemon thread: unlike those of a pool, it is not waited for when the program ends."""

    check: DoctorCheck
    context: CheckContext
    started: float = field(default_factory=time.monotonic)
    _findings: list[Finding] = field(default_factory=list)
    _done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        threading.Thread(target=self._run, name=f"doctor-{self.check.name}", daemon=True).start()

    def findings(self) -> list[Finding]:
        left = self.check.limit_seconds - (time.monotonic() - self.started)
        if self._done.wait(max(left, 0)):
            return self._findings
        return [
            *self._findings,
            fail(
                self.check.name,
                f"this check had not ended after {self.check.limit_seconds:g} s",
                "something does not answer: check the disk, the network and the machine's load",
            ),
        ]

    def _run(self) -> None:
        try:
            # One by one, so that findings from before it broke or hung are kept.
            for finding in self.check.run(self.context):
                self._findings.append(finding)
        except Exception as error:
            log.debug("check %s broke", self.check.name, exc_info=True)
            self._findings.append(
                fail(
                    self.check.name,
                    f"this check broke: {type(error).__name__}: {error}",
                    "run it again with LOG_LEVEL=DEBUG and report what it prints",
                )
            )
        finally:
            self._done.set()
