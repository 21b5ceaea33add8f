"""Read what a run leaves in its directory: start, exit and stop records, its log, and how it ended.

The directory may be written by hostile code, so everything is read as untrusted. The backend's own answer
about an end is not enough: Docker forgets an out-of-memory kill while its daemon is down, reports 255 when
only its helper died, and calls every other signal just "exited"; a local process that is gone reports
nothing.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from core.runs.run_files import LOG_FILE
from core.system.wrapper import boot_id
from miner.backends.base import EXIT_FILE, START_FILE, STOP_RECORD_FILE, EndCause, RunPhase, RunStatus
from miner.support.untrusted_files import open_untrusted, read_untrusted, write_untrusted

log = logging.getLogger(__name__)


class _RunRecord(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    at: float = Field(ge=0, le=1e11, allow_inf_nan=False)


class StartRecord(_RunRecord):
    pid: int = 0
    #: The kernel's name for this run of the machine.
    boot: str = Field(default="", max_length=100)


class ExitRecord(_RunRecord):
    #: 128 and the signal's number for an end by signal, as shells have it.
    code: int = Field(ge=0, le=255)
    #: The signals that ended it.
    signals: tuple[str, ...] = Field(default=(), max_length=100)
    timeout: bool = False
    #: How often the kernel killed something of it for memory.
    oom_kills: int = Field(default=0, ge=0)


class StopRecord(_RunRecord):
    force: bool = False


RunRecordT = TypeVar("RunRecordT", bound=_RunRecord)


def read_start(run_dir: Path) -> StartRecord | None:
    return _read_record(StartRecord, run_dir, START_FILE)


def read_exit(run_dir: Path) -> ExitRecord | None:
    return _read_record(ExitRecord, run_dir, EXIT_FILE)


def read_stop_record(run_dir: Path) -> StopRecord | None:
    return _read_record(StopRecord, run_dir, STOP_RECORD_FILE)


def write_stop_record(run_dir: Path, *, force: bool) -> None:
    """Record a requested stop; on a full disk that fails, and the run is stopped all the same."""
    try:
        write_untrusted(run_dir / STOP_RECORD_FILE, json.dumps({"at": time.time(), "force": force}).encode())
    except OSError as error:
        log.warning("%s: the request to stop could not be recorded (%s)", run_dir, error.strerror)


def _read_record(kind: type[RunRecordT], run_dir: Path, name: str) -> RunRecordT | None:
    text = read_untrusted(run_dir / name)
    try:
        return kind.model_validate_json(text) if text else None
    except ValidationError:
        return None


#: The most that one call reads.
LOG_PIECE_BYTES = 1 << 18


class LogPosition(NamedTuple):
    """Position in a log: the file's inode and a byte offset."""

    inode: int = 0
    offset: int = 0


LOG_START = LogPosition()


def read_log(
    run_dir: Path, position: LogPosition = LOG_START, limit: int = LOG_PIECE_BYTES
) -> tuple[bytes, LogPosition]:
    """Return what is new since `position`, and the next position. After a rotation the new file is read from
    its beginning; without a log there is nothing."""
    try:
        with open_untrusted(run_dir / LOG_FILE) as file:
            status = os.fstat(file)
            offset = (
                position.offset
                if position.inode == status.st_ino and position.offset <= status.st_size
                else 0
            )
            data = os.pread(file, limit, offset)
    except OSError:
        return b"", position
    return data, LogPosition(status.st_ino, offset + len(data))


def log_tail(run_dir: Path, size: int = 4096) -> str:
    """The last lines, for a message to people."""
    try:
        with open_untrusted(run_dir / LOG_FILE) as file:
            written = os.fstat(file).st_size
            start = max(0, written - size)
            # `pread` allocates the requested size at once, however little there is to read.
            text = os.pread(file, min(size, written), start).decode(errors="replace")
    except OSError:
        return ""
    return text.partition("\n")[2] if start and "\n" in text else text


#: Docker's exit code of a container whose real end it missed.
UNKNOWN_CODE = 255
KILLED_CODE = 128 + signal.SIGKILL


@dataclass(frozen=True, slots=True)
class BackendEndReport:
    """Report of an end by the backend itself, as far as it has one."""

    code: int | None = None
    oom_killed: bool = False
    started_at: float | None = None
    ended_at: float | None = None
    detail: str = ""
    #: Whether it ran on this machine, whose restarts are known.
    here: bool = True


def end_status(run_dir: Path, report: BackendEndReport | None = None) -> RunStatus:
    """The status of a run that is over, or that the backend does not know (no report)."""
    start, record, stop = read_start(run_dir), read_exit(run_dir), read_stop_record(run_dir)
    end = report or BackendEndReport()
    rebooted = end.here and start is not None and start.boot not in ("", current_boot())
    why, detail = _end_cause(end, record, stop, rebooted)
    return RunStatus(
        phase=RunPhase.LOST if why is EndCause.LOST else RunPhase.ENDED,
        why=why,
        code=_exit_code(end, record),
        started_at=end.started_at or (start.at if start else None),
        ended_at=end.ended_at or (record.at if record else None),
        detail="; ".join(part for part in (detail, end.detail) if part),
    )


@lru_cache(maxsize=1)
def current_boot() -> str:
    try:
        return boot_id()
    except OSError:
        return ""


def _exit_code(end: BackendEndReport, record: ExitRecord | None) -> int | None:
    if record is not None and end.code in (None, UNKNOWN_CODE):
        return record.code
    return end.code


def _end_cause(
    end: BackendEndReport, record: ExitRecord | None, stop: StopRecord | None, rebooted: bool
) -> tuple[EndCause, str]:
    code = _exit_code(end, record)
    signals = record.signals if record else ()
    if record is not None and record.timeout:
        return EndCause.TIMEOUT, "the backend's own time limit was reached"
    if stop is not None and (code != 0 or signals):
        return EndCause.STOPPED, "killed on request" if stop.force else "ended on request"
    if code != 0 and (end.oom_killed or (record is not None and record.oom_kills)):
        return EndCause.OOM_KILLED, "the kernel killed it, or a part of it: the host's memory ran out"
    if signals:
        return (
            EndCause.KILLED,
            f"{', '.join(signals)} came from elsewhere: the backend was restarted, or somebody sent it",
        )
    if code == 0:
        return EndCause.OK, ""
    if record is None:
        return _cause_without_record(code, rebooted)
    if code == KILLED_CODE:
        return EndCause.KILLED, "SIGKILL came from elsewhere: the kernel, or somebody sent it"
    return EndCause.FAILED, f"exit code {code}"


def _cause_without_record(code: int | None, rebooted: bool) -> tuple[EndCause, str]:
    """The wrapper itself ended before it could record the end."""
    if rebooted:
        return EndCause.NODE_FAIL, "the machine was restarted meanwhile"
    if code is None:
        return EndCause.LOST, "the backend does not know it, and no end was recorded"
    if code >= 128:
        return EndCause.KILLED, f"killed from outside (exit code {code})"
    return EndCause.FAILED, f"it could not be started (exit code {code})"
