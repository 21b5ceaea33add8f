"""The context of a build: what of a commit a builder is sent, and whether COPY finds its sources there."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from pathlib import Path

from miner.tournament.checkout import read_inside


def context_files(tree: Path, files: Sequence[str]) -> list[str]:
    """What of these files a build is sent."""
    try:
        lines = read_inside(tree, tree / ".dockerignore").decode("utf-8", "replace").splitlines()
    except OSError:
        return list(files)
    rules = []
    for line in lines:
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        keeps = pattern.startswith("!")
        cleaned = pattern.removeprefix("!").strip().strip("/").removeprefix("./")
        if cleaned:
            rules.append((keeps, _ignore_pattern(cleaned)))
    return [name for name in files if not _ignored(name, rules)]


def is_in_context(path: str, context: Sequence[str]) -> bool:
    """Whether a source of COPY names anything that the build is sent."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts:
        return bool(context)
    if ".." in parts:
        return False
    depth = len(parts)
    for name in context:
        start = name.split("/")[:depth]
        if len(start) == depth and all(map(fnmatch.fnmatchcase, start, parts)):
            return True
    return False


def _ignored(name: str, rules: Sequence[tuple[bool, re.Pattern[str]]]) -> bool:
    """The last pattern that fits the file, or a directory above it, decides."""
    parts = name.split("/")
    paths = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    ignored = False
    for keeps, pattern in rules:
        if any(pattern.fullmatch(path) for path in paths):
            ignored = not keeps
    return ignored


def _ignore_pattern(pattern: str) -> re.Pattern[str]:
    translated = ""
    at = 0
    while at < len(pattern):
        if pattern.startswith("**", at):
            at += 2
            if pattern.startswith("/", at):
                at += 1
                translated += "(?:.*/)?"
            else:
                translated += ".*"
            continue
        letter = pattern[at]
        if letter == "[" and (end := pattern.find("]", at + 2)) > 0:
            translated += pattern[at : end + 1]
            at = end + 1
            continue
        translated += {"*": "[^/]*", "?": "[^/]"}.get(letter, re.escape(letter))
        at += 1
    return re.compile(translated)
