"""What became of a run, from all that is known of its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from miner.engines.base import ASKED_FILE, EXIT_FILE, START_FILE, Phase, Why
from miner.engines.outcome import Word, ended, this_boot


def put(folder: Path, name: str, **content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


OK = {"code": 0}
SEVEN = {"code": 7}
#: The engine's word; exit record; asked to stop; another boot -> why and code.
TABLE: list[tuple[Word | None, dict[str, Any] | None, bool, bool, Why, int | None]] = [
    (Word(0), OK, False, False, Why.OK, 0),
    (Word(7), SEVEN, False, False, Why.FAILED, 7),
    (Word(0), {"code": 0, "oom_kills": 1}, False, False, Why.OK, 0),
    # Docker's word on memory, and the wrapper's where Docker was down.
    (Word(7, oom_killed=True), SEVEN, False, False, Why.OOM_KILLED, 7),
    (Word(137, oom_killed=True), None, False, False, Why.OOM_KILLED, 137),
    (Word(137), {"code": 137, "oom_kills": 1}, False, False, Why.OOM_KILLED, 137),
    # Its own helper died: Docker does not know the code.
    (Word(255), SEVEN, False, False, Why.FAILED, 7),
    (Word(255), None, False, False, Why.KILLED, 255),
    # Asked to by us.
    (Word(143), {"code": 143, "signals": ["SIGTERM"]}, True, False, Why.STOPPED, 143),
    (Word(0), {"code": 0, "signals": ["SIGTERM"]}, True, False, Why.STOPPED, 0),
    (Word(137), None, True, False, Why.STOPPED, 137),
    (None, None, True, False, Why.STOPPED, None),
    # It was over before it heard of it.
    (Word(0), OK, True, False, Why.OK, 0),
    # By others.
    (Word(0), {"code": 0, "signals": ["SIGTERM"]}, False, False, Why.KILLED, 0),
    (Word(143), {"code": 143, "signals": ["SIGTERM"]}, False, False, Why.KILLED, 143),
    (Word(137), None, False, False, Why.KILLED, 137),
    (Word(137), {"code": 137}, False, False, Why.KILLED, 137),
    # By itself.
    (Word(139), {"code": 139}, False, False, Why.FAILED, 139),
    (Word(127), None, False, False, Why.FAILED, 127),
    (Word(3), {"code": 3, "timeout": True, "signals": []}, False, False, Why.TIMEOUT, 3),
    # The engine knows nothing.
    (None, SEVEN, False, False, Why.FAILED, 7),
    (None, OK, False, False, Why.OK, 0),
    (None, None, False, False, Why.LOST, None),
    # The machine went down meanwhile, or after it had ended.
    (None, None, False, True, Why.NODE_FAIL, None),
    (Word(255), None, False, True, Why.NODE_FAIL, 255),
    (None, SEVEN, False, True, Why.FAILED, 7),
]


@pytest.mark.parametrize(("word", "record", "asked", "rebooted", "why", "code"), TABLE)
def test_every_end_has_its_reason(
    word: Word | None,
    record: dict[str, Any] | None,
    asked: bool,
    rebooted: bool,
    why: Why,
    code: int | None,
    tmp_path: Path,
) -> None:
    put(tmp_path, START_FILE, at=100.0, pid=1, boot="another" if rebooted else this_boot())
    if record is not None:
        put(tmp_path, EXIT_FILE, at=200.0, **record)
    if asked:
        put(tmp_path, ASKED_FILE, at=150.0, force=False)
    status = ended(tmp_path, word)
    assert (status.why, status.code) == (why, code)
    assert status.phase is (Phase.LOST if why is Why.LOST else Phase.ENDED)
    assert status.started_at == 100.0
    assert status.ended_at == (200.0 if record else None)
    assert bool(status.detail) is (why is not Why.OK)


def test_the_engine_s_times_and_words_count_first(tmp_path: Path) -> None:
    put(tmp_path, START_FILE, at=100.0)
    put(tmp_path, EXIT_FILE, at=200.0, code=7)
    status = ended(tmp_path, Word(7, started_at=99.0, ended_at=201.0, detail="said by Docker"))
    assert (status.started_at, status.ended_at) == (99.0, 201.0)
    assert status.detail == "exit code 7; said by Docker"


def test_before_the_first_start_nothing_is_known(tmp_path: Path) -> None:
    assert ended(tmp_path).why is Why.LOST
    assert ended(tmp_path / "none").why is Why.LOST
