"""What an examination finds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    #: Could not be looked at here, and says why; neither good nor bad.
    SKIP = "skip"


@dataclass(frozen=True)
class Finding:
    """One thing looked at: what it is, what was found, and, unless all is well, what to do about it."""

    status: Status
    what: str
    detail: str
    fix: str = ""

    def __post_init__(self) -> None:
        if self.status in (Status.WARN, Status.FAIL) and not self.fix:
            raise ValueError(f"the finding {self.what!r} is a {self.status} and does not say how to fix it")

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def ok(what: str, detail: str) -> Finding:
    return Finding(Status.OK, what, detail)


def warn(what: str, detail: str, fix: str) -> Finding:
    return Finding(Status.WARN, what, detail, fix)


def fail(what: str, detail: str, fix: str) -> Finding:
    return Finding(Status.FAIL, what, detail, fix)


def skip(what: str, detail: str, fix: str = "") -> Finding:
    return Finding(Status.SKIP, what, detail, fix)
