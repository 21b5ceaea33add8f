"""What was measured, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml
from rich.table import Table

from core.units import show_bytes
from miner.commands.output import say
from miner.terminal import Terminal

Events = Sequence[dict[str, Any]]


def show_kernels(events: Events) -> None:
    rows = [
        (one["name"][:70], f"{one['calls']:,}", f"{one['ms_per_step']:.2f}", f"{one['share']:.1%}")
        for one in events
        if one["event"] == "kernel"
    ]
    _table(("kernel", "calls", "ms per step", "share"), rows)
    for one in events:
        if one["event"] == "traced":
            say(f"trace: {one['trace']}\ntable: {one['table']}")


def show_sweep(events: Events) -> None:
    rows = [
        (
            one["name"],
            f"{one['tokens_s']:,.0f}" if "tokens_s" in one else "-",
            f"{one['step_ms']:.1f}" if "step_ms" in one else "-",
            show_bytes(one["memory_bytes"]) if one.get("memory_bytes") else "-",
            f"{one['loss']:.3f}" if "loss" in one else "-",
            f"{one['gain']:.2f}x" if one["gain"] else one.get("failed", "-")[:60],
        )
        for one in events
        if one["event"] == "setting"
    ]
    _table(("setting", "tokens/s", "ms/step", "memory", "loss", "against the plan"), rows)
    for one in events:
        if one["event"] == "keep":
            say(_kept(one))


def _kept(event: dict[str, Any]) -> str:
    """As a profile would say it."""
    targets = dict(event["targets"])
    own = targets.pop("engine_config", None)
    if not targets and not own:
        return "keep the plan as it is: nothing was faster by more than the noise"
    content: dict[str, Any] = {"targets": targets} if targets else {}
    content |= {"engine_config": {"native": own}} if own else {}
    return (
        f"keep ({event['gain']:.2f}x the plan's speed):\n{yaml.safe_dump(content, sort_keys=False)}".rstrip()
    )


def setting_line(event: dict[str, Any]) -> str:
    return f"{event['name']}: {event['tokens_s']:,.0f} tokens/s" if "tokens_s" in event else event["name"]


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if place == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Terminal().print(table)
