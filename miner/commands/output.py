"""What the commands print, cleaned of what would steer a terminal; and JSON in one form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from core.errors import GodMinerError
from core.facts import printable
from core.units import rfc3339

if TYPE_CHECKING:
    from rich.console import Console

#: Fields that hold a moment, besides all whose names end in `_at`.
_MOMENTS = frozenset({"at", "t", "end_by", "until"})


def say(text: object, *, err: bool = False, nl: bool = True) -> None:
    typer.echo(printable(str(text)), err=err, nl=nl)


def say_json(data: Any, *, line: bool = False) -> None:
    """Moments are RFC 3339 with their zone. `line`: one of several documents, each on a line."""
    typer.echo(json.dumps(_with_moments(data), indent=None if line else 2))


def say_error(error: GodMinerError, *, as_json: bool) -> None:
    """As JSON on stdout, where a program looks for its answer; for people on stderr."""
    if as_json:
        say_json({"error": error.as_dict()}, line=True)
    else:
        say(error, err=True)


def terminal(*, stderr: bool = False) -> Console:
    """For tables. What is printed to it is text, never markup."""
    from miner.terminal import Terminal

    return Terminal(stderr=stderr)


def _with_moments(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {key: _with_moments(one, str(key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_moments(one) for one in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (name.endswith("_at") or name in _MOMENTS):
        return value
    try:
        return rfc3339(value)
    except (ValueError, OverflowError, OSError):  # a training may name a moment beyond all calendars
        return None
