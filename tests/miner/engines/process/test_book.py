"""What the engine remembers, and how it knows who lives."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from miner.engines.outcome import this_boot
from miner.engines.process.book import LOCK, NOTE, Book, Holder


@pytest.fixture
def book(tmp_path: Path) -> Book:
    made = Book(tmp_path / "runs")
    made.write("key-1", Path("/r/1"), {"job": "1"}, (Path("/c/1"),))
    return made


def test_what_was_written_is_known_to_the_next(book: Book) -> None:
    again = Book(book.folder)
    assert list(again.keys()) == ["key-1"]
    assert again.run_dir("key-1") == Path("/r/1")
    assert again.cgroups("key-1") == (Path("/c/1"),)
    again.forget("key-1")
    assert list(book.keys()) == []
    assert book.run_dir("key-1") is None


def test_it_lives_as_long_as_somebody_holds_the_lock(book: Book) -> None:
    assert not book.lives("key-1")
    lock = book.locked("key-1")
    assert lock is not None
    assert book.lives("key-1")
    assert book.locked("key-1") is None
    child = os.dup(lock)
    os.close(lock)
    assert book.lives("key-1")
    os.close(child)
    assert not book.lives("key-1")


def test_who_looks_does_not_disturb_who_looks(book: Book) -> None:
    lock = book.locked("key-1")
    assert lock is not None
    os.close(lock)
    assert not any(book.lives("key-1") for _ in range(3))


def test_the_holder_is_who_signed_since_this_start_of_the_machine(book: Book) -> None:
    path = book.place("key-1") / LOCK
    assert book.holder("key-1") is None
    path.write_text(json.dumps({"pid": 7, "started": 11, "boot": this_boot()}))
    assert book.holder("key-1") == Holder(7, 11)
    assert book.was_started("key-1")
    path.write_text(json.dumps({"pid": 7, "started": 11, "boot": "another"}))
    assert book.holder("key-1") is None


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"pid": "x"}', '{"run_dir": 1, "cgroups": null}']
)
def test_a_torn_note_is_no_trouble(content: str, book: Book) -> None:
    (book.place("key-1") / NOTE).write_text(content)
    (book.place("key-1") / LOCK).write_text(content)
    assert book.run_dir("key-1") is None
    assert book.cgroups("key-1") == ()
    assert book.holder("key-1") is None


def test_without_a_folder_there_is_nothing(tmp_path: Path) -> None:
    none = Book(tmp_path / "none")
    assert list(none.keys()) == []
    assert not none.lives("x")
    assert not none.was_started("x")
    assert none.errors("x") == ""
    none.forget("x")
