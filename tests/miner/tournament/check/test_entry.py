"""What an operator names, and what is cloned for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from core.domain.tournament_rules import LARGE_REPOSITORY_BYTES
from miner.backends.docker.images import source_root
from miner.tournament.check.checks import check_clone, check_commit, run_checks
from miner.tournament.check.entry import (
    FindingState,
    Remote,
    is_whole_commit,
    named_source,
    open_entry,
    public_address,
)
from miner.tournament.checkout import CloneFailed
from tests.miner.tournament.entries import NOW, open_again, open_small
from tests.miner.tournament.repositories import commit_files, git, make_repository

pytestmark = pytest.mark.process


def test_nothing_a_commit_an_address_and_a_directory_are_distinguished(tmp_path: Path) -> None:
    here = str(source_root())
    assert named_source(None) == (here, None)
    assert named_source("0123abcd") == (here, "0123abcd")
    assert named_source(str(tmp_path)) == (str(tmp_path), None)
    assert named_source("https://example.com/a/b") == ("https://example.com/a/b", None)
    with pytest.raises(CloneFailed, match="not a directory"):
        named_source(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("git@github.com:you/miner.git", "https://github.com/you/miner"),
        ("ssh://git@github.com/you/miner.git", "https://github.com/you/miner"),
        ("https://ghp_secret@github.com/you/miner", "https://github.com/you/miner"),
        ("https://github.com/you/miner.git", "https://github.com/you/miner.git"),
        ("../miner", "../miner"),
    ],
)
def test_validators_clone_by_https_and_without_the_operators_key(remote: str, address: str) -> None:
    assert public_address(remote) == address


def test_a_commit_has_forty_digits() -> None:
    assert is_whole_commit("A" * 40)
    assert not is_whole_commit("a" * 39)
    assert not is_whole_commit("g" * 40)


def test_whether_a_commit_is_pushed_is_seen_by_a_clone_of_the_remote(tmp_path: Path) -> None:
    entry = open_small(tmp_path, {"a.py": "1\n"}, offline=False)
    assert check_commit(entry).state is FindingState.UNKNOWN
    assert "no remote" in check_commit(entry).text

    origin, repository = tmp_path / "origin", tmp_path / "repository"
    git(tmp_path, "init", "-q", "--bare", "-b", "main", str(origin))
    git(repository, "remote", "add", "origin", "../origin")
    git(repository, "push", "-q", "origin", "main")
    assert check_commit(open_again(tmp_path)).state is FindingState.PASSED

    commit_files(repository, {"a.py": "2\n"})
    found = check_commit(open_again(tmp_path))
    assert found.state is FindingState.FAILED
    assert "no branch or tag" in found.text
    assert "push" in found.to_do


def test_an_address_is_its_own_remote_and_its_code_is_not_trusted(tmp_path: Path) -> None:
    commit = open_small(tmp_path, {"a.py": "1\n"}).clone.commit
    address = f"file://{tmp_path}/repository"
    for trust in (False, True):
        place = tmp_path / f"trusted-{trust}"
        place.mkdir()
        entry = open_entry(address, place, commit=commit, trust=trust, offline=True, now=NOW)
        assert entry.trusted is trust
        assert check_commit(entry).state is FindingState.PASSED
        assert f"a plain clone of {address} has it" in check_commit(entry).text


def test_a_package_is_not_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miner.backends.docker.images.__file__", str(tmp_path / "a/b/c/images.py"))
    with pytest.raises(CloneFailed, match="installed here as a package"):
        named_source(None)


def test_a_remote_that_does_not_answer_fails_nothing(tmp_path: Path) -> None:
    open_small(tmp_path, {"a.py": "1\n"})
    git(tmp_path / "repository", "remote", "add", "origin", "http://127.0.0.1:1/you/miner")
    found = check_commit(open_again(tmp_path, offline=False))
    assert found.state is FindingState.UNKNOWN
    assert "cannot be reached" in found.text


def test_what_is_not_committed_and_a_short_name_are_mentioned(tmp_path: Path) -> None:
    entry = open_small(tmp_path, {"a.py": "1\n"})
    (tmp_path / "repository/a.py").write_text("changed")
    notes = check_commit(open_again(tmp_path, commit=entry.clone.commit[:8])).notes
    assert "not committed, so not checked: a.py" in notes
    assert any("all 40 digits" in note for note in notes)


def test_the_default_branch_is_read_beside_an_older_commit(tmp_path: Path) -> None:
    first = open_small(tmp_path, {"NOTICE": "one\n"}).clone.commit
    second = commit_files(tmp_path / "repository", {"NOTICE": "two\n"})
    entry = open_again(tmp_path, commit=first)
    assert (entry.tree / "NOTICE").read_text() == "one\n"
    assert (entry.head / "NOTICE").read_text() == "two\n"
    assert entry.head_commit == second
    assert entry.files() == ["NOTICE"]


def test_a_large_history_is_doubted(tmp_path: Path) -> None:
    entry = open_small(tmp_path, {"a.py": "1\n"})
    assert check_clone(entry).state is FindingState.PASSED
    large = replace(entry, clone=replace(entry.clone, size_bytes=LARGE_REPOSITORY_BYTES + 1))
    assert check_clone(large).state is FindingState.UNKNOWN


def test_a_remote_that_cannot_be_cloned_in_time_fails_the_clone_and_not_the_commit(tmp_path: Path) -> None:
    entry = open_small(tmp_path, {"a.py": "1\n"})
    slow = Remote("https://example.com/a/b", None, "not done after 60 s", answered=True, too_slow=True)
    assert check_clone(replace(entry, remote=slow)).state is FindingState.FAILED
    assert check_commit(replace(entry, remote=slow)).state is FindingState.UNKNOWN


def test_an_address_with_a_password_is_not_said(tmp_path: Path) -> None:
    said: list[str] = []
    make_repository(tmp_path / "repository", {"a": ""})
    secret = "https://me:hunter2@localhost:9/a/b"
    entry = open_again(tmp_path, others=[secret], say=said.append)
    assert entry.lost[0][0] == "https://localhost:9/a/b"
    assert "hunter2" not in f"{said}{entry.lost}"


def test_a_hostile_tree_costs_neither_memory_nor_a_traceback(tmp_path: Path) -> None:
    """Links to a device without an end, expressions deeper than recursion, names that are bytes."""
    tree = tmp_path / "repository"
    make_repository(tree, {})
    for name in (".dockerignore", "LICENSE.md", "NOTICE", "dockerfiles/standalone-text-trainer.dockerfile"):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).symlink_to("/dev/zero")
    (tree / "trainer").mkdir()
    (tree / "trainer/link.py").symlink_to("/dev/zero")
    (tree / "calls.py").write_text(f"exec(a{'.b' * 900}(b64decode('')))\n")
    (tree / "signs.py").write_text(f"b64decode\nx = {'-' * 100_000}1\n")
    (tree / "\udcff\x1b.py").write_text("x = 1\n")
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "hostile")
    findings = {finding.rule: finding for finding in run_checks(open_again(tmp_path))}
    assert "LICENSE.md cannot be read: not a file of the repository" in findings["licence and notice"].text
    assert findings["Dockerfiles"].state is FindingState.FAILED
    assert findings["obfuscation"].state is not FindingState.PASSED


def test_an_address_for_ssh_is_cloned_as_validators_do_without_its_keys(tmp_path: Path) -> None:
    with pytest.raises(CloneFailed, match=r"https://127\.0\.0\.1/you/miner"):
        open_entry("git@127.0.0.1:you/miner.git", tmp_path, now=NOW)
