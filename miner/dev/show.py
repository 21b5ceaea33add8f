"""How the development validator prints: tables for people, JSON for programs."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from miner.dev.client import Exchange
from miner.dev.demo import DemoResult, Step
from miner.dev.demo_job import JobResult
from miner.dev.load import PERCENTILES, LoadReport

_SHORT = 56
_LOG_WIDTH = 170


def pairs(values: Mapping[str, str], as_json: bool) -> None:
    if as_json:
        _json(dict(values))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in values.items():
        table.add_row(name, escape(value))
    _console().print(table)


def settings(values: Mapping[str, str], as_json: bool) -> None:
    """Lines for a `.env`, or for a shell's environment."""
    if as_json:
        _json(dict(values))
        return
    for name, value in values.items():
        _console().print(f"{name}={shlex.quote(value)}", markup=False, highlight=False, soft_wrap=True)


def exchange(done: Exchange, as_json: bool) -> None:
    if as_json:
        _json(done.as_json())
        return
    rows = {
        "request": f"{done.method} {done.path}",
        "status": _status(done),
        "latency": f"{done.latency_s * 1000:.1f} ms",
        "reply": done.text,
        "validator": str(done.conclusion),
    }
    pairs(rows, as_json=False)


def progress(step: Step) -> None:
    """A line as it happens, for a demo that takes its time. On stderr: stdout is the result's."""
    mark = "✓" if step.held else "✗"
    Console(stderr=True).print(f"{mark} {step.title}: {step.exchange.conclusion}", markup=False)


def demo(result: DemoResult, trained: JobResult | None, as_json: bool) -> None:
    if as_json:
        _json({**result.as_json(), "job": trained.as_json() if trained else None})
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
        table.add_row(*_demo_row(step))
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
    if trained is not None:
        job(trained)


class JobProgress:
    """A line of a running job that renews itself on a terminal; a line for each change elsewhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._status = self._console.status("the daemon starts") if self._console.is_terminal else None
        self._last = ""

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, job: Mapping[str, Any]) -> None:
        live = job["live"] or {}
        stage = f"{job['state']}: {live.get('stage') or ''}".rstrip(": ")
        if self._status is not None:
            self._status.update(escape(f"{stage}{_numbers(live)}"))
        elif stage != self._last:
            self._console.print(stage, markup=False, highlight=False)
        self._last = stage


def _numbers(live: Mapping[str, Any]) -> str:
    """Step, loss and speed, as far as they are known."""
    said = []
    if live.get("step") is not None:
        said.append(f"step {live['step']}" + (f" of {live['steps']}" if live.get("steps") else ""))
    if live.get("loss") is not None:
        said.append(f"loss {live['loss']:.3f}")
    if live.get("tokens_s") is not None:
        said.append(f"{live['tokens_s']:,.0f} tokens/s")
    if live.get("best_score") is not None:
        said.append(f"best held-out {live['best_score']:.3f}")
    return f", {', '.join(said)}" if said else ""


def job(done: JobResult) -> None:
    """The one real job of the demo, for people."""
    console = _console()
    if done.skipped is not None:
        console.print(f"No job was trained: {done.skipped}", style="yellow", markup=False)
        return
    if done.trouble is not None:
        console.print(f"The job went wrong: {done.trouble}", style="red", markup=False)
        return
    console.print(
        f"One real job: {done.model} trained for {done.steps} steps and published in {done.seconds:.0f} s "
        f"({' → '.join(done.states)}).\nHeld-out loss {done.base:.3f} → {done.best:.3f}. The validator was "
        f"told {done.submission} with model_hash {(done.model_hash or '')[:12]}…: that is what lies there.",
        markup=False,
        highlight=False,
    )
    if done.folder is not None and Path(done.folder).exists():
        console.print(f"It lies in {done.folder}.", markup=False, highlight=False)


def load(report: LoadReport, as_json: bool) -> None:
    if as_json:
        _json(report.as_json())
        return
    plan = report.plan
    title = f"{report.answered} of {plan.requests} {plan.kind} requests answered, {plan.concurrency} at once"
    table = Table(title=title, title_justify="left")
    for name in (*PERCENTILES, "req/s", "errors", "statuses", "failures", "generator CPU"):
        table.add_column(name, justify="right")
    table.add_row(
        *(_ms(report.percentile_ms(share)) for share in PERCENTILES.values()),
        f"{report.per_second:,.0f}",
        str(report.errors),
        _counts(report.statuses),
        _counts(report.failures),
        f"{100 * report.own_cpu_s / report.seconds:.0f}%" if report.seconds else "-",
    )
    _console().print(table)


def _demo_row(step: Step) -> tuple[str, ...]:
    done = step.exchange
    return (
        "[green]✓[/]" if step.held else "[red]✗[/]",
        escape(step.title),
        _status(done),
        escape(_short(done.text)),
        f"{done.latency_s * 1000:.1f}",
        escape(_short(str(done.conclusion))),
    )


def _json(value: Any) -> None:
    _console().print(json.dumps(value, indent=2), markup=False, highlight=False, soft_wrap=True)


def _console() -> Console:
    """A pipe or a log has no width; tables folded to 80 columns are hard to read in one."""
    console = Console()
    return console if console.is_terminal else Console(width=_LOG_WIDTH)


def _status(done: Exchange) -> str:
    return "-" if done.reply is None else str(done.reply.status)


def _counts(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{count} × {name}" for name, count in sorted(counts.items())) or "-"


def _ms(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f} ms"


def _short(text: str) -> str:
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 1]}…"
