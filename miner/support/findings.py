"""Findings of the doctor's checks: whether all is well, and if not, how to fix it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum


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


def is_healthy(findings: Iterable[Finding]) -> bool:
    """Return True if a daemon can be started on this."""
    return all(finding.status is not FindingStatus.FAIL for finding in findings)
