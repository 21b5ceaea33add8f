"""Output of the tour and the demo: tables for people, JSON for programs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Self

from rich.table import Table
from rich.text import Text

from miner.cli.output import echo, echo_json, terminal
from miner.dev.demo import DemoResult
from miner.dev.tour import TourResult, TourStep
from miner.dev.validator import Exchange

_SHORT = 56
_DEMO_WIDTH = 80


def print_step(step: TourStep) -> None:
    """Print one line per step as it happens, on stderr: stdout is for the result."""
    mark = "✓" if step.held else "✗"
    terminal(stderr=True).print(f"{mark} {step.title}: {step.exchange.conclusion}")


def print_tour(result: TourResult, as_json: bool) -> None:
    if as_json:
        echo_json(result.as_json())
        return
    console = terminal()
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
            console.print(f"not as expected: {step.title}: wanted {wanted}", style="red")
    held = sum(step.held for step in result.steps)
    console.print(
        f"{held} of {len(result.steps)} as expected. The daemon answered {result.start_s:.2f} s after its "
        f"start and ended {result.stop_s:.2f} s after SIGTERM with exit code {result.exit_code}."
    )


class DemoProgress:
    """Print lines as things happen, with the seconds since the start, on stderr: stdout is for the result."""

    def __init__(self) -> None:
        self._console = terminal(stderr=True)
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
        self._console.print(_cut(text, min(self._console.width, _DEMO_WIDTH)), soft_wrap=True)
        if self._status is not None:
            self._status.update(step)


def print_demo(done: DemoResult, as_json: bool) -> None:
    """Print how it ended, within 80 columns."""
    if as_json:
        echo_json(done.as_json())
        return
    if not done.held:
        trouble = done.trouble or f"the held-out loss did not fall: {done.base} to {done.best}"
        terminal().print(f"Nothing was trained: {trouble}", style="red", soft_wrap=True)
        return
    echo(f"A model was trained and published in {done.seconds:.0f} s.")
    echo(f"  held-out loss  {done.base:.3f} → {done.best:.3f} after {done.steps} steps")
    echo(f"  published as   {done.submission}")
    echo(f"  model_hash     {(done.model_hash or '')[:16]}…, the same as the published files have")
    if done.folder is not None and Path(done.folder).exists():
        echo(f"  it lies in     {done.folder}")


def _tour_row(step: TourStep) -> tuple[str | Text, ...]:
    done = step.exchange
    return (
        Text("✓", "green") if step.held else Text("✗", "red"),
        step.title,
        _status(done),
        _cut(done.text, _SHORT),
        f"{done.latency_s * 1000:.1f}",
        _cut(str(done.conclusion), _SHORT),
    )


def _status(done: Exchange) -> str:
    return "-" if done.reply is None else str(done.reply.status)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
