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
