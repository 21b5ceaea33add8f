"""The form of a template."""

from __future__ import annotations

from typing import NamedTuple


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
