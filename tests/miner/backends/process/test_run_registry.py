"""What the process backend records of its runs, and how it knows which are alive."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from miner.backends.process.run_registry import LOCK_FILE, RUN_NOTE_FILE, LockHolder, RunRegistry
from miner.backends.run_folder import current_boot


@pytest.fixture
def registry(tmp_path: Path) -> RunRegistry:
    registry = RunRegistry(tmp_path / "runs")
    registry.write("key-1", Path("/r/1"), {"job": "1"}, (Path("/c/1"),))
    return registry


def test_what_was_written_is_known_to_the_next(registry: RunRegistry) -> None:
    again = RunRegistry(registry.folder)
    assert list(again.keys()) == ["key-1"]
    assert again.run_dir("key-1") == Path("/r/1")
    assert again.cgroups("key-1") == (Path("/c/1"),)
    again.forget("key-1")
    assert list(registry.keys()) == []
    assert registry.run_dir("key-1") is None


def test_a_run_is_alive_while_its_lock_is_held(registry: RunRegistry) -> None:
    assert not registry.is_alive("key-1")
    lock = registry.take_lock("key-1")
    assert lock is not None
    assert registry.is_alive("key-1")
    assert registry.take_lock("key-1") is None
    child = os.dup(lock)
    os.close(lock)
    assert registry.is_alive("key-1")
    os.close(child)
    assert not registry.is_alive("key-1")


def test_the_lock_holder_is_known_only_since_the_last_boot(registry: RunRegistry) -> None:
    path = registry.directory("key-1") / LOCK_FILE
    assert registry.lock_holder("key-1") is None
    path.write_text(json.dumps({"pid": 7, "started": 11, "boot": current_boot()}))
    assert registry.lock_holder("key-1") == LockHolder(7, 11)
    assert registry.was_started("key-1")
    path.write_text(json.dumps({"pid": 7, "started": 11, "boot": "another"}))
    assert registry.lock_holder("key-1") is None


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"pid": "x"}', '{"run_dir": 1, "cgroups": null}']
)
def test_a_torn_run_note_is_ignored(content: str, registry: RunRegistry) -> None:
    (registry.directory("key-1") / RUN_NOTE_FILE).write_text(content)
    (registry.directory("key-1") / LOCK_FILE).write_text(content)
    assert registry.run_dir("key-1") is None
    assert registry.cgroups("key-1") == ()
    assert registry.lock_holder("key-1") is None


def test_without_a_folder_there_is_nothing(tmp_path: Path) -> None:
    none = RunRegistry(tmp_path / "none")
    assert list(none.keys()) == []
    assert not none.is_alive("x")
    assert not none.was_started("x")
    assert none.errors("x") == ""
    none.forget("x")
