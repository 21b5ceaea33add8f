"""One request to the chain, in a process of its own.

`miner.chain.sources` starts it, writes a request to its standard input and reads the answer from its output.
The bittensor SDK is imported here and nowhere else, because nothing it does can be trusted to end. Version
11.3 hangs for ever when a node closes the socket cleanly while a request is pending, takes five minutes to
give up on a silent one, and answers a cancelled submission by unsubscribing through the same dead socket.
Cancel a connection attempt and close the client, and it still goes on reconnecting in the background:
measured against a silent node, every attempt leaves three tasks and a socket behind for good. A process that
ends takes all of that with it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import math
import os
import socket
import sys
import traceback
from collections.abc import Awaitable, Coroutine
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import bittensor

from miner.chain.hotkey import SIGN_SECONDS, Hotkey
from miner.chain.metagraph import Node

T = TypeVar("T")


@dataclass(frozen=True)
class ChainRequest:
    """The order to read or to publish, with the time limit of each step."""

    netuid: int
    node: str
    timeout: float
    fallbacks: list[str] | None = None
    #: The genesis hash that the chain must have, if known.
    genesis: str | None = None
    #: To publish an axon instead of reading the metagraph: the public half of the hotkey, the socket of the
    #: process that signs with it, and the address.
    hotkey: dict[str, object] | None = None
    channel: int = -1
    ip: str = ""
    port: int = 0
    submit_timeout: float = 0.0


class NodeUnavailable(Exception):
    """The node does not answer, or answers nonsense."""


class WrongGenesis(Exception):
    """The node serves another chain."""


async def run_request(request: ChainRequest) -> dict[str, object]:
    substrate, client = _connection(request)
    # The SDK's own `Client.connect` would do as well, but reads every subnet's token symbol on top.
    await _with_timeout(request.timeout, "connecting", substrate.connect())
    genesis = str(await _with_timeout(request.timeout, "reading the genesis hash", substrate.block_hash(0)))
    if request.genesis not in (None, genesis):
        raise WrongGenesis(f"it serves the chain with genesis {genesis}, not {request.genesis}")
    if request.hotkey is None:
        graph = await _with_timeout(
            request.timeout, "reading the metagraph", _metagraph(client, request.netuid)
        )
        return {"genesis": genesis, "metagraph": graph}
    return await _with_timeout(request.submit_timeout, "publishing the axon", _publish(client, request))


async def _metagraph(client: Any, netuid: int) -> dict[str, object] | None:
    graph = await client.subnets.metagraph(netuid, commitments=False)
    return graph and {
        "block": graph.block,
        "nodes": [asdict(node_of(neuron)) for neuron in graph.neurons],
        "tao_per_day": tao_per_day(graph),
    }


#: Of the chain.
BLOCK_SECONDS = 12


def tao_per_day(graph: Any) -> float | None:
    """TAO in a day for one alpha of emission, which the chain gives out once in an epoch."""
    price = float(graph.price or 0.0)
    known = math.isfinite(price) and price > 0
    return price * 86_400 / ((int(graph.tempo) + 1) * BLOCK_SECONDS) if known else None


async def _publish(client: Any, request: ChainRequest) -> dict[str, object]:
    assert request.hotkey is not None
    # The SDK takes any object that can sign. Neither it nor any of its 30 packages gets the key.
    channel = socket.socket(fileno=request.channel)
    channel.settimeout(SIGN_SECONDS)
    hotkey = Hotkey(request.hotkey, channel)
    intent = bittensor.ServeAxon(netuid=request.netuid, ip=request.ip, port=request.port)
    # In a block is enough: finality would be another half minute of waiting.
    result = await client.execute(intent, hotkey, wait_for_inclusion=True, wait_for_finalization=False)
    return {
        "success": result.success,
        "message": result.message,
        "block_hash": result.block_hash,
        "error": result.error.name if result.error else None,
        "help": result.error.remediation if result.error else "",
    }


def _connection(request: ChainRequest) -> tuple[Any, Any]:
    """The SDK's connection and client. Archive nodes are for old blocks, which are not needed here."""
    try:
        label, url = bittensor.settings.resolve_endpoint(request.node)
    except ValueError as error:
        raise WrongGenesis(str(error)) from None
    fallbacks = request.fallbacks
    if fallbacks is None:
        fallbacks = [] if "://" in request.node else bittensor.settings.default_fallback_endpoints(label)
    substrate = bittensor.RpcSubstrate(url, fallback_endpoints=fallbacks, archive_endpoints=[])
    return substrate, bittensor.Client(label, substrate=substrate)


def node_of(neuron: Any) -> Node:
    ip, port = axon_of(neuron.axon)
    return Node(
        uid=neuron.uid,
        hotkey=neuron.hotkey,
        coldkey=neuron.coldkey,
        # `amount` and not `tao`: the SDK tags the total with the subnet's token and refuses to call it TAO.
        stake=neuron.total_stake.amount,
        validator_permit=neuron.validator_permit,
        ip=ip,
        port=port,
        incentive=neuron.incentive,
        last_update=neuron.last_update,
        emission=neuron.emission.amount,
    )


def axon_of(published: str | None) -> tuple[str, int] | tuple[None, None]:
    """An axon as the SDK shows it: `1.2.3.4:7999`, `[2001:db8::1]:7999` or None."""
    if published is None:
        return None, None
    host, _, port = published.rpartition(":")
    address = str(ipaddress.ip_address(host.strip("[]")))
    return (address, int(port)) if int(port) else (None, None)


async def _with_timeout(seconds: float, what: str, call: Coroutine[Any, Any, T]) -> T:
    """The result of an SDK call; any other outcome is `NodeUnavailable`.

    Not `asyncio.wait_for`, which waits for the cancelled call to end. The SDK's documented errors are not
    all there are: a nonsense answer surfaces as AttributeError or TypeError wherever it was first touched.
    """
    task = asyncio.ensure_future(call)
    await asyncio.wait({task}, timeout=seconds)
    if not task.done():
        raise NodeUnavailable(f"{what}: no answer in {seconds:g} s")
    try:
        return task.result()
    except (bittensor.BittensorError, TimeoutError, OSError) as error:
        raise NodeUnavailable(f"{what}: {str(error).strip() or type(error).__name__}") from error
    except Exception as error:  # a boundary, see above
        traceback.print_exc()
        raise NodeUnavailable(f"{what}: the answer makes no sense to the SDK: {error!r}") from error


async def _response_of(work: Awaitable[dict[str, object]]) -> dict[str, object]:
    try:
        return {"answer": await work}
    except WrongGenesis as error:
        return {"wrong_chain": str(error)}
    except NodeUnavailable as error:
        return {"unavailable": str(error)}


def main() -> None:
    os.nice(10)
    # The answer alone goes to the output; what the SDK prints goes where its log goes.
    output = os.dup(1)
    os.dup2(2, 1)
    request = ChainRequest(**json.loads(sys.stdin.readline()))
    loop = asyncio.new_event_loop()
    response = json.dumps(loop.run_until_complete(_response_of(run_request(request)))).encode()
    while response:
        response = response[os.write(output, response) :]
    # Without closing the SDK's client: that can hang, and nothing here needs an orderly end.
    os._exit(0)


if __name__ == "__main__":
    main()
