"""The terminal that tables and live views are printed to."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from core.facts import printable

#: A pipe has no width of its own, and what is cut to 80 columns cannot be searched.
_PIPE_WIDTH = 240


class Terminal(Console):
    """Shows text as it is: no markup, no emoji names, and none of the control characters that a model's
    configuration or a training's words may hold. Escapes of our own are no text, and pass."""

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
