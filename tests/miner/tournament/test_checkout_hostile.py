"""A directory whose git configuration starts programs: it is checked and prepared, and nothing of it runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from core.domain.wire import TournamentType
from core.system.files import remove_tree
from miner.tournament.check.checks import check_commit
from miner.tournament.checkout import CloneFailed, clone_repository, remote_url, uncommitted_files
from miner.tournament.prepare import prepare_entry
from tests.miner.tournament.entries import SMALL, open_again
from tests.miner.tournament.repositories import commit_files, git, make_repository

pytestmark = pytest.mark.process


#: Every place of a repository's own configuration that names a program; `RUN name` leaves a trace.
CONFIG = """
[core]
    repositoryformatversion = 1
    fsmonitor = RUN fsmonitor
    hooksPath = HOOKS
    sshCommand = RUN sshCommand
    gitProxy = RUN gitProxy
    askPass = RUN askPass
    pager = RUN pager
    editor = RUN editor
    alternateRefsCommand = RUN alternateRefsCommand
[extensions]
    partialClone = origin
    worktreeConfig = true
[filter "x"]
    clean = RUN clean
    smudge = RUN smudge
    required = true
[filter "p"]
    process = RUN process
[diff]
    external = RUN diff.external
[diff "x"]
    textconv = RUN textconv
    command = RUN diff.command
[merge "x"]
    driver = RUN merge
[uploadpack]
    packObjectsHook = RUN packObjectsHook
[remote "origin"]
    url = ../origin
    uploadpack = RUN remote.uploadpack
    promisor = true
[credential]
    helper = !RUN credential
[gpg]
    program = RUN gpg
[alias]
    clone = !RUN alias
    status = !RUN alias
[submodule "inner"]
    update = !RUN submodule
[include]
    path = included
[includeIf "gitdir:**"]
    path = included
"""
INCLUDED = """
[filter "y"]
    clean = RUN included
"""
WORKTREE = """
[filter "z"]
    clean = RUN config.worktree
