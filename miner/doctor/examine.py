"""Run the checks, all at the same time, each within its own time limit, and collect their findings.

A check that raises or hangs is a finding too: the operator needs no traceback.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from miner.settings import Settings


class FindingStatus(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    #: Could not be checked here; the detail says why.
    SKIP = "skip"


@dataclass(frozen=True)
class Finding:
    """One result: what was checked, what was found, and, unless all is well, how to fix it."""

    status: FindingStatus
    what: str
    detail: str
    fix: str = ""

    def __post_init__(self) -> None:
        if self.status in (FindingStatus.WARN, FindingStatus.FAIL) and not self.fix:
            raise ValueError(f"the finding {self.what!r} is a {self.status} and does not say how to fix it")

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def ok(what: str, detail: str) -> Finding:
    return Finding(FindingStatus.OK, what, detail)


def warn(what: str, detail: str, fix: str) -> Finding:
    return Finding(FindingStatus.WARN, what, detail, fix)


def fail(what: str, detail: str, fix: str) -> Finding:
    return Finding(FindingStatus.FAIL, what, detail, fix)


def skip(what: str, detail: str, fix: str = "") -> Finding:
    return Finding(FindingStatus.SKIP, what, detail, fix)


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


def is_healthy(findings: Iterable[Finding]) -> bool:
    """Whether a daemon can be started on this."""
    return all(finding.status is not FindingStatus.FAIL for finding in findings)
