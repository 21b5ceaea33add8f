"""A job while it goes on: a few lines that change on a terminal, a line per change elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from core.units import show_bytes, show_seconds
from miner.commands.output import say_json
from miner.terminal import Terminal

#: Where nobody watches, steps are told this often.
QUIET_SECONDS = 10.0
#: More often than the countdowns change, so that no second is left out.
_DRAWN_PER_SECOND = 2


class Display:
    """Fed with events: a "job" event's data is a whole picture, a "note" event's one sentence. On a terminal
    notes scroll by, and the picture below them is drawn anew every second: its countdowns go on while the
    job is silent."""

    def __init__(self, *, as_json: bool = False, console: Console | None = None) -> None:
        self._console = console or Terminal()
        self._as_json = as_json
        self._job: dict[str, Any] = {}
        self._said: tuple[Any, ...] = ()
        self._said_at = 0.0
        self.live: Live | None = None
        if self._console.is_terminal and not as_json:
            self.live = Live(
                console=self._console,
                get_renderable=self._picture,
                refresh_per_second=_DRAWN_PER_SECOND,
                redirect_stderr=sys.stderr.isatty(),
            )

    def __enter__(self) -> Self:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self._job = {}  # the page of the job's end follows
            self.live.stop()

    def take(self, kind: str, data: dict[str, Any]) -> None:
        if self._as_json:
            say_json({"event": kind, **data}, line=True)
            sys.stdout.flush()
        elif kind == "note":
            self._console.print(data["text"], soft_wrap=self.live is None)
        elif kind == "job":
            self._job = data
            if self.live is None:
                self._tell()

    def _tell(self) -> None:
        now, job = time.monotonic(), self._job
        said = (job["state"], job["stage"], job["attempt"], job["trouble"])
        if said != self._said or now - self._said_at >= QUIET_SECONDS:
            self._said, self._said_at = said, now
            self._console.print(" · ".join(_words(job)), soft_wrap=True)

    def _picture(self) -> RenderableType:
        return Group(*self._lines())

    def _lines(self) -> Iterable[RenderableType]:
        if not self._job:
            return
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in _facts(self._job):
            table.add_row(name, value)
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
