"""The terminal that tables and live views are printed to."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from core.domain.records import printable

#: From this width on a list has room for columns that can be looked up elsewhere.
WIDE_COLUMNS = 120


def one_line_table(*columns: str, cut: Sequence[str], right: Sequence[str] = ()) -> Table:
    """Return a table with one line per row: on a narrow terminal the columns in `cut` are shortened."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(
            name,
            no_wrap=name not in cut,
            overflow="ellipsis",
            justify="right" if name in right else "left",
        )
    return table


def one_line_cells(*values: str) -> tuple[Text, ...]:
    return tuple(Text(" ".join(value.split()), no_wrap=True, overflow="ellipsis") for value in values)


def plain_table(
    *columns: str, rows: Iterable[Sequence[str]] = (), right: Sequence[str] = (), header_style: str = "bold"
) -> Table:
    """Return a table without rules whose cells fold; columns in `right` are right-aligned."""
    result = Table(box=None, pad_edge=False, header_style=header_style)
    for name in columns:
        result.add_column(name, overflow="fold", justify="right" if name in right else "left")
    for row in rows:
        result.add_row(*row)
    return result


def fact_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and values."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


#: A pipe has no width, and text cut to 80 columns cannot be searched.
_PIPE_WIDTH = 240


class Terminal(Console):
    """Show text as it is: no markup, no emoji names, and no control characters from a model's configuration
    or a training's output. Our own escape sequences pass."""

    def __init__(
        self,
        *,
        stderr: bool = False,
        file: IO[str] | None = None,
        force_terminal: bool | None = None,
        width: int | None = None,
    ) -> None:
        super().__init__(
            stderr=stderr,
            file=file,
            force_terminal=force_terminal,
            width=width,
            markup=False,
            emoji=False,
            highlight=False,
        )
        if width is None and not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = _PIPE_WIDTH

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)
