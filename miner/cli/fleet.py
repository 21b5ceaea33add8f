"""`god-miner fleet`: the GPUs of this host, who holds them until when, and who waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from miner.cli.options import AsJsonObject, load_settings
from miner.cli.output import echo_json, show_time, terminal

if TYPE_CHECKING:
    from miner.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Show the GPUs of this host and who has them.")


@app.callback()
def fleet() -> None:
    """Show the GPUs of this host and who has them."""


@app.command()
def show(as_json: AsJsonObject = False) -> None:
    """Show GPUs, what they measure, holders, windows and queue. Without a daemon: GPUs and reservations."""
    from miner.daemon_client import NoDaemon, get_page

    settings = load_settings()
    try:
        page = {"daemon": True, **get_page(settings, "/fleet")}
    except NoDaemon as missing:
        page = {"daemon": False, "why": str(missing), **_without_daemon(settings)}
    if as_json:
        echo_json(page)
    else:
        _print(page)
    usable = any(gpu["out"] is None for gpu in page["gpus"])
    raise typer.Exit(0 if usable and page["trouble"] is None else 1)


def _without_daemon(settings: Settings) -> dict[str, Any]:
    from miner.fleet.build import scan_and_sample_once
    from miner.fleet.fleet_view import view_without_daemon
    from miner.store import database
    from miner.store.offers import open_reservations
    from miner.store.store import Store

    seen, source, samples = scan_and_sample_once(settings)
    path = settings.store_dir / database.FILE_NAME
    is_current = database.schema_version(path) == database.SCHEMA_VERSION
    taken = Store(path).read_now(open_reservations) if is_current else []
    return view_without_daemon(seen.inventory, source, samples, taken, time.time())


def _print(page: dict[str, Any]) -> None:
    from miner.cli.render.terminal import WIDE_COLUMNS

    console = terminal()
    if not page["daemon"]:
        console.print(page["why"], style="yellow", soft_wrap=True)
    if page["trouble"]:
        console.print(page["trouble"], style="red", soft_wrap=True)
    console.print(_gpu_table(page, is_wide=console.width >= WIDE_COLUMNS))
    if page["claims"]:
        console.print(_claim_table(page))
    else:
        console.print("nothing is reserved, nothing waits", style="dim")


def _gpu_table(page: dict[str, Any], *, is_wide: bool) -> Any:
    """On a narrow terminal without ids and links, which `--json` has."""
    from rich.table import Table

    table = Table(title=page["source"] or None, box=None, pad_edge=False)
    for name in ("GPU", "kind", *(("id", "linked to") if is_wide else ())):
        table.add_column(name)
    for name in ("use", "memory", "°C", "W"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", overflow="fold")
    for gpu in page["gpus"]:
        state, style = _gpu_state(gpu)
        linked = ", ".join(map(str, gpu["linked"])) or "-"
        more = (gpu["id"], linked) if is_wide else ()
        table.add_row(str(gpu["index"]), gpu["kind"], *more, *_measured(gpu), state, style=style)
    return table


def _measured(gpu: dict[str, Any]) -> tuple[str, str, str, str]:
    """Utilization, memory used, temperature and power; "-" for what is not known."""
    sample = gpu.get("sample") or {}
    used, watts, limit = (sample.get(name) for name in ("memory_used", "power_watts", "power_limit_watts"))
    return (
        _shown(sample.get("utilization"), lambda share: f"{share:.0%}"),
        f"{_shown(used, lambda count: f'{count / 1e9:.1f}')}/{gpu['memory']}",
        _shown(sample.get("temperature"), lambda degrees: f"{degrees:.0f}"),
        _shown(watts, lambda power: f"{power:.0f}") + (f"/{limit:.0f}" if limit is not None else ""),
    )


def _shown(value: float | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value)


def _gpu_state(gpu: dict[str, Any]) -> tuple[str, str]:
    if gpu["out"] is not None:
        return f"out: {gpu['out']}", "red"
    if gpu["task_id"] is not None:
        return f"runs {gpu['task_id']}", ""
    if gpu["unclean"]:
        return "not empty yet after its last job", "yellow"
    return ("free, and used a little by somebody else" if gpu["shared"] else "free"), "green"


def _claim_table(page: dict[str, Any]) -> Any:
    from rich.table import Table

    index = {gpu["id"]: str(gpu["index"]) for gpu in page["gpus"]}
    table = Table("task", "stage", "GPUs", "from (UTC)", "until", "value per GPU-hour", box=None)
    for claim in page["claims"]:
        stage = f"{claim['kind']}, {claim['stage']}"
        if claim["queue"] is not None:
            stage += f", {claim['queue']}. in the queue"
        gpus = ", ".join(index.get(gpu, gpu) for gpu in claim["gpus"])
        begins = show_time(claim["starts_at"], seconds=False) if claim["gpus"] else "no place yet"
        value = f"{claim['priority']:.3f}" if claim["accepted"] else "not accepted"
        table.add_row(
            claim["task_id"], stage, gpus or "-", begins, show_time(claim["ends_at"], seconds=False), value
        )
    return table
