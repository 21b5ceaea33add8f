"""Rule 13: the cheat review. The files that reach an image are read, each by its kind, and weighed."""

from __future__ import annotations

import os
import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from core.domain.wire import TournamentType
from miner.tournament.check.dockerfiles import (
    context_files,
    copied_sources,
    dockerfile_text,
    first_dockerfile,
    is_in_context,
    read_instructions,
)
from miner.tournament.check.entry import CheckedEntry, FindingState, RuleFinding
from miner.tournament.check.review.concerns import (
    CODE,
    EMBEDDED,
    HIDDEN,
    WEIGHTS,
    Gravity,
    Place,
    ReviewFinding,
    Runs,
    judged,
)
from miner.tournament.check.review.lines import read_config, read_dockerfile_places, read_shell
from miner.tournament.check.review.python import read_python
from miner.tournament.check.sources import (
    LARGE_FILE_BYTES,
    LFS_POINTER,
    MOST_NAMED,
    MOST_PARSED_BYTES,
    PICTURES,
)
from miner.tournament.checkout import read_inside
from miner.tournament.rules import TASKS

_SHELLS = frozenset({".sh", ".bash", ".zsh", ".ksh"})
_CONFIGS = frozenset(
    {
        *(
            ".yaml",
            ".yml",
            ".json",
            ".toml",
            ".txt",
            ".cfg",
            ".ini",
            ".env",
            ".conf",
            ".jsonl",
            ".csv",
            ".tsv",
        ),
        *(".ndjson", ".ipynb", ".properties", ".xml"),
    }
)
#: Texts for people, and templates.
_PROSE = frozenset({".md", ".rst", ".svg", ".html", ".css", ".jinja", ".j2", ".tmpl"})
#: Of a binary file that is worth a question.
_SMALL_BYTES = 1000
_LONGEST_LINE = 5000
#: What a line imports or starts.
_STARTS = re.compile(
    r"(?:^|[\s;\"'])(?:import|from|-m)\s[^\n;]*|(?<![\w./-])[\w./-]+\.(?:py|sh)\b", re.MULTILINE
)
_SHEBANG = re.compile(rb"#!.*\b(?P<name>python|bash|sh|zsh|dash)\d*")


def check_review(entry: CheckedEntry) -> RuleFinding:
    requested = _requested(entry)
    found = review_tree(entry.tree, entry.files(), entry.kinds, requested)
    rule, by = "cheat review", {level: [one for one in found if one.severity is level] for level in Gravity}
    notes = [line for level in (Gravity.FAILS, Gravity.ASKS) for line in _grouped(by[level])]
    explained = [one for one in by[Gravity.SAID] if one.why]
    if by[Gravity.SAID] and len(notes) > 0:
        notes.append(f"{len(by[Gravity.SAID])} more are explained beside them, or nothing runs them: --json")
    counts = f"{len(by[Gravity.FAILS])} would be flagged, {len(by[Gravity.ASKS])} asked about"
    places = tuple(one.as_dict() for one in found)
    to_do = "take it out, or write the answer above it, `# For a reviewer: …`; `prepare` collects them"
    if by[Gravity.FAILS]:
        state = FindingState.FAILED
    elif by[Gravity.ASKS]:
        state = FindingState.UNKNOWN
    else:
        text = f"nothing that a reviewer would ask about; {len(explained)} places are explained"
        return RuleFinding(13, rule, FindingState.PASSED, text, tuple(notes), places=places)
    return RuleFinding(13, rule, state, f"places in what runs: {counts}", tuple(notes), to_do, places)


def _requested(entry: CheckedEntry) -> frozenset[str]:
    repos = [entry.settings.training_repo(kind) for kind in entry.kinds] if entry.settings else []
    return frozenset(name for repo in repos if repo for name in repo.datasets)


def _grouped(found: Sequence[ReviewFinding]) -> Iterator[str]:
    """One line for each concern: its question, and where."""
    for concern in dict.fromkeys(one.concern for one in found):
        these = [one for one in found if one.concern == concern]
        verb = "would be flagged" if these[0].severity is Gravity.FAILS else "asked"
        lines = [f"{concern.name}, {verb}: {concern.question}"]
        lines += [f"    {one.place} {one.what}" for one in these[:MOST_NAMED]]
        if len(these) > MOST_NAMED:
            lines.append(f"    and {len(these) - MOST_NAMED} more, in --json")
        yield "\n".join(lines)


def review_tree(
    tree: Path, files: Sequence[str], kinds: Sequence[TournamentType], requested: frozenset[str] = frozenset()
) -> list[ReviewFinding]:
    """Read all that reaches the images of these kinds; the worst first."""
    dockerfiles = [name for name in _dockerfiles(tree, kinds) if name]
    live = _live_files(tree, files, dockerfiles)
    texts = {name: text for name in live if (text := _text_of(tree, name)) is not None}
    reached, built = _reached(texts, dockerfiles), _built(texts, dockerfiles)
    found = []
    for name in live:
        places = list(_places_in(tree, name, texts.get(name), requested, name in dockerfiles))
        lines = texts[name].splitlines() if places and name in texts else []
        runs = Runs.IN_BUILD if name in built or not _is_code(name) else Runs.NEVER
        if runs is Runs.NEVER and name in reached:
            runs = Runs.IN_TRAINING
        found += [judged(name, place, lines, runs) for place in places]
    order = list(Gravity)
    return sorted(found, key=lambda one: (order.index(one.severity), one.concern.name, one.file, one.line))


