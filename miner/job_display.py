"""A job while it goes on: a few lines that change on a terminal, a line per change elsewhere."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from core.units import show_bytes, show_seconds

#: Where nobody watches, steps are told this often.
QUIET_SECONDS = 10.0
_NOTES = 6


class Display:
    """Fed with events: a "job" event's data is a whole picture, a "note" event's one sentence."""

    def __init__(self, *, as_json: bool = False, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._as_json = as_json
        self._job: dict[str, Any] = {}
        self._notes: list[str] = []
        self._said: tuple[Any, ...] = ()
        self._said_at = 0.0
        watched = self._console.is_terminal and not as_json
        self._live = Live(console=self._console, auto_refresh=False) if watched else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def take(self, kind: str, data: dict[str, Any]) -> None:
        if self._as_json:
            sys.stdout.write(json.dumps({"event": kind, **data}) + "\n")
            sys.stdout.flush()
        elif kind == "note":
            self._note(data["text"])
        elif kind == "job":
            self._job = data
            self._show()

    @property
    def job(self) -> dict[str, Any]:
        return self._job

    def _note(self, text: str) -> None:
        if self._live is None:
            self._console.print(text, markup=False, soft_wrap=True)
            return
        self._notes = [*self._notes, text][-_NOTES:]
        self._show()

    def _show(self) -> None:
        if self._live is not None:
            self._live.update(Group(*self._lines()), refresh=True)
            return
        now, job = time.monotonic(), self._job
        said = (job["state"], job["stage"], job["attempt"], job["trouble"])
        if said != self._said or now - self._said_at >= QUIET_SECONDS:
            self._said, self._said_at = said, now
            self._console.print(" · ".join(_words(job)), markup=False, soft_wrap=True)

    def _lines(self) -> Iterable[RenderableType]:
        yield from (escape(note) for note in self._notes)
        if not self._job:
            return
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in _facts(self._job):
            table.add_row(name, value if not isinstance(value, str) else escape(value))
        yield table


def _words(job: dict[str, Any]) -> Iterable[str]:
    for name, value in _facts(job):
        if isinstance(value, str):
            yield f"{name} {value}"


def _facts(job: dict[str, Any]) -> Iterable[tuple[str, RenderableType]]:
    attempt = f", attempt {job['attempt']}" if job["attempt"] else ""
    gpus = f" on GPU {', '.join(job['gpus'])}" if job["gpus"] else ""
    yield "state", f"{job['state']}{attempt}{gpus}"
    if job["stage"]:
        yield "stage", job["stage"] + _transferred(job)
    yield from _course(job)
    if job["trouble"]:
        again = f", again in {show_seconds(max(job['retry_at'] - time.time(), 0))}" if job["retry_at"] else ""
        yield "trouble", f"{job['trouble']}{again}"
    now = time.time()
    if job["ends_at"]:
        yield "ends in", show_seconds(max(job["ends_at"] - now, 0))
    if job["deadline_at"]:
        yield "deadline in", show_seconds(max(job["deadline_at"] - now, 0))
    if job["published"]:
        yield "published", job["published"]


def _course(job: dict[str, Any]) -> Iterable[tuple[str, RenderableType]]:
    if job["step"] is None:
        return
    total = job["steps"]
    yield "step", f"{job['step']:,}" + (f" of {total:,}" if total else "")
    if total:
        yield "", ProgressBar(total=total, completed=job["step"], width=40)
    if job["loss"] is not None:
        yield "loss", f"{job['loss']:.4f}"
    if job["best_score"] is not None:
        yield "best score", f"{job['best_score']:.4f}"
    if job["tokens_s"] is not None:
        yield "tokens/s", f"{job['tokens_s']:,.0f}"


def _transferred(job: dict[str, Any]) -> str:
    if job["bytes_done"] is None:
        return ""
    total = f" of {show_bytes(job['bytes_total'])}" if job["bytes_total"] else ""
    return f": {show_bytes(job['bytes_done'])}{total}"
