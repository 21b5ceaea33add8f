"""What the wrapper and the engine note in a run folder, read with the distrust that the folder deserves."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from miner.engines.base import ASKED_FILE, EXIT_FILE, START_FILE
from miner.engines.untrusted import put, read_small


class _Note(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    at: float = Field(ge=0, le=1e11, allow_inf_nan=False)


class Start(_Note):
    pid: int = 0
    #: The kernel's name for this run of the machine.
    boot: str = Field(default="", max_length=100)


class Exit(_Note):
    #: 128 and the signal's number for an end by signal, as shells have it.
    code: int = Field(ge=0, le=255)
    #: Those that asked it to end.
    signals: tuple[str, ...] = Field(default=(), max_length=100)
    timeout: bool = False
    #: How often the kernel killed something of it for memory.
    oom_kills: int = Field(default=0, ge=0)


class Asked(_Note):
    force: bool = False


N = TypeVar("N", bound=_Note)


def read_start(run_dir: Path) -> Start | None:
    return _read(Start, run_dir, START_FILE)


def read_exit(run_dir: Path) -> Exit | None:
    return _read(Exit, run_dir, EXIT_FILE)


def read_asked(run_dir: Path) -> Asked | None:
    return _read(Asked, run_dir, ASKED_FILE)


def write_asked(run_dir: Path, *, force: bool) -> None:
    """`OSError` when the disk will not have it; the stop itself must not wait for that."""
    put(run_dir, ASKED_FILE, json.dumps({"at": time.time(), "force": force}).encode())


def _read(kind: type[N], run_dir: Path, name: str) -> N | None:
    found = read_small(run_dir, name)
    try:
        return kind.model_validate_json(found) if found else None
    except ValidationError:
        return None