def _dockerfiles(tree: Path, kinds: Sequence[TournamentType]) -> list[str | None]:
    wanted = dict.fromkeys(task.dockerfile for task in TASKS.values() if task.tournament in kinds)
    return [first_dockerfile(tree, name) for name in wanted]


def _live_files(tree: Path, files: Sequence[str], dockerfiles: Sequence[str]) -> list[str]:
    """Dockerfiles, and every file that one of them copies; all files if there is none."""
    if not dockerfiles:
        return list(files)
    context = context_files(tree, files)
    sources = [path for name in dockerfiles for path in copied_sources(dockerfile_text(tree, name))]
    copied = [name for name in context if any(is_in_context(path, [name]) for path in sources)]
    return list(dict.fromkeys([*dockerfiles, *copied, *(one for one in files if one == ".gitmodules")]))


def _text_of(tree: Path, name: str) -> str | None:
    """The text of a file, of large ones the beginning; None for binary ones, links out of the tree, and
    submodules."""
    try:
        content = read_inside(tree, tree / name, MOST_PARSED_BYTES)
        # The last letter may be cut.
        return None if b"\0" in content[:4096] else getincrementaldecoder("utf-8")().decode(content)
    except (OSError, UnicodeDecodeError):
        return None


def _is_code(name: str) -> bool:
    return PurePosixPath(name).suffix in (".py", *_SHELLS)


def _reached(texts: Mapping[str, str], dockerfiles: Sequence[str]) -> set[str]:
    """Files whose names stand in a Dockerfile, or in a file that is reached: any word counts as a name."""
    return _closure(texts, {name: texts[name] for name in dockerfiles if name in texts}, lambda text: text)


def _built(texts: Mapping[str, str], dockerfiles: Sequence[str]) -> set[str]:
    """Files that a build runs, with all that these import or start."""
    runs = {
        name: " ".join(one.text for one in read_instructions(texts[name]) if one.name == "RUN")
        for name in dockerfiles
        if name in texts
    }
    return _closure(texts, runs, lambda text: " ".join(_STARTS.findall(text)))


def _closure(texts: Mapping[str, str], first: Mapping[str, str], named_in: Callable[[str], str]) -> set[str]:
    stems: dict[str, list[str]] = {}
    for name in texts:
        path = PurePosixPath(name)
        stem = path.parent.name if path.stem in ("__init__", "__main__") else path.stem
        stems.setdefault(stem, []).append(name)
    reached, left = set(first), list(first.values())
    while left:
        for word in set(re.findall(r"[\w-]+", named_in(left.pop()))):
            for name in stems.pop(word, ()):
                reached.add(name)
                left.append(texts[name])
    return reached


def _places_in(
    tree: Path, name: str, text: str | None, requested: frozenset[str], is_dockerfile: bool
) -> Iterator[Place]:
    path, suffix = tree / name, PurePosixPath(name).suffix.lower()
    if text is not None and (size := path.stat().st_size) > MOST_PARSED_BYTES:
        concern = HIDDEN if is_dockerfile or _is_code(name) else EMBEDDED
        yield Place(0, concern, f"{size:,} bytes, of which the first {MOST_PARSED_BYTES:,} are read at most")
        if suffix == ".py":
            return
    if path.is_dir() and not path.is_symlink():
        yield Place(0, CODE, "a submodule: a plain clone leaves it empty, and its code cannot be read")
    elif text is None:
        yield from _unreadable(path, suffix)
    elif is_dockerfile:
        yield from read_dockerfile_places(text)
    elif suffix == ".py":
        yield from read_python(text, requested)
    elif suffix in _SHELLS or (shebang := _SHEBANG.match(text[:100].encode())):
        is_python = suffix not in _SHELLS and shebang is not None and shebang["name"] == b"python"
        yield from read_python(text, requested) if is_python else read_shell(text)
    elif LFS_POINTER in text[:200].encode():
        yield Place(0, WEIGHTS, "a pointer to Git LFS: what it stands for cannot be read")
    elif suffix not in _CONFIGS:
        # Whatever its name says, a shell may run it. Addresses that a notice gives are no downloads.
        found = read_shell(text) if suffix not in _PROSE else ()
        yield from (one for one in found if one.concern is not CODE or not one.what.startswith("names "))
        yield from _long_lines(text)
    else:
        yield from read_config(text, suffix, requested)
        yield from _long_lines(text)


def _long_lines(text: str) -> Iterator[Place]:
    if max(map(len, text.splitlines()), default=0) > _LONGEST_LINE:
        yield Place(0, EMBEDDED, "a line of more than 5,000 characters")


def _unreadable(path: Path, suffix: str) -> Iterator[Place]:
    if path.is_symlink():
        yield Place(0, EMBEDDED, f"a link to {os.readlink(path)}, out of the repository")
    elif path.is_file() and suffix not in PICTURES and (size := path.stat().st_size) > _SMALL_BYTES:
        concern = WEIGHTS if size > LARGE_FILE_BYTES else EMBEDDED
        yield Place(0, concern, f"{size:,} bytes that are no text")
