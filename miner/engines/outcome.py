"""How a run ended: the engine's word, then what the wrapper recorded, then what the machine can tell.

The engine alone is not enough. Docker forgets that memory was the reason when its daemon was down at that
moment, says 255 when only its own helper died, and calls every other end by a signal just "exited"; a local
process that is gone says nothing at all.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from miner.engines.base import Phase, Status, Why
from miner.engines.records import Asked, Exit, read_asked, read_exit, read_start
from miner.engines.wrapper import boot_id

#: What Docker says of a container whose real end it missed.
UNKNOWN_CODE = 255
KILLED_CODE = 128 + signal.SIGKILL


@dataclass(frozen=True, slots=True)
class Word:
    """What the engine itself says of an end, where it can say anything."""

    code: int | None = None
    oom_killed: bool = False
    started_at: float | None = None
    ended_at: float | None = None
    detail: str = ""


def ended(run_dir: Path, word: Word | None = None) -> Status:
    """The status of a run that is over, or that the engine does not know (no word)."""
    start, record, asked = read_start(run_dir), read_exit(run_dir), read_asked(run_dir)
    said = word or Word()
    rebooted = start is not None and start.boot not in ("", this_boot())
    why, detail = _why(said, record, asked, rebooted)
    return Status(
        phase=Phase.LOST if why is Why.LOST else Phase.ENDED,
        why=why,
        code=_code(said, record),
        started_at=said.started_at or (start.at if start else None),
        ended_at=said.ended_at or (record.at if record else None),
        detail="; ".join(part for part in (detail, said.detail) if part),
    )


@lru_cache(maxsize=1)
def this_boot() -> str:
    try:
        return boot_id()
    except OSError:
        return ""


def _code(said: Word, record: Exit | None) -> int | None:
    if record is not None and said.code in (None, UNKNOWN_CODE):
        return record.code
    return said.code


def _why(said: Word, record: Exit | None, asked: Asked | None, rebooted: bool) -> tuple[Why, str]:
    code = _code(said, record)
    signals = record.signals if record else ()
    if record is not None and record.timeout:
        return Why.TIMEOUT, "the engine's own time limit was over"
    if asked is not None and (code != 0 or signals):
        return Why.STOPPED, "killed when asked to" if asked.force else "ended when asked to"
    if code != 0 and (said.oom_killed or (record is not None and record.oom_kills)):
        return Why.OOM_KILLED, "the kernel killed it, or a part of it, for the host's memory"
    if signals:
        return (
            Why.KILLED,
            f"{', '.join(signals)} came from elsewhere: the engine's restart, or somebody's hand",
        )
    if code == 0:
        return Why.OK, ""
    if record is None:
        return _without_record(code, rebooted)
    if code == KILLED_CODE:
        return Why.KILLED, "SIGKILL came from elsewhere: the kernel, or somebody's hand"
    return Why.FAILED, f"exit code {code}"


def _without_record(code: int | None, rebooted: bool) -> tuple[Why, str]:
    """The wrapper itself did not live to record the end."""
    if rebooted:
        return Why.NODE_FAIL, "the machine was started anew meanwhile"
    if code is None:
        return Why.LOST, "the engine does not know it, and no end was recorded"
    if code >= 128:
        return Why.KILLED, f"killed from outside (exit code {code})"
    return Why.FAILED, f"it could not be started (exit code {code})"
