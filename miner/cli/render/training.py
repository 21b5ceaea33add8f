"""Print measurements of the native trainer: its kernels, and the settings worth keeping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from core.domain.units import show_bytes
from miner.cli.output import echo
from miner.cli.render.terminal import Terminal, plain_table

MeasureEvents = Sequence[dict[str, Any]]


def print_kernels(events: MeasureEvents) -> None:
    rows = [
        (one["name"][:70], f"{one['calls']:,}", f"{one['ms_per_step']:.2f}", f"{one['share']:.1%}")
        for one in events
        if one["event"] == "kernel"
    ]
    _print_table(("kernel", "calls", "ms per step", "share"), rows)
    for one in events:
        if one["event"] == "traced":
            echo(f"trace: {one['trace']}\ntable: {one['table']}")


def print_sweep(events: MeasureEvents) -> None:
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
    _print_table(("setting", "tokens/s", "ms/step", "memory", "loss", "against the plan"), rows)
    for one in events:
        if one["event"] == "keep":
            echo(_kept_line(one))


def _kept_line(event: dict[str, Any]) -> str:
    """Return the setting as lines for a profile."""
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


def _print_table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    Terminal().print(plain_table(*columns, rows=rows, right=columns[1:], header_style="dim"))
