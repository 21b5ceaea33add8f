"""`god-miner chain`: this miner's registration and address on the subnet."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from core.domain.errors import ConfigError, GodMinerError, Problem
from miner.cli.options import AsJson, load_settings
from miner.cli.output import echo, echo_error, echo_json, terminal

if TYPE_CHECKING:
    from miner.chain.metagraph import Metagraph, Node, PublishResult
    from miner.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Show and change this miner's registration on the subnet.")

#: The chain answered, and something is left to do.
NEEDS_ACTION = 1
#: Whether the address was published is not known yet.
UNDECIDED = os.EX_TEMPFAIL


@dataclass(frozen=True)
class _ChainView:
    """The metagraph, from the chain or, with the reason, from the copy on disk."""

    hotkey: str | None
    hotkey_problem: str | None
    graph: Metagraph | None
    age: float | None
    error: GodMinerError | None
    netuid: int

    @property
    def key(self) -> bytes:
        from miner.support.addresses import public_key

        return public_key(self.hotkey or "") or b""

    @property
    def own(self) -> Node | None:
        return self.graph.nodes_by_key.get(self.key) if self.graph else None

    @property
    def exit_code(self) -> int:
        if self.error is not None:
            return exit_code(self.error)
        return 0 if self.own is not None else NEEDS_ACTION


@app.command()
def status(as_json: AsJson = False) -> None:
    """Show the metagraph (or the daemon's copy, with its age) and this miner's place in it."""
    view = _view_chain(load_settings())
    rows = _hotkey_rows(view) | _graph_rows(view) | _own_rows(view)
    _print_rows(rows, as_json)
    raise typer.Exit(view.exit_code)


@app.command("register-check")
def register_check(as_json: AsJson = False) -> None:
    """Check that the hotkey is registered on the subnet. Exit code 1, with instructions, if it is not."""
    view = _view_chain(load_settings())
    rows = _hotkey_rows(view) | {"netuid": view.netuid} | _own_rows(view)
    _print_rows(rows | ({"error": str(view.error)} if view.error else {}), as_json)
    raise typer.Exit(view.exit_code)


@app.command("publish-ip")
def publish_ip(
    ip: Annotated[str | None, typer.Option(help="Public IPv4 address. Default: PUBLIC_IP.")] = None,
    port: Annotated[int | None, typer.Option(help="Public port. Default: PUBLIC_PORT.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")] = False,
    as_json: AsJson = False,
) -> None:
    """Publish this miner's address on chain, unless it is already there."""
    from miner.chain.metagraph import is_unreachable_for_fiber

    settings = load_settings()
    try:
        address, port = _wanted_address(settings, ip, port)
        if is_unreachable_for_fiber(address):
            echo(f"warning: validators cannot call an IPv6 address like {address}", err=True)
        _confirm(f"Publish {address} port {port} on subnet {settings.netuid}?", yes, as_json)
        result = _publish(settings, address, port)
    except GodMinerError as error:
        _fail(error, as_json)
    _print_rows(
        {"outcome": result.outcome.value, "message": result.message, "block": result.block_hash}, as_json
    )
    raise typer.Exit(_publish_code(result))


def exit_code(error: GodMinerError) -> int:
    """The exit status for an error, after sysexits.h."""
    from miner.chain.identity import IdentityError
    from miner.chain.metagraph import ChainUnavailable

    if isinstance(error, ChainUnavailable):
        return os.EX_UNAVAILABLE
    return os.EX_CONFIG if isinstance(error, ConfigError | IdentityError) else NEEDS_ACTION


def _view_chain(settings: Settings) -> _ChainView:
    from miner.chain.identity import IdentityError, hotkey_address

    hotkey, problem = None, None
    try:
        hotkey = hotkey_address(settings)
    except IdentityError as missing:
        problem = str(missing)
    graph, error = asyncio.run(_read_chain(settings))
    age = None if graph is None else max(0.0, time.time() - graph.fetched_at)
    return _ChainView(hotkey, problem, graph, age, error, settings.netuid)


async def _read_chain(settings: Settings) -> tuple[Metagraph | None, GodMinerError | None]:
    """Read the metagraph; otherwise return the daemon's last copy, and why."""
    from miner.chain.metagraph_refresh import METAGRAPH_FILE, load_metagraph
    from miner.chain.sources import build_source

    source = build_source(settings, None)
    try:
        return await source.metagraph(), None
    except GodMinerError as error:
        return load_metagraph(settings.data_dir / METAGRAPH_FILE, source), error


def _publish(settings: Settings, ip: str, port: int) -> PublishResult:
    from miner.chain.identity import opened_hotkey
    from miner.chain.sources import build_source

    with opened_hotkey(settings) as hotkey:
        return asyncio.run(build_source(settings, hotkey).publish_axon(ip, port))


def _publish_code(result: PublishResult) -> int:
    from miner.chain.metagraph import PublishOutcome

    if result.outcome is PublishOutcome.UNKNOWN:
        return UNDECIDED
    return 0 if result.ok else NEEDS_ACTION


def _hotkey_rows(view: _ChainView) -> dict[str, object]:
    rows: dict[str, object] = {"hotkey": view.hotkey}
    return rows | ({"hotkey_problem": view.hotkey_problem} if view.hotkey_problem else {})


def _graph_rows(view: _ChainView) -> dict[str, object]:
    graph = view.graph
    rows: dict[str, object] = {"netuid": view.netuid}
    if graph is not None:
        rows |= {
            "source": graph.source,
            "block": graph.block,
            "nodes": len(graph.nodes),
            "validators": sum(node.validator_permit for node in graph.nodes),
            "age_seconds": round(view.age or 0.0, 1),
            "from_cache": view.error is not None,
        }
    if view.error is not None:
        rows["error"] = str(view.error)
    return rows


def _own_rows(view: _ChainView) -> dict[str, object]:
    """Return this miner's entry in the metagraph."""
    from miner.chain.metagraph import not_registered

    if view.graph is None or view.hotkey is None:
        return {"registered": None}
    own = view.own
    if own is None:
        return {"registered": False, "way_out": not_registered(view.netuid).message}
    return {
        "registered": True,
        "uid": own.uid,
        "axon": own.address,
        "stake": own.stake,
        "incentive": own.incentive,
        "rank": view.graph.rank(view.key),
        "emission": own.emission,
        "last_update": own.last_update,
        "validator_permit": own.validator_permit,
    }


def _wanted_address(settings: Settings, ip: str | None, port: int | None) -> tuple[str, int]:
    from miner.chain.metagraph import checked_axon_address

    ip = ip or settings.public_ip
    port = settings.axon_port if port is None else port
    if ip is None:
        raise _problem("PUBLIC_IP", "not set: give the public address with --ip, or set PUBLIC_IP")
    return checked_axon_address(ip, port, allow_private=settings.allow_private_axon), port


def _confirm(question: str, yes: bool, as_json: bool) -> None:
    if yes:
        return
    if as_json or not sys.stdin.isatty():
        raise _problem("--yes", "missing, and there is no terminal to ask on: add it")
    typer.confirm(question, abort=True)


def _problem(where: str, rule: str) -> ConfigError:
    return ConfigError("publish-ip", [Problem(where, "", rule)])


def _fail(error: GodMinerError, as_json: bool) -> NoReturn:
    echo_error(error, as_json=as_json)
    raise typer.Exit(exit_code(error))


def _print_rows(rows: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        echo_json(rows)
        return
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name.replace("_", " "), Text(_show_value(value), _style(name)))
    terminal().print(table)


def _show_value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _style(name: str) -> str:
    return {"error": "red", "hotkey_problem": "red", "way_out": "cyan"}.get(name, "")
