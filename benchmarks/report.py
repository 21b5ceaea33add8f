"""One benchmark's outcome, for people and for programs."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


@dataclass
class Report:
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    #: What to read out of the table, and what to know before believing it.
    notes: list[str] = field(default_factory=list)
    #: Every measured number, unrounded.
    data: dict[str, Any] = field(default_factory=dict)

    def show(self, console: Console) -> None:
        table = Table(title=self.title, title_justify="left")
        for place, name in enumerate(self.columns):
            table.add_column(name, justify="left" if place == 0 else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        for note in self.notes:
            console.print(f"  {note}", highlight=False, markup=False)
        console.print()

    def write(self, name: str, machine: dict[str, str]) -> Path:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.json"
        path.write_text(
            json.dumps({"benchmark": name, "machine": machine, **self.data}, indent=2) + "\n",
            encoding="utf-8",
        )
        return path


def latency(runs: list[dict[str, Any]], share: str) -> str:
    """The median over runs of one of their percentiles, in ms; a run without an answer has none."""
    seen = [run["latency_ms"][share] for run in runs if run["latency_ms"][share] is not None]
    return f"{median(seen):.1f}" if seen else "-"


def errors_of(name: str, runs: list[dict[str, Any]]) -> list[str]:
    """List failures, so that the speed of refusals is not taken for the speed of answers."""
    wrong: Counter[str] = Counter()
    for run in runs:
        if run["errors"]:
            wrong.update(run["statuses"])
            wrong.update(run["failures"])
    if not wrong:
        return []
    seen = ", ".join(f"{count} × {what}" for what, count in sorted(wrong.items()))
    return [f"ERRORS: the rounds of {name} that had any saw {seen}. Its figures mean nothing."]


def wide_console() -> Console:
    """In a pipe or a log nothing has to fit a screen."""
    console = Console()
    return console if console.is_terminal else Console(width=140)
