"""The subnet: can it be read, is this hotkey on it, does it show the right address, who would be let in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from core.errors import GodMinerError
from miner.doctor.examine import Check, Surroundings
from miner.doctor.finding import Finding, fail, ok, skip, warn
from miner.fiber import public_key
from miner.settings import ChainKind, Settings

if TYPE_CHECKING:
    from miner.chain.base import Metagraph, Node

#: More than CHAIN_TIMEOUT_SECONDS allows for is cut off by the source; this ends what even that does not.
LIMIT_SECONDS = 120.0


def run(surroundings: Surroundings) -> Iterator[Finding]:
    settings = surroundings.settings
    started = time.monotonic()
    try:
        metagraph = asyncio.run(_read(settings))
    except (GodMinerError, OSError, TimeoutError) as error:
        yield _unreadable(settings, error)
        return
    yield _readable(metagraph, time.monotonic() - started)
    yield callers(metagraph, settings)
    address = _own_address(settings)
    if address is None:
        yield skip("registration", "the hotkey's address is not known; see the finding on the hotkey")
        return
    yield from placed(metagraph, settings, address)


async def _read(settings: Settings) -> Metagraph:
    from miner.chain.factory import build_source

    source = build_source(settings, None)
    try:
        return await asyncio.wait_for(source.metagraph(), settings.chain_timeout_seconds * 2)
    finally:
        await source.close()


def callers(metagraph: Metagraph, settings: Settings) -> Finding:
    """How many hotkeys the gate would let in: none is a miner that nobody can reach."""
    allowed = {public_key(hotkey) for hotkey in settings.allow_hotkeys}
    denied = {public_key(hotkey) for hotkey in settings.deny_hotkeys}

    def is_let_in(node: Node) -> bool:
        key = public_key(node.hotkey)
        listed = (not allowed or key in allowed) and key not in denied
        permitted = node.validator_permit or not settings.require_validator_permit
        return listed and permitted and node.stake >= settings.min_stake_threshold

    count = sum(map(is_let_in, metagraph.nodes))
    threshold = f"MIN_STAKE_THRESHOLD={settings.min_stake_threshold:g}"
    if count == 0:
        return warn(
            "callers",
            f"not one of {len(metagraph.nodes)} nodes would be let in, with {threshold}",
            "set MIN_STAKE_THRESHOLD lower (0 on a test network), and look at ALLOW_HOTKEYS and DENY_HOTKEYS",
        )
    return ok("callers", f"{count} of {len(metagraph.nodes)} nodes would be let in, with {threshold}")


def placed(metagraph: Metagraph, settings: Settings, address: str) -> Iterator[Finding]:
    """Whether the subnet knows this hotkey, and under which address."""
    node = metagraph.find(public_key(address) or b"")
    if node is None:
        yield _unregistered(settings, address)
        return
    yield ok("registration", f"{address} has uid {node.uid} on subnet {metagraph.netuid}")
    yield _axon(node, settings)


def _unregistered(settings: Settings, address: str) -> Finding:
    if settings.chain is ChainKind.FILE:
        detail = (
            f"{address} is not in {settings.nodes_file}; fine for a trial, but nothing on chain was asked"
        )
        return warn("registration", detail, "set CHAIN=bittensor to mine in earnest")
    return fail(
        "registration",
        f"{address} is not registered on subnet {settings.netuid}: no validator will find it",
        f"btcli subnets register --netuid {settings.netuid} "
        f"-w {settings.wallet_name} -H {settings.hotkey_name}",
    )


def _axon(node: Node, settings: Settings) -> Finding:
    published = f"{node.ip}:{node.port}" if node.ip and node.port else ""
    if settings.chain is ChainKind.FILE:
        return skip("published address", f"CHAIN=file; the file says {published or 'none'}")
    publish = "god-miner chain publish-ip"
    if not published:
        return fail(
            "published address",
            "none: validators have no address to call",
            publish if settings.public_ip else f"set PUBLIC_IP, then: {publish}",
        )
    if settings.public_ip is None:
        return warn(
            "published address",
            f"{published}, and PUBLIC_IP is not set to compare it with",
            "set PUBLIC_IP to this machine's public address",
        )
    if (node.ip, node.port) != (settings.public_ip, settings.axon_port):
        wanted = f"{settings.public_ip}:{settings.axon_port}"
        return fail(
            "published address",
            f"the chain says {published}, the settings say {wanted}: validators call the first",
            f"{publish}; or correct PUBLIC_IP and PUBLIC_PORT or PUBLISHED_PORT",
        )
    return ok("published address", published)


def _readable(metagraph: Metagraph, seconds: float) -> Finding:
    block = "" if metagraph.block is None else f" at block {metagraph.block}"
    nodes = f"{len(metagraph.nodes)} nodes on subnet {metagraph.netuid}{block}"
    return ok("chain", f"{nodes}, read from {metagraph.source} in {seconds:.1f} s")


def _unreadable(settings: Settings, error: Exception) -> Finding:
    detail = f"can not be read: {error or type(error).__name__}"
    if settings.chain is ChainKind.FILE:
        fix = f"write {settings.nodes_file} (see docs), or set CHAIN=bittensor"
    else:
        fix = "look at the network and SUBTENSOR_NETWORK, or set SUBTENSOR_ADDRESS to another node"
    return fail("chain", detail, fix)


def _own_address(settings: Settings) -> str | None:
    from miner.identity import IdentityError, known_address

    try:
        return known_address(settings)
    except IdentityError:
        return None


CHECK = Check("chain", run, LIMIT_SECONDS)
