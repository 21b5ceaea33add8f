"""Figures of a card, the table of them, and the measurements that plans follow afterwards."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path

from pydantic import Field
from rich.console import Console
from rich.table import Table

from core.domain.records import Record, SanitizedText
from core.planning.measured import MeasuredCard, MeasuredTraining
from core.system.files import write_atomically

JSON_FILE, TABLE_FILE = "gpu.json", "gpu.txt"
#: A figure this far from the plan's is to be explained.
NEAR = 0.1


class Figure(Record):
    """A measured number beside what it was expected to be."""

    name: str
    value: float
    unit: str = ""
    #: By the plan of the same training on the same card.
    plan: float | None = None
    #: By calculation, before anything was measured: the card disproves it or not. None: no bound.
    low: float | None = None
    high: float | None = None
    #: The GPU that the bounds are for; "": any, the CPU too.
    bounds_for: str = ""
    note: SanitizedText = ""

    def verdict(self, gpu: str) -> str:
        """Both expectations in words, or nothing where there is none."""
        said = []
        if self.plan:
            off = self.value / self.plan - 1
            said.append("as planned" if abs(off) <= NEAR else f"{off:+.0%} to plan")
        if (self.low, self.high) != (None, None) and gpu.startswith(self.bounds_for):
            low, high = self.low, self.high
            holds = (low is None or self.value >= low) and (high is None or self.value <= high)
            said.append("as calculated" if holds else "NOT as calculated")
        return ", ".join(said)


class PartState(StrEnum):
    DONE = "done"
    FAILED = "failed"
    CUT = "cut"
    SKIPPED = "skipped"
    RUNNING = "running"
    WAITING = "waiting"


class PartResult(Record):
    name: str
    state: PartState
    seconds: float = 0.0
    #: Why it is not done.
    reason: SanitizedText = ""
    figures: tuple[Figure, ...] = ()
    #: For `configs/measured`.
    trainings: tuple[MeasuredTraining, ...] = ()
    #: Of kernels that ran, versions that are missing, …
    notes: tuple[SanitizedText, ...] = ()


class GpuReport(Record):
    """Everything that one run measured; rewritten after each part."""

    gpu: str
    date: datetime.date
    #: Little shapes: the program is tried, nothing is measured.
    small: bool
    versions: dict[str, str] = Field(default_factory=dict)
    parts: tuple[PartResult, ...] = ()

    def write(self, folder: Path) -> None:
        write_atomically(folder / JSON_FILE, self.model_dump_json(indent=1).encode(), mode=0o644)
        write_atomically(folder / TABLE_FILE, self.text().encode(), mode=0o644)
        if not self.small and (card := self.measured()).trainings:
            write_atomically(folder / f"{self.gpu}.yaml", card.to_yaml().encode(), mode=0o644)

    def measured(self) -> MeasuredCard:
        trainings = tuple(one for part in self.parts for one in part.trainings)
        return MeasuredCard(gpu=self.gpu, date=self.date, versions=self.versions, trainings=trainings)

    def text(self, width: int = 118) -> str:
        console = Console(width=width, force_terminal=False, color_system=None)
        with console.capture() as captured:
            versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
            console.print(f"{self.gpu}, {self.date}, {versions}", highlight=False)
            if self.small:
                console.print("little shapes: this tries the program, and does not show what the card can do")
            console.print(_table(self.gpu, self.parts))
            for line in _notes(self.parts):
                console.print(f"  {line}", highlight=False, markup=False)
        return captured.get()


def _table(gpu: str, parts: Iterable[PartResult]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", overflow="fold")
    for name in ("measured", "plan", "calculated"):
        table.add_column(name, justify="right")
    table.add_column("", overflow="fold")
    for part in parts:
        took = f", {part.seconds:.0f} s" if part.seconds else ""
        table.add_row(f"{part.name}: {part.state.value}{took}")
        for figure in part.figures:
            table.add_row(
                f"  {figure.name}",
                f"{number(figure.value)} {figure.unit}".strip(),
                "" if figure.plan is None else number(figure.plan),
                _bounds(figure),
                figure.verdict(gpu),
            )
    return table


def _bounds(figure: Figure) -> str:
    if figure.low is None:
        return "" if figure.high is None else f"≤ {number(figure.high)}"
    return f"≥ {number(figure.low)}" if figure.high is None else f"{number(figure.low)}–{number(figure.high)}"


def _notes(parts: Iterable[PartResult]) -> Iterator[str]:
    for part in parts:
        for figure in part.figures:
            if figure.note:
                yield f"{part.name}, {figure.name}: {figure.note}"
        yield from (f"{part.name}: {note}" for note in part.notes)
        if part.reason:
            yield f"{part.name}: {part.state.value}: {part.reason}"


def number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
