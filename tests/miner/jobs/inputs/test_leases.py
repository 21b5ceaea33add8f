"""Which job needs which model, in files."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from miner.jobs.inputs import leases as module
from miner.jobs.inputs.leases import Leases
from miner.jobs.ports import StepFailed
from miner.jobs.states import EndReason


def test_leases_hold_until_they_are_released_also_for_other_processes(tmp_path: Path) -> None:
    leases = Leases(tmp_path / "leases")
    assert leases.by_model() == {}
    leases.hold(2, "a/b")
    leases.hold(1, "a/b")
    leases.hold(3, "gpt2")
    assert Leases(tmp_path / "leases").by_model() == {"a/b": [1, 2], "gpt2": [3]}
    leases.hold(3, "a/b")
    leases.release(1)
    leases.release(1)
    leases.release(99)
    assert leases.by_model() == {"a/b": [2, 3]}


def test_holding_again_writes_nothing(tmp_path: Path) -> None:
    leases = Leases(tmp_path)
    leases.hold(1, "a/b")
    before = (tmp_path / "1.json").stat().st_ino
    leases.hold(1, "a/b")
    assert (tmp_path / "1.json").stat().st_ino == before


def test_what_ended_without_a_word_is_forgotten_at_the_start(tmp_path: Path) -> None:
    leases = Leases(tmp_path)
    for job in (1, 2, 3):
        leases.hold(job, "a/b")
    leases.release_all_but({2, 7})
    assert leases.by_model() == {"a/b": [2]}


def test_rubbish_is_no_lease(tmp_path: Path) -> None:
    for name, text in {
        "1.json": "",
        "2.json": "[]",
        "3.json": '{"model": 5}',
        "x.json": '{"model": "a/b"}',
    }.items():
        (tmp_path / name).write_text(text)
    assert Leases(tmp_path).by_model() == {}


def test_a_full_disk_is_waited_for_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_atomically", full)
    with pytest.raises(StepFailed) as caught:
        Leases(tmp_path).hold(1, "a/b")
    assert caught.value.reason is EndReason.DISK_FULL
