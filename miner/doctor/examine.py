"""Runs the checks, all at the same time, each within its own time limit.

A check that raises or hangs is a finding too: nobody calls a doctor to read a traceback.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from miner.doctor.finding import Finding, Status, fail
from miner.settings import Settings

log = logging.getLogger(__name__)

DEFAULT_LIMIT_SECONDS = 15.0


@dataclass(frozen=True)
class Surroundings:
    """What a check may look at."""

    settings: Settings
    env_file: Path = Path(".env")


@dataclass(frozen=True)
class Check:
    """One examination. It may find several things."""

    name: str
    run: Callable[[Surroundings], Iterable[Finding]]
    limit_seconds: float = DEFAULT_LIMIT_SECONDS


def examine(surroundings: Surroundings, checks: Iterable[Check]) -> list[Finding]:
    """Everything that the checks find, in their order."""
    running = [_Run(check, surroundings) for check in checks]
    return [finding for run in running for finding in run.findings()]


@dataclass
class _Run:
    """A check in a thread of its own: unlike those of a pool, it is not waited for when the program ends."""

    check: Check
    surroundings: Surroundings
    started: float = field(default_factory=time.monotonic)
    _found: list[Finding] = field(default_factory=list)
    _done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        threading.Thread(target=self._run, name=f"doctor-{self.check.name}", daemon=True).start()

    def findings(self) -> list[Finding]:
        left = self.check.limit_seconds - (time.monotonic() - self.started)
        if self._done.wait(max(left, 0)):
            return self._found
        return [
            *self._found,
            fail(
                self.check.name,
                f"this check was not over after {self.check.limit_seconds:g} s",
                "something does not answer: look at the disk, the network and the machine's load",
            ),
        ]

    def _run(self) -> None:
        try:
            # One by one, so that what was found before it broke or hung is told.
            for finding in self.check.run(self.surroundings):
                self._found.append(finding)
        except Exception as error:
            log.debug("check %s broke", self.check.name, exc_info=True)
            self._found.append(
                fail(
                    self.check.name,
                    f"this check broke: {type(error).__name__}: {error}",
                    "run it again with LOG_LEVEL=DEBUG and report what it prints",
                )
            )
        finally:
            self._done.set()


def is_healthy(findings: Iterable[Finding]) -> bool:
    """Whether a daemon can be started on this."""
    return all(finding.status is not Status.FAIL for finding in findings)
