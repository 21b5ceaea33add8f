"""Output of the commands: text without control characters, JSON in one form, errors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer
from pydantic import BaseModel

from core.domain.errors import GodMinerError
from core.domain.records import printable
from core.domain.units import rfc3339


def show_time(at: float, *, seconds: bool = True, year: bool = False) -> str:
    """Format a timestamp in UTC, as lists show it."""
    pattern = ("%Y-" if year else "") + "%m-%d %H:%M" + (":%S" if seconds else "")
    return datetime.fromtimestamp(at, UTC).strftime(pattern)


if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from core.profile.explain import ProfileFinding

#: Fields that hold a timestamp, besides all whose names end in `_at`.
_TIME_FIELDS = frozenset({"at", "t", "end_by", "until"})


def echo(text: object, *, err: bool = False, nl: bool = True) -> None:
    typer.echo(printable(str(text)), err=err, nl=nl)


def echo_json(data: Any, *, line: bool = False) -> None:
    """Print data and records in it as JSON, with timestamps in RFC 3339. `line`: one document on a line."""
    typer.echo(json.dumps(_with_rfc3339(data), indent=None if line else 2))


def echo_error(error: GodMinerError, *, as_json: bool) -> None:
    """Print an error: as JSON on stdout, where a program looks for its answer, or as text on stderr."""
    if as_json:
        echo_json({"error": error.as_dict()}, line=True)
    else:
        echo(error, err=True)


def findings_line(findings: Sequence[ProfileFinding]) -> str:
    """Summarize the findings about a policy or a profile."""
    errors = sum(finding.level.value == "error" for finding in findings)
    return f"{errors} errors, {len(findings) - errors} warnings" if findings else "fine"


def terminal(*, stderr: bool = False) -> Console:
    """Return the terminal for tables. What is printed to it is text, never markup."""
    from miner.cli.render.terminal import Terminal

    return Terminal(stderr=stderr)


def print_table(keys: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    from miner.cli.render.terminal import plain_table

    terminal().print(plain_table(*keys, rows=rows))


def print_pages(pages: Iterable[RenderableType]) -> None:
    console = terminal()
    for page in pages:
        console.print(page)


def _with_rfc3339(value: Any, name: str = "") -> Any:
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {key: _with_rfc3339(one, str(key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_rfc3339(one) for one in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (name.endswith("_at") or name in _TIME_FIELDS):
        return value
    try:
        return rfc3339(value)
    except (ValueError, OverflowError, OSError):  # a training may report a timestamp beyond all calendars
        return None
