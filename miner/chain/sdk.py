"""The subnet from the chain, through the bittensor SDK in a process of its own.

`sdk_worker` tells why the SDK gets no place in the daemon. A process for every look costs about half a
second of one core every few minutes; in return the daemon's memory grows by 2 MB instead of 27, its event
loop is not held up by 50 ms of imports, and no hang or leak of the SDK outlives the look.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

import miner
from miner.chain import axon
from miner.chain.base import Metagraph, PublishOutcome, PublishResult, endpoint
from miner.chain.errors import ChainUnavailable, IdentityMissing, NoSuchSubnet, WrongChain
from miner.chain.rows import NodeRow, nodes_of, problems
from miner.identity import Identity

log = logging.getLogger(__name__)

#: The networks whose name promises a certain chain. `local` and the like promise nothing.
GENESIS = {
    "finney": "0x2f0555cc76fc2840a25a6ea3b9637146806f1f44b090c175ffde2a7e5ab36c03",
    "archive": "0x2f0555cc76fc2840a25a6ea3b9637146806f1f44b090c175ffde2a7e5ab36c03",
    "test": "0x8f9cf856bf558a14440e75569c9e58594757048d7b3a84b5d25f6bd978263105",
}
WORKER = (sys.executable, "-P", "-m", "miner.chain.sdk_worker")
#: For the worker to start and to import the SDK, on a machine that is busy training.
START_SECONDS = 60.0
#: A submitted call waits for the next block or two, of 12 seconds each.
SUBMIT_SECONDS = 60.0
#: When to look whether a call landed whose submission was cut off: at once, and after a block or two.
READ_BACK_SECONDS = (0.0, 13.0, 13.0)
#: Outcomes after which the call may still be in a block: none named, or the pool lost sight of it.
UNDECIDED = frozenset({None, "Dropped", "Usurped", "Retracted", "FinalityTimeout"})

_ROWS = TypeAdapter(list[NodeRow])


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
        start_timeout: float = START_SECONDS,
        read_back: Sequence[float] = READ_BACK_SECONDS,
        worker: Sequence[str] = WORKER,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`network` is a name or a ws(s):// URL; `address` takes its place, and pins to that one node.

        `timeout` is for each call to the node. `fallbacks` are further nodes of the same chain; None takes
        the public ones of a network given by name.
        """
        self.netuid = netuid
        self.poll_seconds: float | None = None
        self._node = address or network
        self.name = f"bittensor:{shown_node(self._node)}"
        self._promised = GENESIS.get(self._node)
        self.genesis: str | None = self._promised
        self._fallbacks = None if fallbacks is None else list(fallbacks)
        self._identity = identity
        self._timeout = timeout
        self._submit_timeout = max(timeout, submit_timeout)
        self._start_timeout = start_timeout
        self._allow_private = allow_private
        self._read_back = read_back
        self._worker = worker
        self._environment = _environment(cache_dir)
        self._pause = pause
        self._clock = clock

    async def metagraph(self) -> Metagraph:
        found = await self._ask({})
        self.genesis = found["genesis"]
        graph = found["metagraph"]
        if graph is None:
            raise NoSuchSubnet(f"{self.name} has no subnet {self.netuid}: check NETUID and SUBTENSOR_NETWORK")
        return self._checked(graph)

    async def publish_axon(self, ip: str, port: int) -> PublishResult:
        """Publish the address unless the chain shows it already: the chain limits how often one may."""
        ip = axon.checked_address(ip, port, allow_private=self._allow_private)
        if self._identity is None:
            raise IdentityMissing("publishing needs the hotkey: set WALLET_NAME and HOTKEY_NAME")
        settled = axon.settled(await self.metagraph(), self._identity.public_key, ip, port)
        return settled or await self._submit(self._identity, ip, port)

    async def close(self) -> None:
        """Nothing is held open: the worker of a cancelled question is killed at once."""

    def _checked(self, graph: dict[str, Any]) -> Metagraph:
        """The worker's answer as a metagraph. A node can send rubbish that is well-formed."""
        try:
            return Metagraph(
                netuid=self.netuid,
                block=graph["block"],
                fetched_at=self._clock(),
                source=self.name,
                nodes=nodes_of(_ROWS.validate_python(graph["nodes"])),
                genesis=self.genesis,
            )
        except ValidationError as error:
            raise ChainUnavailable(f"{self.name} sent a metagraph with {problems(error)[0]}") from None
        except ValueError as error:
            raise ChainUnavailable(f"{self.name} sent a metagraph that makes no sense: {error}") from None

    async def _submit(self, identity: Identity, ip: str, port: int) -> PublishResult:
        job = {"keyfile": identity.keyfile(), "ip": ip, "port": port, "submit_timeout": self._submit_timeout}
        try:
            result = await self._ask(job, self._submit_timeout)
        except ChainUnavailable as error:
            return await self._find_out(identity, ip, port, str(error))
        if result["success"]:
            text = f"{endpoint(ip, port)} is published on subnet {self.netuid}"
            return PublishResult(PublishOutcome.PUBLISHED, text, result["block_hash"])
        if result["error"] in UNDECIDED:
            return await self._find_out(identity, ip, port, result["message"])
        text = f"the chain refused: {result['message']} {result['help']}"
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

    async def _ask(self, job: dict[str, Any], extra_seconds: float = 0.0) -> dict[str, Any]:
        """Have a worker do a job. Its own limits are tighter; the one here is for a worker that is stuck."""
        job |= {
            "netuid": self.netuid,
            "node": self._node,
            "timeout": self._timeout,
            "fallbacks": self._fallbacks,
            "genesis": self._promised,
        }
        limit = self._start_timeout + 3 * self._timeout + extra_seconds
        told = await self._run(json.dumps(job).encode(), limit)
        if "wrong_chain" in told:
            raise WrongChain(
                f"{self.name}: {told['wrong_chain']}: check SUBTENSOR_NETWORK and SUBTENSOR_ADDRESS"
            )
        if "unavailable" in told:
            raise ChainUnavailable(f"{self.name} is of no help: {told['unavailable']}")
        found: dict[str, Any] = told["answer"]
        return found

    async def _run(self, job: bytes, limit: float) -> dict[str, Any]:
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *self._worker, stdin=pipe, stdout=pipe, stderr=pipe, env=self._environment
            )
        except OSError as error:
            raise ChainUnavailable(f"the chain worker can't be started: {error}") from error
        try:
            output, noise = await asyncio.wait_for(process.communicate(job), limit)
        except TimeoutError:
            raise ChainUnavailable(f"the chain worker was stuck and was killed after {limit:g} s") from None
        finally:
            await _reap(process)
        if noise:
            log.debug("the chain worker said: %s", noise.decode(errors="replace"))
        try:
            told: dict[str, Any] = json.loads(output)
        except ValueError:
            last_words = noise.decode(errors="replace").strip().rpartition("\n")[2]
            raise ChainUnavailable(
                f"the chain worker ended with status {process.returncode} and no answer: {last_words}"
            ) from None
        return told


def shown_node(node: str) -> str:
    """A network's name, or a node's address without user, path and query, where access tokens live."""
    if "://" not in node:
        return node
    parts = urlsplit(node)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{parts.port}" if parts.port else "")


def _environment(cache_dir: Path | None) -> dict[str, str]:
    """The worker's environment: it has to find this very package, wherever the daemon was started."""
    root = str(Path(miner.__file__).parent.parent)
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    # Nothing in there is for the worker, and what it does not have it can't leak.
    found.pop("WALLET_PASSWORD", None)
    if cache_dir is not None:
        # Where the SDK keeps the chain's metadata, 400 kB per runtime version; its default is in the home
        # directory, which a service account may not have.
        found.setdefault("BITTENSOR_RUNTIME_CACHE_DIR", str(cache_dir))
    return found


async def _reap(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
