"""`god-miner fleet`: the GPUs of this host and of a cluster's nodes, their holders and the queue."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from miner.cli.options import AsJson, load_settings
from miner.cli.output import echo_json, show_time, terminal

if TYPE_CHECKING:
    from rich.table import Table

    from miner.api.fleet import FleetClaim, FleetGpu, FleetStatus, NodeStatus
    from miner.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Show the GPUs and their holders.")


@app.callback()
def fleet() -> None:
    """Show the GPUs and their holders."""


NodeName = Annotated[str | None, typer.Option("--node", help="Node of the cluster whose GPUs to show.")]


@app.command()
def show(as_json: AsJson = False, node: NodeName = None) -> None:
    """Show GPUs, what they measure, holders, windows and queue. Without a daemon: GPUs and reservations."""
    from miner.api.fleet import FleetStatus
    from miner.daemon_client import NoDaemon, get

    settings = load_settings()
    why = None
    try:
        page = get(settings, "/fleet", FleetStatus)
    except NoDaemon as missing:
        why, page = str(missing), _without_daemon(settings)
    if node is not None:
        page = _of_node(page, node)
    if as_json:
        head = {"daemon": True} if why is None else {"daemon": False, "why": why}
        echo_json({**head, **page.model_dump(mode="json")})
    else:
        _print(page, node, why)
    usable = any(gpu.out is None for gpu in page.gpus)
    raise typer.Exit(0 if usable and page.trouble is None else 1)


def _without_daemon(settings: Settings) -> FleetStatus:
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
    return view_without_daemon(seen.inventory, source, samples, taken, names, time.time())


def _of_node(page: FleetStatus, name: str) -> FleetStatus:
    """Keep only this node and its GPUs."""
    known = [node.name for node in page.nodes]
    if name not in known:
        some = ", ".join(known[:8]) + (", …" if len(known) > 8 else "")
        raise typer.BadParameter(f"there is no node {name}; there are {some or 'none'}", param_hint="--node")
    nodes = [node for node in page.nodes if node.name == name]
    return page.model_copy(update={"nodes": nodes, "gpus": [gpu for gpu in page.gpus if gpu.node == name]})


def _print(page: FleetStatus, node: str | None, why: str | None) -> None:
    """Print the fleet. `why`: the reason that no daemon was asked."""
    from miner.cli.render.terminal import WIDE_COLUMNS

    console = terminal()
    for text, style in ((why, "yellow"), (page.trouble, "red"), *((note, "yellow") for note in page.notes)):
        if text:
            console.print(text, style=style, soft_wrap=True)
    here = [gpu for gpu in page.gpus if not gpu.node]
    if here or not page.nodes:
        console.print(_gpu_table(page, here, is_wide=console.width >= WIDE_COLUMNS))
    if page.nodes:
        _print_nodes(page, node)
    if page.claims:
        console.print(_claim_table(page))
    else:
        console.print("nothing is reserved, nothing waits", style="dim")


def _print_nodes(page: FleetStatus, node: str | None) -> None:
    from miner.cli.render.terminal import plain_table
    from miner.fleet.node_view import node_classes, nodes_to_show

    console = terminal()
    classes = node_classes(page.nodes)
    if node is None:
        console.print(page.source, highlight=False)
        summary = ("nodes", "of", "GPUs", "ours", "others'", "free", "out")
        console.print(plain_table(*summary, rows=map(_class_row, classes, classes.values())))
    rows = nodes_to_show(page.nodes)
    if rows:
        table = ("node", "GPUs", "ours", "others'", "free", "next free", "state")
        console.print(plain_table(*table, rows=map(_node_row, rows)))
    if len(rows) < len(page.nodes):
        more = f"{len(page.nodes) - len(rows)} more nodes: `--node NAME` shows one, `--json` all"
        console.print(more, style="dim")
    if node is not None:
        console.print(plain_table("GPU", "kind", "state", rows=map(_slot_row, page.gpus)))
    console.print("GPUs of nodes are not measured by this daemon", style="dim")


def _class_row(name: str, count: Mapping[str, int]) -> tuple[str, ...]:
    return str(count["nodes"]), name, *(str(count[key]) for key in ("gpus", "ours", "others", "free", "out"))


def _node_row(node: NodeStatus) -> tuple[str, ...]:
    until = show_time(node.until, seconds=False) if node.until else "-"
    counts = (str(count) for count in (node.ours, node.others, node.free))
    return (node.name, f"{node.gpus}x{node.kind}", *counts, until, node.state)


def _slot_row(gpu: FleetGpu) -> tuple[str, ...]:
    state, _ = _gpu_state(gpu)
    windows = "; ".join(
        f"{show_time(window.starts_at, seconds=False)} to "
        + (show_time(window.ends_at, seconds=False) if window.ends_at else "no end")
        for window in gpu.busy
    )
    return gpu.id, gpu.kind, f"{state}; others: {windows}" if windows else state


def _gpu_table(page: FleetStatus, gpus: Sequence[FleetGpu], *, is_wide: bool) -> Table:
    """Build the table of GPUs; ids and links only on a wide terminal."""
    from rich.table import Table

    table = Table(title=page.source or None, box=None, pad_edge=False)
    for name in ("GPU", "kind", *(("id", "linked to") if is_wide else ())):
        table.add_column(name)
    for name in ("use", "memory", "°C", "W"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", overflow="fold")
    for gpu in gpus:
        state, style = _gpu_state(gpu)
        linked = ", ".join(map(str, gpu.linked)) or "-"
        more = (gpu.id, linked) if is_wide else ()
        table.add_row(str(gpu.index), gpu.kind, *more, *_measured(gpu), state, style=style)
    return table


def _measured(gpu: FleetGpu) -> tuple[str, str, str, str]:
    """Format utilization, memory used, temperature and power; "-" if unknown."""
    sample = gpu.sample
    if sample is None:
        return "-", f"-/{gpu.memory}", "-", "-"
    used = None if sample.memory_used is None else sample.memory_used / 1e9
    limit = sample.power_limit_watts
    return (
        _shown(sample.utilization, ".0%"),
        f"{_shown(used, '.1f')}/{gpu.memory}",
        _shown(sample.temperature, ".0f"),
        _shown(sample.power_watts, ".0f") + (f"/{limit:.0f}" if limit is not None else ""),
    )


def _shown(value: float | None, style: str) -> str:
    return "-" if value is None else format(value, style)


def _gpu_state(gpu: FleetGpu) -> tuple[str, str]:
    if gpu.out is not None:
        return f"out: {gpu.out}", "red"
    if gpu.task_id is not None:
        return f"runs {gpu.task_id}", ""
    if gpu.others:
        return "used by others", ""
    if (held := gpu.claim) is not None:
        start, end = (show_time(at, seconds=False) for at in (held.starts_at, held.ends_at))
        return f"reserved for {_claim_name(held)}, {start} to {end}", "cyan"
    if gpu.unclean:
        return "still freeing memory of its last job", "yellow"
    return ("free, and slightly used by others" if gpu.shared else "free"), "green"


def _claim_name(claim: FleetClaim) -> str:
    what = f"job {claim.job_id}" if claim.job_id else f"{claim.kind} {claim.task_id[:8]}"
    return f"{what} ({claim.model})" if claim.model else what


def _claim_table(page: FleetStatus) -> Table:
    from rich.table import Table

    index = {gpu.id: str(gpu.index) for gpu in page.gpus if not gpu.node}
    table = Table("task", "stage", "GPUs", "from (UTC)", "until", "value per GPU-hour", box=None)
    for claim in page.claims:
        stage = f"{claim.kind}, {claim.stage}"
        if claim.queue is not None:
            stage += f", {claim.queue}. in the queue"
        gpus = ", ".join(index.get(gpu, gpu) for gpu in claim.gpus)
        begins = show_time(claim.starts_at, seconds=False) if claim.gpus else "no place yet"
        value = f"{claim.priority:.3f}" if claim.accepted else "not accepted"
        table.add_row(
            claim.task_id, stage, gpus or "-", begins, show_time(claim.ends_at, seconds=False), value
        )
    return table
