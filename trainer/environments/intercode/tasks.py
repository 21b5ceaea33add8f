"""Tasks: a template whose slots are filled from a file system."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import yaml

from trainer.environments.intercode.filesystems import WORDS, FileEntry, FileSystem, file_system

_SLOT = re.compile(r"<([a-z]+2?)>")
#: Slots that are paths: quoted in a command where they have a blank.
_PATHS = ("file", "text", "text2", "csv", "log", "archive", "blank")
#: Slots that stand alone in a question, and may be quoted there.
_ALONE = re.compile(r"(?<![\w/'])<(?:dir|sub|root|file|text2?|csv|log|archive|blank)>(?![/.\w'])")
#: Of questions that begin with a capital letter, have paths in quotes, and end with a full stop.
_CAPITAL, _QUOTED, _STOP = 0.6, 0.2, 0.25
_TEXT_SUFFIXES = ("txt", "log", "doc", "md")
#: How often each kind of file system is drawn: about its share of the evaluator's tasks.
_SHARES = {1: 60, 2: 53, 3: 60, 4: 27}
#: Tasks that are drawn for one file system, one after the other.
_TASKS_OF_ONE = 8


class Template(NamedTuple):
    """A gold command and ways to ask for it."""

    gold: str
    questions: tuple[str, ...]
    #: Kinds of file systems that it fits.
    kinds: tuple[int, ...] = (1, 2, 3)
    #: Commands that do not answer it, as a model tries them.
    wrong: tuple[str, ...] = ()
    #: What the command does is to leave its output empty and the recorded state as it was.
    silent: bool = False


def _templates() -> Iterator[Template]:
    text = Path(__file__).with_name("templates.yaml").read_text("utf-8")
    rows: list[dict[str, Any]] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    for row in rows:
        kinds = tuple(row.get("kinds", (1, 2, 3)))
        wrong, silent = tuple(row.get("wrong", ())), row.get("silent", False)
        yield Template(row["gold"], tuple(row["questions"]), kinds, wrong, silent)


TEMPLATES = tuple(_templates())


@dataclass(frozen=True)
class ShellTask:
    """A question, the command that answers it, and commands that do not."""

    question: str
    gold: str
    wrong: tuple[str, ...]
    files: FileSystem
    template: Template


def draw_tasks(random: Random, *, held_out: bool = False) -> Iterator[ShellTask]:
    """Draw without end. Held-out tasks ask in a way that no other asks."""
    while True:
        kind = random.choices(list(_SHARES), list(_SHARES.values()))[0]
        files = file_system(kind, random)
        fitting = [template for template in TEMPLATES if kind in template.kinds]
        for template in random.sample(fitting, _TASKS_OF_ONE):
            task = fill(template, files, random, held_out=held_out)
            if task is not None:
                yield task


def fill(
    template: Template, files: FileSystem, random: Random, *, held_out: bool = False
) -> ShellTask | None:
    """A task of the template; None where the file system has nothing for one of its slots."""
    question = template.questions[-1] if held_out else random.choice(template.questions[:-1])
    question = _styled(question, random)
    wanted = set(_SLOT.findall(" ".join((template.gold, question, *template.wrong))))
    values: dict[str, str] = {}
    # One slot may be drawn in view of those before it.
    for slot, draw in _SLOTS.items():
        if slot in wanted:
            value = draw(files, random, values)
            if value is None:
                return None
            values[slot] = value
    commands = {slot: shlex.quote(value) if slot in _PATHS else value for slot, value in values.items()}
    return ShellTask(
        _filled(question, values),
        _filled(template.gold, commands),
        tuple(_filled(command, commands) for command in template.wrong),
        files,
        template,
    )


def _styled(question: str, random: Random) -> str:
    """The same words as one person or another writes them."""
    capital, quoted, stop = (random.random() < share for share in (_CAPITAL, _QUOTED, _STOP))
    if quoted:
        question = _ALONE.sub(lambda match: f'"{match[0]}"', question)
    if capital:
        question = question[0].upper() + question[1:]
    return question + "." if stop and question[-1].isalpha() else question


def _filled(text: str, values: Mapping[str, str]) -> str:
    return _SLOT.sub(lambda match: values[match[1]], text)


Draw = Callable[[FileSystem, Random, Mapping[str, str]], str | None]


def _one(entries: list[FileEntry], random: Random) -> str | None:
    return random.choice(entries).path if entries else None


def _folder(files: FileSystem, random: Random, values: Mapping[str, str]) -> str | None:
    """The root half of the time; any folder with files otherwise."""
    if random.random() < 0.5:
        return files.roots[0]
    return _one([folder for folder in files.folders if files.below(folder.path)], random)


def _sub(files: FileSystem, random: Random, values: Mapping[str, str]) -> str | None:
    below = [folder for folder in files.folders if folder.path not in files.roots]
    return _one([folder for folder in below if files.below(folder.path)], random)


def _file(files: FileSystem, random: Random, values: Mapping[str, str]) -> str | None:
    return _one([file for file in files.files if file.content], random)


def _text(files: FileSystem, random: Random, values: Mapping[str, str]) -> str | None:
    texts = [file for file in files.files if file.suffix in _TEXT_SUFFIXES and len(file.lines) > 2]
    return _one([file for file in texts if file.path not in values.values()], random)


def _blank(files: FileSystem, random: Random, values: Mapping[str, str]) -> str | None:
    return _one([file for file in files.files if file.suffix in _TEXT_SUFFIXES and "" in file.lines], random)


def _of(suffix: str) -> Draw:
    def draw(files: FileSystem, random: Random, values: Mapping[str, str]) -> str | None:
        return _one([file for file in files.files if file.suffix == suffix], random)

    return draw


def _extension(files: FileSystem, random: Random, values: Mapping[str, str]) -> str | None:
    place = values.get("sub") or values.get("dir") or files.roots[0]
    return random.choice(sorted({file.suffix for file in files.below(place) if file.suffix}) or [None])


def _word(files: FileSystem, random: Random, values: Mapping[str, str]) -> str | None:
    """One that is in the text, or in a text of the folder; any where there is neither."""
    if not files.entries:
        return random.choice(WORDS)
    place, suffix = values.get("text"), values.get("ext")
    found = [
        word
        for file in (files.files if place else files.below(values.get("dir", files.roots[0])))
        if file.path == place or (not place and suffix in (None, file.suffix))
        for word in re.findall(r"[A-Za-z]+", (file.content or b"").decode("latin-1"))
        if word.lower() in WORDS
    ]
    return random.choice(found) if found else None


def _stem(files: FileSystem, random: Random, values: Mapping[str, str]) -> str | None:
    names = [file.path.rpartition("/")[2] for file in files.below(values.get("dir", files.roots[0]))]
    stems = [stem for name in names if (stem := re.match(r"[A-Za-z]{3,6}", name))]
    return random.choice(stems)[0] if stems else None


def _any_word(files: FileSystem, random: Random, values: Mapping[str, str]) -> str | None:
    return random.choice([word for word in WORDS if word not in values.values()])


def _new(files: FileSystem, random: Random, values: Mapping[str, str]) -> str | None:
    return f"{random.choice(('new', 'my', 'old', 'copy'))}_{random.choice(WORDS)}"


def _among(*choices: str | int) -> Draw:
    return lambda files, random, values: str(random.choice(choices))


def _number(least: int, most: int) -> Draw:
    return lambda files, random, values: str(random.randint(least, most))


def _date(files: FileSystem, random: Random, values: Mapping[str, str]) -> str | None:
    return (date(1990, 1, 1) + timedelta(days=random.randrange(16_000))).isoformat()


def _phrase(files: FileSystem, random: Random, values: Mapping[str, str]) -> str | None:
    return " ".join(random.sample(WORDS, random.randint(2, 6)))


def _csv_line(files: FileSystem, random: Random, values: Mapping[str, str]) -> str | None:
    return ",".join(random.sample(WORDS, random.randint(3, 5)))


_SLOTS: dict[str, Draw] = {
    "root": lambda files, random, values: files.roots[0],
    "dir": _folder,
    "sub": _sub,
    "file": _file,
    "text": _text,
    "text2": _text,
    "blank": _blank,
    "csv": _of("csv"),
    "log": _of("log"),
    "archive": _of("gz"),
    "ext": _extension,
    "word": _word,
    "other": _any_word,
    "third": _any_word,
    "stem": _stem,
    "new": _new,
    "name": _any_word,
    "n": _number(2, 5),
    "m": _number(3, 16),
    "bytes": _among(50, 60, 80, 100, 150, 200, 300, 500, 1000),
    "days": _among(3, 5, 7, 10, 15, 30, 60, 90, 180, 365),
    "perm": _among(644, 755, 600, 444, 777, 664),
    "num": _number(10, 999),
    "num2": _number(2, 99),
    "stamp": _number(10**9, 18 * 10**8),
    "date": _date,
    "phrase": _phrase,
    "csvline": _csv_line,
}
