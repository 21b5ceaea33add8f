"""File systems like the evaluator's, made from a seed: small trees of texts, scripts, tables and archives.

Four kinds, as there: `/testbed` with nested folders and code, `/system` with temporary files, logs and
look-alike names, `/workspace` beside `/backup`, and none at all.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from posixpath import join, splitext
from random import Random

#: Folders that a kind manages: what changes below them counts.
MANAGED: dict[int, tuple[str, ...]] = {1: ("/testbed",), 2: ("/system",), 3: ("/workspace", "/backup"), 4: ()}
DAY_S = 86_400

WORDS = """
    alpha apple archive backup banana branch buffer cache carbon cherry client cluster color config
    copper data delta draft engine error event export failed field filter forest garden gene global
    graph green harbor header hello image import index input invoice island kernel label ledger lemon
    level library local market memory meter module monitor node number object orange order output packet
    panel paper parser pattern pipeline planet pointer process project public queue random record region
    report request river sample schema script second server session signal silver simple source special
    status storage stream string student summer system table target task temple test thread token total
    user value vector version warning water window winter world yellow
""".split()  # noqa: SIM905 - a hundred lines otherwise
#: Styles of folder names, from the outside in.
_FOLDERS = (
    ("dir", "subdir", "subsubdir"),
    ("folder", "sub", "inner"),
    ("project", "module", "part"),
    ("data", "set", "batch"),
)
#: Folders of a kind that have names of their own.
_NAMED_FOLDERS = {
    1: ("tmp", "FooBar", "docs", "src", "old"),
    2: ("temp", "backup", "logs", "temp_1", "cache"),
    3: ("test", "mysql", "tmp", "1dir", "photos"),
}
#: Likely files of a kind by suffix, and how many of each at most.
_SUFFIXES = {
    1: {"txt": 7, "sh": 5, "py": 4, "java": 4, "php": 2, "c": 2, "json": 2, "csv": 2, "html": 2, "md": 2},
    2: {"txt": 9, "log": 4, "sh": 3, "sql": 2, "csv": 2, "doc": 3, "html": 2, "out": 2, "conf": 2},
    3: {"txt": 9, "sh": 4, "c": 3, "sql": 2, "csv": 3, "log": 3, "py": 2, "xml": 1, "dat": 2},
}
_STEMS = {
    "txt": ("textfile", "text", "notes", "file", "list", "readme"),
    "sh": ("script", "shellscript", "run", "new"),
    "py": ("pythonscript", "main", "util"),
    "log": ("log", "server", "app"),
    "java": ("Hello", "NewClass", "javafile"),
    "csv": ("csvfile", "data", "table"),
}


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A folder, or a file where there is content."""

    path: str
    content: bytes | None = None
    mode: int = 0o644
    #: Since the last change.
    age_days: float = 0.0

    @property
    def is_file(self) -> bool:
        return self.content is not None

    @property
    def suffix(self) -> str:
        return splitext(self.path)[1].lstrip(".")

    @property
    def lines(self) -> list[str]:
        return (self.content or b"").decode("utf-8", "replace").splitlines()


@dataclass(frozen=True)
class FileSystem:
    """A tree of one kind; folders stand before what is in them."""

    kind: int
    entries: tuple[FileEntry, ...]

    @property
    def roots(self) -> tuple[str, ...]:
        return MANAGED[self.kind]

    @property
    def folders(self) -> list[FileEntry]:
        return [entry for entry in self.entries if not entry.is_file]

    @property
    def files(self) -> list[FileEntry]:
        return [entry for entry in self.entries if entry.is_file]

    def below(self, folder: str) -> list[FileEntry]:
        return [entry for entry in self.files if entry.path.startswith(folder + "/")]

    def write(self, root: str, now: float) -> None:
        """Create it below `root`, where nothing of it is yet; ages count back from `now`."""
        for entry in self.entries:
            path = root + entry.path
            if entry.content is None:
                os.mkdir(path)
                continue
            with open(path, "wb") as file:
                file.write(entry.content)
        for entry in reversed(self.entries):
            path, changed = root + entry.path, now - entry.age_days * DAY_S
            os.chmod(path, entry.mode)
            os.utime(path, (changed, changed))


def file_system(kind: int, random: Random) -> FileSystem:
    """Draw one."""
    folders = [FileEntry(path, mode=0o755, age_days=_age(random)) for path in _folders(kind, random)]
    files: dict[str, FileEntry] = {}
    for entry in _files(kind, [folder.path for folder in folders], random):
        files.setdefault(entry.path, entry)
    if kind in (2, 3):
        archive = _archive(kind, folders[0].path, list(files.values()), random)
        files.setdefault(archive.path, archive)
    return FileSystem(kind, (*folders, *files.values()))


def _age(random: Random) -> float:
    """Half a day off a whole number, so that a condition on days never depends on the hour."""
    return random.choice((0, 0, 1, 2, 4, 6, 9, 12, 20, 40, 100, 200, 400, 500)) + 0.5


