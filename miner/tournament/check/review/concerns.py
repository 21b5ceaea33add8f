"""Concerns of the reviewer, their questions, and the places where they were found.

Before round 2 a language model reads each entry's build and training, and a person decides about what it
flags. It is told the kind of tournament and the data sets that the entry requested, and nothing else: what
only the operator knows has to stand beside the code. A comment with `For a reviewer:` is taken for that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Gravity(StrEnum):
    """Gravity of a place, the worst first."""

    #: It would be flagged, and a flag that a person accepts ends the tournament for the entry.
    FAILS = "fails"
    #: A reviewer would ask, and the answer is not written beside it.
    ASKS = "asks"
    #: It is explained, or nothing runs it.
    SAID = "said"


class Runs(StrEnum):
    """The moment at which a file of an image is run, as far as its name is mentioned elsewhere."""

    #: With a network.
    IN_BUILD = "in the build"
    IN_TRAINING = "in the training"
    NEVER = "never"


@dataclass(frozen=True)
class Concern:
    """A kind of thing that a reviewer looks for."""

    name: str
    severity: Gravity
    question: str
    #: Whether a comment can answer the question.
    explainable: bool = True
    #: Whether it is about what a build fetches.
    fetches: bool = False


WEIGHTS = Concern(
    "weights",
    Gravity.FAILS,
    "which weights are these, whose, checked by which digest, and why not the task's own from /cache?",
    fetches=True,
)
DATA = Concern(
    "data",
    Gravity.FAILS,
    "which data is this? It is neither the task's nor among the requested data sets",
    fetches=True,
)
SPECIAL = Concern(
    "special case",
    Gravity.FAILS,
    "why are one task, miner, host or date treated unlike others?",
    explainable=False,
)
HOST = Concern(
    "host", Gravity.FAILS, "why does a trainer look at the machine that it runs on?", explainable=False
)
HIDDEN = Concern(
    "hidden code", Gravity.FAILS, "what does this do? It is written so that nobody can read it", False
)
EVALUATOR = Concern(
    "evaluator", Gravity.ASKS, "does the training see what it is scored with, or another task's data?"
)
BENCHMARK = Concern(
    "benchmark", Gravity.ASKS, "is this benchmark in the training data, and why is it named at all?"
)
CODE = Concern(
    "fetched code",
    Gravity.ASKS,
    "what is fetched here, and who says that each build gets the same?",
    fetches=True,
)
NETWORK = Concern("network", Gravity.ASKS, "whom does this ask, and for what? Trainings have no network")
SURROUNDINGS = Concern(
    "surroundings",
    Gravity.ASKS,
    "what does the training make of what it learns here about the machine or the task?",
)
DYNAMIC = Concern("dynamic code", Gravity.ASKS, "where does the code or the object come from that is run?")
PACKAGES = Concern("packages", Gravity.SAID, "what are they for, and are their versions fixed?", fetches=True)
EMBEDDED = Concern("contents", Gravity.ASKS, "what is in it, and which training reads it?")


@dataclass(frozen=True)
class Place:
    """A line where a concern was found."""

    line: int
    concern: Concern
    what: str
    #: Another gravity than the concern's own.
    severity: Gravity | None = None
    #: First lines of the statements around it, the innermost first: comments stand above them.
    starts: tuple[int, ...] = ()
    #: A docstring around it.
    doc: str = ""


@dataclass(frozen=True)
class ReviewFinding:
    """A place in a file of the entry, with its gravity once the comments beside it are read."""

    file: str
    line: int
    concern: Concern
    severity: Gravity
    what: str
    #: The comment beside it; empty without one.
    why: str = ""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file

    def as_dict(self) -> dict[str, object]:
        return {
            "file": self.file,
            "line": self.line,
            "severity": str(self.severity),
            "concern": self.concern.name,
            "what": self.what,
            "question": self.concern.question,
            "why": self.why,
        }


_ADDRESSED = re.compile(r"for a reviewer:\s*", re.IGNORECASE)
#: Instructions between a comment and what it is about.
_PASSED_OVER = re.compile(r"\s*(?:(?:ARG|ENV|FROM)\s|@)")
#: In lines, with the instructions that are passed over.
_LONGEST_COMMENT = 200
#: A shorter comment explains nothing.
_FEWEST_WORDS = 4


def judged(file: str, place: Place, lines: Sequence[str], runs: Runs) -> ReviewFinding:
    """Weigh a place by the comments beside it, and by what runs its file."""
    severity = place.severity or place.concern.severity
    why, addressed = _comment(place, lines)
    if addressed and place.concern.explainable:
        severity = Gravity.SAID
    elif severity is Gravity.FAILS and place.concern.explainable and (why or runs is Runs.NEVER):
        severity = Gravity.ASKS
    elif severity is Gravity.FAILS and place.concern is WEIGHTS and runs is Runs.IN_TRAINING:
        severity = Gravity.ASKS  # without a network it gets none
    elif severity is Gravity.ASKS and runs is Runs.NEVER:
        severity = Gravity.SAID
    return ReviewFinding(file, place.line, place.concern, severity, place.what, why)


def _comment(place: Place, lines: Sequence[str]) -> tuple[str, bool]:
    """The comment beside a place, and whether it speaks to a reviewer."""
    starts = place.starts or (place.line,)
    blocks = [_after(lines, place.line), _above(lines, place.line)]
    blocks += [_above(lines, start) for start in starts]
    for text in [*blocks, place.doc]:
        if found := _ADDRESSED.search(text):
            return " ".join(text[found.end() :].partition("\n\n")[0].split()), True
    plain = (text for text in blocks[:3] if len(text.split()) >= _FEWEST_WORDS)
    return next(plain, ""), False


def _after(lines: Sequence[str], line: int) -> str:
    """The comment at the end of a line."""
    text = lines[line - 1] if 0 < line <= len(lines) else ""
    comment = text.rpartition(" # ")[2] if " # " in text else ""
    return re.sub(r"noqa:\s*[A-Z0-9, ]+|type:\s*ignore\S*", "", comment).strip(" -")


def _above(lines: Sequence[str], line: int) -> str:
    """The block of comment above a line, from its top."""
    block: list[str] = []
    number = line - 2
    while 0 <= number < len(lines) and line - number < _LONGEST_COMMENT:
        text = lines[number].strip()
        if block and text == "#":
            break  # another paragraph
        if text.startswith("#"):
            block.append(text.lstrip("#: "))
        elif block or not _PASSED_OVER.match(lines[number]):
            break
        number -= 1
    return " ".join(reversed(block))
