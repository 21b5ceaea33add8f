"""The subnet from the chain: reads the metagraph and publishes the axon through the bittensor SDK."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from miner.chain import axon
from miner.chain.base import Metagraph, Node, PublishOutcome, PublishResult, endpoint
from miner.chain.errors import ChainUnavailable, IdentityMissing, NoSuchSubnet, WrongChain
from miner.chain.link import Endpoint, Link, linked
from miner.identity import Identity

log = logging.getLogger(__name__)

#: The networks whose name promises a certain chain. `local` and the like promise nothing.
GENESIS = {
    "finney": "0x2f0555cc76fc2840a25a6ea3b9637146806f1f44b090c175ffde2a7e5ab36c03",
    "archive": "0x2f0555cc76fc2840a25a6ea3b9637146806f1f44b090c175ffde2a7e5ab36c03",
    "test": "0x8f9cf856bf558a14440e75569c9e58594757048d7b3a84b5d25f6bd978263105",
}
#: A submitted call waits for the next block or two, of 12 seconds each.
SUBMIT_SECONDS = 60.0
#: When to look whether a call landed whose submission was cut off: at once, and after a block or two.
READ_BACK_SECONDS = (0.0, 13.0, 13.0)
#: Outcomes after which the call may still be in a block: none named, or the pool lost sight of it.
UNDECIDED = frozenset({None, "Dropped", "Usurped", "Retracted", "FinalityTimeout"})


class SdkSource:
    def __init__(
        self,
        netuid: int,
        network: str = "finney",
        *,
        address: str | None = None,
        identity: Identity | None = None,
        timeout: float = 30.0,
        fallbacks: Sequence[str] | None = None,
        allow_private: bool = False,
        cache_dir: Path | None = None,
        submit_timeout: float = SUBMIT_SECONDS,
        read_back: Sequence[float] = READ_BACK_SECONDS,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`network` is a name or a ws(s):// URL; `address` takes its place, and pins to that one node."""
        node = address or network
        self.netuid = netuid
        self.poll_seconds: float | None = None
        self._promised = GENESIS.get(node)
        self.genesis: str | None = self._promised
        self._endpoint = Endpoint(node, timeout, fallbacks, cache_dir)
        self.name = f"bittensor:{self._endpoint.shown}"
        self._identity = identity
        self._allow_private = allow_private
        self._submit_timeout = max(timeout, submit_timeout)
        self._read_back = read_back
        self._pause = pause
        self._clock = clock

    async def metagraph(self) -> Metagraph:
        async with self._linked() as link:
            return await self._read(link)

    async def publish_axon(self, ip: str, port: int) -> PublishResult:
        """Publish the address unless the chain shows it already: the chain limits how often one may."""
        ip = axon.checked_address(ip, port, allow_private=self._allow_private)
        identity = self._identity
        if identity is None:
            raise IdentityMissing("publishing needs the hotkey: set WALLET_NAME and HOTKEY_NAME")
        async with self._linked() as link:
            settled = axon.settled(await self._read(link), identity.public_key, ip, port)
            result = settled or await self._submit(link, identity, ip, port)
        # With that connection closed: what is left is waiting and looking, on new ones.
        return (
            result if isinstance(result, PublishResult) else await self._find_out(identity, ip, port, result)
        )

    async def close(self) -> None:
        """Nothing is held open."""

    @asynccontextmanager
    async def _linked(self) -> AsyncIterator[Link]:
        """A connection to the right chain."""
        async with linked(self._endpoint) as link:
            if self._promised not in (None, link.genesis):
                raise WrongChain(
                    f"{self.name} serves the chain with genesis {link.genesis}, not {self._promised}: "
                    "check SUBTENSOR_NETWORK and SUBTENSOR_ADDRESS"
                )
            self.genesis = link.genesis
            yield link

    async def _read(self, link: Link) -> Metagraph:
        graph = await link.ask("reading the metagraph", self._fetch(link))
        if graph is None:
            raise NoSuchSubnet(f"{self.name} has no subnet {self.netuid}: check NETUID and SUBTENSOR_NETWORK")
        return graph

    async def _fetch(self, link: Link) -> Metagraph | None:
        graph = await link.client.subnets.metagraph(self.netuid, commitments=False)
        return graph and Metagraph(
            netuid=self.netuid,
            block=graph.block,
            fetched_at=self._clock(),
            source=self.name,
            nodes=tuple(map(node_of, graph.neurons)),
            genesis=link.genesis,
        )

    async def _submit(self, link: Link, identity: Identity, ip: str, port: int) -> PublishResult | str:
        """What became of it; or, in words, why that is not known."""
        intent = link.sdk.ServeAxon(netuid=self.netuid, ip=ip, port=port)
        # The keypair and not a wallet: given a wallet, the SDK unlocks an encrypted key again, and prompts
        # for it. In a block is enough: finality would be another half minute of waiting.
        call = link.client.execute(
            intent, identity.keypair, wait_for_inclusion=True, wait_for_finalization=False
        )
        try:
            result = await link.ask("publishing the axon", call, seconds=self._submit_timeout)
        except ChainUnavailable as error:
            return str(error)
        if result.success:
            text = f"{endpoint(ip, port)} is published on subnet {self.netuid}"
            return PublishResult(PublishOutcome.PUBLISHED, text, result.block_hash)
        if getattr(result.error, "name", None) in UNDECIDED:
            return str(result.message)
        text = f"the chain refused: {result.message} {result.error.remediation}"
        return PublishResult(PublishOutcome.REFUSED, text)

    async def _find_out(self, identity: Identity, ip: str, port: int, doubt: str) -> PublishResult:
        """Whether a call landed whose submission was cut off: to send it again blindly could do it twice."""
        log.warning("publishing the axon was cut off (%s); looking whether it landed", doubt)
        for wait in self._read_back:
            if wait:
                await self._pause(wait)
            try:
                graph = await self.metagraph()
            except ChainUnavailable as error:
                doubt = str(error)
                continue
            if axon.shows(graph.find(identity.public_key), ip, port):
                text = f"{endpoint(ip, port)} is published: cut off while submitting, but the chain shows it"
                return PublishResult(PublishOutcome.PUBLISHED, text)
        return PublishResult(
            PublishOutcome.UNKNOWN,
            f"cut off while submitting ({doubt}), and the chain does not show {endpoint(ip, port)} so far: "
            "look again with `god-miner chain status` in a minute, before publishing again",
        )


def node_of(neuron: Any) -> Node:
    ip, port = _axon(neuron.axon)
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


def _axon(published: str | None) -> tuple[str, int] | tuple[None, None]:
    """An axon as the SDK shows it: `1.2.3.4:7999`, `[2001:db8::1]:7999` or None."""
    if published is None:
        return None, None
    host, _, port = published.rpartition(":")
    address = str(ipaddress.ip_address(host.strip("[]")))
    return (address, int(port)) if int(port) else (None, None)
