"""`god-miner fleet`: the GPUs of this host and of a cluster's nodes, their holders and the queue."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from miner.api.fleet import NodeStatus
from miner.cli.options import AsJson, load_settings
from miner.cli.output import echo_json, show_time, terminal

if TYPE_CHECKING:
    from miner.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Show the GPUs and their holders.")


@app.callback()
def fleet() -> None:
    """Show the GPUs and their holders."""


NodeName = Annotated[str | None, typer.Option("--node", help="Node of the cluster whose GPUs to show.")]


@app.command()
def show(as_json: AsJson = False, node: NodeName = None) -> None:
    """Show GPUs, what they measure, holders, windows and queue. Without a daemon: GPUs and reservations."""
    from miner.daemon_client import NoDaemon, get_page

    settings = load_settings()
    try:
        page = {"daemon": True, **get_page(settings, "/fleet")}
    except NoDaemon as missing:
        page = {"daemon": False, "why": str(missing), **_without_daemon(settings)}
    if node is not None:
        _keep_node(page, node)
    if as_json:
        echo_json(page)
    else:
        _print(page, node)
    usable = any(gpu["out"] is None for gpu in page["gpus"])
    raise typer.Exit(0 if usable and page["trouble"] is None else 1)


def _without_daemon(settings: Settings) -> dict[str, Any]:
    from miner.backends.build_fleet import scan_and_sample_once
    from miner.fleet.fleet_view import view_without_daemon
    from miner.store import database
    from miner.store.offers import open_reservations, task_names
    from miner.store.store import Store

    seen, source, samples = scan_and_sample_once(settings)
    path = settings.store_dir / database.FILE_NAME
    is_current = database.schema_version(path) == database.SCHEMA_VERSION
    store, taken, names = Store(path), [], {}
    if is_current:
        taken = store.read_now(open_reservations)
        names = store.read_now(task_names, [row.hold.key for row, _ in taken])
    view = view_without_daemon(seen.inventory, source, samples, taken, names, time.time())
    return view.model_dump(mode="json")


def _keep_node(page: dict[str, Any], name: str) -> None:
    known = [one["name"] for one in page["nodes"]]
    if name not in known:
        some = ", ".join(known[:8]) + (", …" if len(known) > 8 else "")
        raise typer.BadParameter(f"there is no node {name}; there are {some or 'none'}", param_hint="--node")
    page["nodes"] = [one for one in page["nodes"] if one["name"] == name]
    page["gpus"] = [gpu for gpu in page["gpus"] if gpu["node"] == name]


def _print(page: dict[str, Any], node: str | None) -> None:
    from miner.cli.render.terminal import WIDE_COLUMNS

    console = terminal()
    if not page["daemon"]:
        console.print(page["why"], style="yellow", soft_wrap=True)
    if page["trouble"]:
        console.print(page["trouble"], style="red", soft_wrap=True)
    for note in page["notes"]:
        console.print(note, style="yellow", soft_wrap=True)
    here = [gpu for gpu in page["gpus"] if not gpu["node"]]
    if here or not page["nodes"]:
        console.print(_gpu_table(page, here, is_wide=console.width >= WIDE_COLUMNS))
    if page["nodes"]:
        _print_nodes(page, node)
    if page["claims"]:
        console.print(_claim_table(page))
    else:
        console.print("nothing is reserved, nothing waits", style="dim")


def _print_nodes(page: dict[str, Any], node: str | None) -> None:
    from miner.cli.render.terminal import plain_table
    from miner.fleet.node_view import node_classes, nodes_to_show

    console = terminal()
    nodes = [NodeStatus.model_validate(one) for one in page["nodes"]]
    classes = node_classes(nodes)
    if node is None:
        console.print(page["source"], highlight=False)
        summary = ("nodes", "of", "GPUs", "ours", "others'", "free", "out")
        console.print(plain_table(*summary, rows=map(_class_row, classes, classes.values())))
    rows = nodes_to_show(nodes)
    if rows:
        table = ("node", "GPUs", "ours", "others'", "free", "next free", "state")
        console.print(plain_table(*table, rows=[_node_row(node.model_dump()) for node in rows]))
    if len(rows) < len(nodes):
        more = f"{len(nodes) - len(rows)} more nodes: `--node NAME` shows one, `--json` all"
        console.print(more, style="dim")
    if node is not None:
        console.print(plain_table("GPU", "kind", "state", rows=map(_slot_row, page["gpus"])))
    console.print("GPUs of nodes are not measured by this daemon", style="dim")


def _class_row(name: str, count: Mapping[str, int]) -> tuple[str, ...]:
    return str(count["nodes"]), name, *(str(count[key]) for key in ("gpus", "ours", "others", "free", "out"))


def _node_row(one: Mapping[str, Any]) -> tuple[str, ...]:
    until = show_time(one["until"], seconds=False) if one["until"] else "-"
    counts = (str(one[name]) for name in ("ours", "others", "free"))
    return (one["name"], f"{one['gpus']}x{one['kind']}", *counts, until, one["state"])


def _slot_row(gpu: dict[str, Any]) -> tuple[str, ...]:
    state, _ = _gpu_state(gpu)
    windows = "; ".join(
        f"{show_time(one['starts_at'], seconds=False)} to "
        + (show_time(one["ends_at"], seconds=False) if one["ends_at"] else "no end")
        for one in gpu["busy"]
    )
    return gpu["id"], gpu["kind"], f"{state}; others: {windows}" if windows else state


def _gpu_table(page: dict[str, Any], gpus: Sequence[dict[str, Any]], *, is_wide: bool) -> Any:
    """Build the table of GPUs; ids and links only on a wide terminal."""
    from rich.table import Table

    table = Table(title=page["source"] or None, box=None, pad_edge=False)
    for name in ("GPU", "kind", *(("id", "linked to") if is_wide else ())):
        table.add_column(name)
    for name in ("use", "memory", "°C", "W"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", overflow="fold")
    for gpu in gpus:
        state, style = _gpu_state(gpu)
        linked = ", ".join(map(str, gpu["linked"])) or "-"
        more = (gpu["id"], linked) if is_wide else ()
        table.add_row(str(gpu["index"]), gpu["kind"], *more, *_measured(gpu), state, style=style)
    return table


def _measured(gpu: dict[str, Any]) -> tuple[str, str, str, str]:
    """Format utilization, memory used, temperature and power; "-" if unknown."""
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
    if gpu["others"]:
        return "used by others", ""
    if (held := gpu["claim"]) is not None:
        start, end = (show_time(held[name], seconds=False) for name in ("starts_at", "ends_at"))
        return f"reserved for {_claim_name(held)}, {start} to {end}", "cyan"
    if gpu["unclean"]:
        return "still freeing memory of its last job", "yellow"
    return ("free, and slightly used by others" if gpu["shared"] else "free"), "green"


def _claim_name(claim: Mapping[str, Any]) -> str:
    what = f"job {claim['job_id']}" if claim["job_id"] else f"{claim['kind']} {claim['task_id'][:8]}"
    return f"{what} ({claim['model']})" if claim["model"] else what


def _claim_table(page: dict[str, Any]) -> Any:
    from rich.table import Table

    index = {gpu["id"]: str(gpu["index"]) for gpu in page["gpus"] if not gpu["node"]}
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