def _folders(kind: int, random: Random) -> Iterator[str]:
    if kind not in _SUFFIXES:
        return
    outer, middle, inner = random.choice(_FOLDERS)
    root = MANAGED[kind][0]
    yield root
    named = list(_NAMED_FOLDERS[kind])
    random.shuffle(named)
    for number in range(1, random.randint(3, 4)):
        top = f"{root}/{outer}{number}"
        yield top
        for second in range(1, random.randint(2, 3)):
            below = f"{top}/{middle}{second}"
            yield below
            if random.random() < 0.5:
                yield f"{below}/{inner}1"
        if random.random() < 0.6:
            yield f"{top}/{named.pop()}"
    yield f"{root}/{named.pop()}"
    yield from MANAGED[kind][1:]


def _files(kind: int, folders: list[str], random: Random) -> Iterator[FileEntry]:
    for suffix, most in _SUFFIXES.get(kind, {}).items():
        stem = random.choice(_STEMS.get(suffix, (suffix + "file", random.choice(WORDS))))
        for number in range(1, random.randint(max(1, most // 2), most) + 1):
            name = random.choice((stem, stem, random.choice(WORDS))) + str(number)
            if suffix == "txt" and random.random() < 0.15:
                name = name[:-1] + f" {number}"
            content = _content(suffix, random)
            mode = 0o755 if suffix in ("sh", "py") and random.random() < 0.7 else random.choice(_MODES)
            yield FileEntry(f"{random.choice(folders)}/{name}.{suffix}", content, mode, _age(random))
    if folders:
        yield FileEntry(f"{random.choice(folders)}/empty.txt", b"", 0o644, _age(random))
        yield FileEntry(
            f"{random.choice(folders)}/.hidden{random.randint(1, 3)}.txt", _content("txt", random), 0o644, 0.5
        )


_MODES = (0o644, 0o644, 0o644, 0o664, 0o600, 0o444, 0o777)


def _phrase(random: Random, least: int = 2, most: int = 7) -> str:
    return " ".join(random.choice(WORDS) for _ in range(random.randint(least, most)))


def _content(suffix: str, random: Random) -> bytes:
    match suffix:
        case "sh":
            text = f'#!/bin/bash\n\n# {_phrase(random)}\necho "{_phrase(random)}"\n'
        case "py":
            text = f'#!/usr/bin/env python3\nimport os\n\n\nprint("{_phrase(random)}")\n'
        case "java":
            name = random.choice(WORDS).capitalize()
            text = (
                f"public class {name} {{\n    public static void main(String[] args) {{\n"
                f'        System.out.println("{_phrase(random)}");\n    }}\n}}\n'
            )
        case "c":
            text = f'#include <stdio.h>\n\nint main() {{\n\tprintf("{_phrase(random)}");\n\treturn 0;\n}}\n'
        case "php":
            text = f'<?php\n// {_phrase(random)}\necho "{_phrase(random)}";\n?>\n'
        case "json":
            pairs = (
                f'  "{random.choice(WORDS)}{n}": "{random.choice(WORDS)}"'
                for n in range(random.randint(2, 4))
            )
            text = "{\n" + ",\n".join(pairs) + "\n}\n"
        case "csv":
            text = _table(random)
        case "html" | "xml":
            head, body = f"<head><title>{_phrase(random)}</title></head>", f"<p>{_phrase(random)}</p>"
            text = f"<html>\n{head}\n<body>{body}</body>\n</html>\n"
        case "sql":
            column = random.choice(WORDS)
            text = f"CREATE TABLE {random.choice(WORDS)} (\n  id int,\n  {column} varchar(255)\n);\n"
        case "log":
            levels = ("INFO", "WARNING", "ERROR")
            text = "".join(
                f"{random.choice(levels)} {_phrase(random)}\n" for _ in range(random.randint(4, 14))
            )
        case "conf":
            text = "".join(
                f"{random.choice(WORDS)}={random.randint(1, 999)}\n" for _ in range(random.randint(3, 6))
            )
        case "out" | "dat":
            return bytes(random.randrange(256) for _ in range(random.choice((64, 700, 2_500, 5_000))))
        case _:
            text = _text(random)
    return text.encode()


def _table(random: Random) -> str:
    head = ",".join(random.sample(WORDS, 3))
    rows = (
        f"{random.choice(WORDS)},{random.randint(1, 90)},{random.choice(WORDS)}"
        for _ in range(random.randint(3, 9))
    )
    return "\n".join((head, *rows)) + "\n"


def _text(random: Random) -> str:
    """Lines with numbers, repeated and empty ones now and then."""
    lines = [_phrase(random).capitalize() for _ in range(random.randint(1, 12))]
    if random.random() < 0.4:
        lines[random.randrange(len(lines))] += f" {random.randint(1, 500)}"
    if random.random() < 0.4:
        lines.insert(random.randrange(len(lines) + 1), "")
    if random.random() < 0.4:
        lines.insert(random.randrange(len(lines) + 1), random.choice(lines))
    return "\n".join(lines) + "\n"


def _archive(kind: int, root: str, files: list[FileEntry], random: Random) -> FileEntry:
    """Made of some of its files; the same bytes for the same files."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as tar,
    ):
        for file in random.sample(files, 3):
            member = tarfile.TarInfo(file.path.lstrip("/"))
            member.size = len(file.content or b"")
            tar.addfile(member, io.BytesIO(file.content or b""))
    name = {2: "files", 3: "archive"}[kind]
    return FileEntry(join(root, f"{name}.tar.gz"), packed.getvalue(), 0o644, 3.5)
