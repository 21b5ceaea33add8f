"""How the development validator prints: tables for people, JSON for programs."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from miner.dev.demo import DemoResult
from miner.dev.tour import TourResult, TourStep
from miner.dev.validator import Exchange

_SHORT = 56
_LOG_WIDTH = 170
_DEMO_WIDTH = 80


def print_pairs(values: Mapping[str, str], as_json: bool) -> None:
    if as_json:
        _print_json(dict(values))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in values.items():
        table.add_row(name, escape(value))
    _console().print(table)


def print_settings(values: Mapping[str, str], as_json: bool) -> None:
    """Print lines for a `.env` or a shell's environment."""
    if as_json:
        _print_json(dict(values))
        return
    for name, value in values.items():
        _console().print(f"{name}={shlex.quote(value)}", markup=False, highlight=False, soft_wrap=True)


def print_exchange(done: Exchange, as_json: bool) -> None:
    if as_json:
        _print_json(done.as_json())
        return
    rows = {
        "request": f"{done.method} {done.path}",
        "status": _status(done),
        "latency": f"{done.latency_s * 1000:.1f} ms",
        "reply": done.text,
        "validator": str(done.conclusion),
    }
    print_pairs(rows, as_json=False)


def print_step(step: TourStep) -> None:
    """Print one line per step as it happens, on stderr: stdout is for the result."""
    mark = "✓" if step.held else "✗"
    Console(stderr=True).print(f"{mark} {step.title}: {step.exchange.conclusion}", markup=False)


def print_tour(result: TourResult, as_json: bool) -> None:
    if as_json:
        _print_json(result.as_json())
        return
    console = _console()
    table = Table(title="What a validator sees", title_justify="left")
    table.add_column("", min_width=1)
    table.add_column("request", no_wrap=True, min_width=24)
    table.add_column("status", justify="right", min_width=6)
    table.add_column("reply", overflow="fold")
    table.add_column("ms", justify="right", min_width=4)
    table.add_column("what the validator concludes", overflow="fold")
    for step in result.steps:
        table.add_row(*_tour_row(step))
    console.print(table)
    for step in result.steps:
        if not step.held:
            wanted = f"{step.expected.status}, {step.expected.outcome}"
            console.print(f"not as expected: {step.title}: wanted {wanted}", style="red", markup=False)
    held = sum(step.held for step in result.steps)
    console.print(
        f"{held} of {len(result.steps)} as expected. The daemon answered {result.start_s:.2f} s after its "
        f"start and ended {result.stop_s:.2f} s after SIGTERM with exit code {result.exit_code}.",
        highlight=False,
    )


class DemoProgress:
    """Print lines as things happen, with the seconds since the start, on stderr: stdout is for the result."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._began = time.monotonic()
        self._status = self._console.status("the daemon starts") if self._console.is_terminal else None

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, step: str, line: str) -> None:
        text = f"{time.monotonic() - self._began:5.1f} s  {step:<10}  {line}"
        width = min(self._console.width, _DEMO_WIDTH)
        self._console.print(_cut(text, width), markup=False, highlight=False, soft_wrap=True)
        if self._status is not None:
            self._status.update(escape(step))


def print_demo(done: DemoResult, as_json: bool) -> None:
    """Print how it ended, within 80 columns."""
    if as_json:
        _print_json(done.as_json())
        return
    console = _console()
    if not done.held:
        trouble = done.trouble or f"the held-out loss did not fall: {done.base} to {done.best}"
        console.print(f"Nothing was trained: {trouble}", style="red", markup=False, soft_wrap=True)
        return
    lines = [
        f"A model was trained and published in {done.seconds:.0f} s.",
        f"  held-out loss  {done.base:.3f} → {done.best:.3f} after {done.steps} steps",
        f"  published as   {done.submission}",
        f"  model_hash     {(done.model_hash or '')[:16]}…, the same as the published files have",
    ]
    if done.folder is not None and Path(done.folder).exists():
        lines.append(f"  it lies in     {done.folder}")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _tour_row(step: TourStep) -> tuple[str, ...]:
    done = step.exchange
    return (
        "[green]✓[/]" if step.held else "[red]✗[/]",
        escape(step.title),
        _status(done),
        escape(_short(done.text)),
        f"{done.latency_s * 1000:.1f}",
        escape(_short(str(done.conclusion))),
    )


def _print_json(value: Any) -> None:
    _console().print(json.dumps(value, indent=2), markup=False, highlight=False, soft_wrap=True)


def _console() -> Console:
    """Return a console; wide for pipes and logs, where tables folded to 80 columns are hard to read."""
    console = Console()
    return console if console.is_terminal else Console(width=_LOG_WIDTH)


def _status(done: Exchange) -> str:
    return "-" if done.reply is None else str(done.reply.status)


def _short(text: str) -> str:
    return _cut(text, _SHORT)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