"""
HOOKS = (
    *("post-index-change", "post-checkout", "reference-transaction", "pre-commit", "post-commit"),
    *("fsmonitor-watchman", "pre-auto-gc", "sendemail-validate", "post-rewrite", "update", "post-update"),
)


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    (tmp_path / "traces").mkdir()
    return tmp_path / "traces"


@pytest.fixture
def hostile(tmp_path: Path, traces: Path) -> Path:
    tree = tmp_path / "repository"
    attributes = {".gitattributes": "*.txt filter=y diff=x\n*.z filter=z\n*.p filter=p\n"}
    files = dict.fromkeys(("a.txt", "b.z", "c.p", "d"), "one\n")
    make_repository(tree, {**SMALL, **attributes, **files})
    git(tmp_path, "clone", "-q", "--bare", str(tree), str(tmp_path / "origin"))
    make_repository(tree / "inner", {"e.txt": "one\n"})
    git(tree, "-c", "advice.addEmbeddedRepo=false", "add", "inner")
    git(tree, "commit", "-qm", "Submodule")
    git(tree, "push", "-q", "../origin", "main")

    program = tmp_path / "run"
    program.write_text(f'#!/bin/sh\ntouch "{traces}/$1"\nexec cat\n')
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for place in (hooks, tree / ".git/hooks", tree / "inner/.git/hooks"):
        for name in HOOKS:
            (place / name).write_text(f'#!/bin/sh\ntouch "{traces}/hook-{name}"\n')
            (place / name).chmod(0o755)
    program.chmod(0o755)
    for place, text in (
        (tree / ".git/config", CONFIG),
        (tree / ".git/included", INCLUDED),
        (tree / ".git/config.worktree", WORKTREE),
        (tree / "inner/.git/config", "[core]\nrepositoryformatversion = 0\n" + INCLUDED),
    ):
        place.write_text(text.replace("RUN", str(program)).replace("HOOKS", str(hooks)))
    (tree / "inner/.git/info/attributes").write_text("* filter=y\n")
    (tree / ".git/info/attributes").write_text("* filter=x diff=x merge=x\n*.p filter=p\n")
    for name in (*files, "inner/e.txt"):
        (tree / name).write_text("two, not committed\n")
    return tree


def test_plain_git_would_run_them(hostile: Path, traces: Path) -> None:
    """Otherwise the tests below would show nothing."""
    environment = {"PATH": os.environ["PATH"], "HOME": os.devnull}
    for command in ("status", "diff"):
        subprocess.run(
            ["git", "-C", str(hostile), command], env=environment, capture_output=True, check=False
        )
    ran = {path.name for path in traces.iterdir()}
    assert {"clean", "process", "fsmonitor", "hook-post-index-change"} <= ran


def test_a_check_runs_nothing_of_the_directory(hostile: Path, traces: Path, tmp_path: Path) -> None:
    found = check_commit(open_again(tmp_path, offline=False))
    assert not list(traces.iterdir())
    assert f"a plain clone of {tmp_path / 'origin'} has it" in found.text
    assert "not committed, so not checked: a.txt, b.z, c.p and 1 more" in found.notes


def test_an_entry_to_compare_with_runs_nothing_either(hostile: Path, traces: Path, tmp_path: Path) -> None:
    make_repository(tmp_path / "mine", {"a": "1\n"})
    for address in (str(hostile), f"file://{hostile}"):
        place = tmp_path / f"other-{len(address)}"
        clone = clone_repository(address, None, place)
        assert (clone.directory / "a.txt").read_text() == "one\n"
    assert not list(traces.iterdir())


def test_an_entry_is_prepared_and_runs_nothing_of_the_directory(
    hostile: Path, traces: Path, tmp_path: Path
) -> None:
    made = prepare_entry(hostile, tmp_path / "entry", kinds=[TournamentType.TEXT])
    assert not list(traces.iterdir())
    assert made.made_from == git(tmp_path / "origin", "rev-parse", "main")
    assert made.uncommitted == ("a.txt", "b.z", "c.p", "d")


def test_a_configuration_that_never_ends_is_not_waited_for(tmp_path: Path) -> None:
    tree = tmp_path / "repository"
    make_repository(tree, {"a": "1\n"})
    for name in ("config", "packed-refs", "info/exclude"):
        (tree / ".git" / name).unlink(missing_ok=True)
        os.mkfifo(tree / ".git" / name)
    assert clone_repository(str(tree), None, tmp_path / "clone").commit
    assert remote_url(tree) is None
    assert uncommitted_files(tree) == []


def test_branches_and_tags_are_the_same_in_every_form_of_a_repository(tmp_path: Path) -> None:
    tree = tmp_path / "repository"
    first = make_repository(tree, {"a": "1\n"})
    git(tree, "tag", "-am", "First", "v1")
    git(tree, "branch", "side/one")
    second = commit_files(tree, {"a": "2\n"})
    git(tree, "worktree", "add", "-q", "--detach", str(tmp_path / "worktree"), "v1")
    git(tmp_path, "clone", "-q", "--bare", str(tree), str(tmp_path / "bare"))
    git(tmp_path, "clone", "-q", "--shared", str(tree), str(tmp_path / "borrowing"))
    git(tmp_path / "bare", "pack-refs", "--all")
    (tmp_path / "worktree/new").write_text("not committed\n")
    for form, head in {"repository": second, "worktree": first, "bare": second, "borrowing": second}.items():
        clone = clone_repository(str(tmp_path / form), None, tmp_path / f"clone-{form}")
        assert clone.default_head == head, form
        assert git(clone.directory, "rev-parse", "v1^{commit}") == first
    assert git(tmp_path / "clone-bare", "rev-parse", "origin/side/one") == first
    assert uncommitted_files(tmp_path / "worktree") == ["new"]
    assert uncommitted_files(tmp_path / "bare") == []


def test_invalid_paths_are_an_error_without_a_traceback(tmp_path: Path) -> None:
    deep, zero = tmp_path / "deep", tmp_path / "zero"
    make_repository(deep, {"a": "1\n"})
    refs = os.open(deep / ".git/refs/heads", os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=refs)
        below = os.open("d", os.O_RDONLY, dir_fd=refs)
        os.close(refs)
        refs = below
    os.close(refs)
    zero.mkdir()
    (zero / ".git").write_bytes(b"gitdir: a\0b")
    for place in (deep, zero):
        with pytest.raises(CloneFailed, match="cannot be read"):
            clone_repository(str(place), None, tmp_path / "clone")
        assert uncommitted_files(place) == []
    assert remote_url(zero) is None
    remove_tree(deep)
