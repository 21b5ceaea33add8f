"""Small git repositories for tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

_WHO = {"NAME": "Test", "EMAIL": "test@example.com", "DATE": "2026-01-01T00:00:00Z"}


def git(directory: Path, *arguments: str) -> str:
    """What git says, without any settings of this machine."""
    who = {f"GIT_{role}_{part}": value for role in ("AUTHOR", "COMMITTER") for part, value in _WHO.items()}
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": os.devnull,
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        **who,
    }
    done = subprocess.run(
        ["git", "-C", str(directory), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def make_repository(directory: Path, files: Mapping[str, str | bytes]) -> str:
    """A repository with one commit on `main`; the commit."""
    directory.mkdir(parents=True, exist_ok=True)
    git(directory, "init", "-q", "-b", "main")
    return commit_files(directory, files)


def commit_files(directory: Path, files: Mapping[str, str | bytes]) -> str:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    git(directory, "add", "-A", "-f")
    git(directory, "commit", "-q", "-m", "Commit", "--allow-empty")
    return git(directory, "rev-parse", "HEAD")


def commit_deep_file(directory: Path, depth: int) -> str:
    """A repository whose one file is so many directories down, made without a checkout of it."""
    directory.mkdir()
    git(directory, "init", "-q", "-b", "main")
    (directory / "file").write_text("text")
    blob = git(directory, "hash-object", "-w", "file")
    git(directory, "update-index", "--add", "--cacheinfo", f"100644,{blob},{'d/' * depth}file")
    git(directory, "commit", "-q", "-m", "Commit")
    return git(directory, "rev-parse", "HEAD")
