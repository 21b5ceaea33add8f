"""The digests that put copies out of a tournament."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from miner.tournament.check.checks import check_copies, check_distinct, normalized_text, tree_digest
from miner.tournament.check.entry import FindingState
from tests.miner.tournament.entries import open_again, open_small
from tests.miner.tournament.repositories import git, make_repository

pytestmark = pytest.mark.process


CODE = "# A trainer.\nimport os\n\n\ndef train(rows):\n    return  sorted(rows)\n"
RENAMED = "# Another text,\n# on two lines.\nimport os\ndef train(rows):\n\treturn sorted(rows)   \n"
FILES = {"trainer/text.py": CODE, "LICENSE.md": "Ours\n", "logo.bin": "text\n"}


def test_the_digest_is_over_sorted_paths_and_normalized_texts(tmp_path: Path) -> None:
    make_repository(tmp_path / "tree", {"b.txt": "two  words\n\n", "a.py": "# no\n x \n", "c.txt": b"a\0b"})
    expected = hashlib.sha256(b"a.py\0x\0b.txt\0two words\0").hexdigest()
    assert tree_digest(tmp_path / "tree") == expected


def test_comments_blanks_and_licences_do_not_make_another_entry() -> None:
    assert normalized_text(CODE) == normalized_text(RENAMED)
    assert normalized_text("a\nb") != normalized_text("b\na")


def test_a_copy_with_other_comments_is_found(tmp_path: Path) -> None:
    make_repository(tmp_path / "other", {**FILES, "trainer/text.py": RENAMED, "LICENSE.md": "Theirs\n"})
    entry = open_small(tmp_path, FILES, others=[str(tmp_path / "other")])
    found = check_copies(entry)
    assert found.state is FindingState.FAILED
    assert "the same digest (T1)" in found.text


def test_the_same_commit_is_found(tmp_path: Path) -> None:
    make_repository(tmp_path / "repository", FILES)
    git(tmp_path, "clone", "-q", str(tmp_path / "repository"), str(tmp_path / "other"))
    found = check_copies(open_again(tmp_path, others=[str(tmp_path / "other")]))
    assert found.state is FindingState.FAILED
    assert "the same commit (T0)" in found.text


def test_different_code_is_not_called_passed(tmp_path: Path) -> None:
    """The rest of the field is not known."""
    make_repository(tmp_path / "other", {**FILES, "trainer/text.py": CODE + "x = 1\n"})
    found = check_copies(open_small(tmp_path, FILES, others=[str(tmp_path / "other")]))
    assert found.state is FindingState.UNKNOWN
    assert any(note.startswith("T1 ") for note in found.notes)


def test_an_entry_that_cannot_be_cloned_is_only_mentioned(tmp_path: Path) -> None:
    found = check_copies(open_small(tmp_path, FILES, others=[str(tmp_path / "nowhere")]))
    assert found.state is FindingState.UNKNOWN
    assert any("nowhere cannot be compared" in note for note in found.notes)


def test_only_code_that_a_training_may_run_makes_an_entry_distinct(tmp_path: Path) -> None:
    changed = {**FILES, "trainer/text.py": CODE + "x = 1\n", "docs/page.md": "more\n"}
    make_repository(tmp_path / "one", {**FILES, "docs/page.md": "much\n"})
    make_repository(tmp_path / "two", changed)
    others = [str(tmp_path / "one"), str(tmp_path / "two")]
    found = check_distinct(open_small(tmp_path, FILES, others=others))
    assert found.state is FindingState.UNKNOWN
    assert f"no code differs from {others[0]}: all who enter that are copies of each other" in found.notes
    assert f"code unlike {others[1]}: trainer/text.py" in found.notes
