"""Sources of the subnet: the chain, through the bittensor SDK in a process of its own, or a JSON file.

`sdk_worker` says why the SDK is not imported by the daemon. A process for every request costs about half a
second of one core every few minutes; in return the daemon's memory grows by 2 MB instead of 27, its event
loop is not held up by 50 ms of imports, and no hang or leak of the SDK outlives the request.

The file is for trying things out, and for a machine that must not talk to a chain: a list of nodes, or an
object with `nodes` and, to be safe from mix-ups, `netuid`. It is read again whenever its time or size has
changed, so an edit counts within a second or two.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from stat import S_IMODE
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from core.domain.errors import Problem
from core.system.files import write_atomically
from miner.chain.hotkey import Hotkey
from miner.chain.identity import Identity
from miner.chain.metagraph import (
    Amount,
    ChainError,
    ChainSource,
    ChainUnavailable,
    Metagraph,
    NodeRow,
    NodesFileError,
    PublishOutcome,
    PublishResult,
    WrongChain,
    checked_axon_address,
    host_and_port,
    node_problems,
    nodes_from_rows,
    result_without_submitting,
    shows_address,
)
from miner.settings import ChainKind, Settings
from miner.support.addresses import public_key
from miner.support.subprocess import python_path, run_child

log = logging.getLogger(__name__)

#: The networks whose name stands for a certain chain. `local` and the like do not.
GENESIS_HASHES = {
    "finney": "0x2f0555cc76fc2840a25a6ea3b9637146806f1f44b090c175ffde2a7e5ab36c03",
    "archive": "0x2f0555cc76fc2840a25a6ea3b9637146806f1f44b090c175ffde2a7e5ab36c03",
    "test": "0x8f9cf856bf558a14440e75569c9e58594757048d7b3a84b5d25f6bd978263105",
}
WORKER_COMMAND = (sys.executable, "-P", "-m", "miner.chain.sdk_worker")
#: One call to the node.
CALL_SECONDS = 30.0
#: For the worker to start and to import the SDK, on a machine that is busy training.
WORKER_START_SECONDS = 60.0
#: A metagraph of thousands of nodes has a quarter of this.
_MAX_ANSWER = 1 << 24
#: A submitted call waits for the next block or two, of 12 seconds each.
SUBMIT_SECONDS = 60.0
#: Waits before checking if an interrupted call landed: none, then a block or two.
READ_BACK_SECONDS = (0.0, 13.0, 13.0)
#: Outcomes after which the call may still be in a block: none named, or the pool lost sight of it.
UNDECIDED_ERRORS = frozenset({None, "Dropped", "Usurped", "Retracted", "FinalityTimeout"})

_ROWS = TypeAdapter(list[NodeRow])
_AMOUNT: TypeAdapter[float | None] = TypeAdapter(Amount | None)


@dataclass(eq=False, repr=False)
class SdkSource:
    """Read the chain in a worker process.

    `network` is a name or a ws(s):// URL; `address` takes its place, and pins to that one node. `timeout` is
    for each call to the node. `fallbacks` are further nodes of the same chain, by default the public ones of
    a network given by name.
    """

    netuid: int
    network: str = "finney"
    _: KW_ONLY
    address: str | None = None
    identity: Hotkey | None = None
    timeout: float = CALL_SECONDS
    fallbacks: Sequence[str] | None = None
    allow_private: bool = False
    cache_dir: Path | None = None
    submit_timeout: float = SUBMIT_SECONDS
    start_timeout: float = WORKER_START_SECONDS
    read_back: Sequence[float] = READ_BACK_SECONDS
    worker: Sequence[str] = WORKER_COMMAND
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    clock: Callable[[], float] = time.time
    poll_seconds: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._node = self.address or self.network
        self.name = f"bittensor:{node_without_credentials(self._node)}"
        self._expected_genesis = GENESIS_HASHES.get(self._node)
        self.genesis: str | None = self._expected_genesis
        self._submit_timeout = max(self.timeout, self.submit_timeout)
        self._environment = _worker_environment(self.cache_dir)

    async def metagraph(self) -> Metagraph:
        answer = await self._request({})
        self.genesis, graph = answer["genesis"], answer["metagraph"]
        if graph is None:
            text = f"{self.name} has no subnet {self.netuid}: check NETUID and SUBTENSOR_NETWORK"
            raise ChainError(text, code="no_such_subnet")
        return self._checked(graph)

    async def publish_axon(self, ip: str, port: int) -> PublishResult:
        """Publish the address unless the chain shows it already: the chain limits how often one may."""
        ip = checked_axon_address(ip, port, allow_private=self.allow_private)
        if self.identity is None:
            raise _no_identity()
        result = result_without_submitting(await self.metagraph(), self.identity.public_key, ip, port)
        return result or await self._submit(self.identity, ip, port)

    def _checked(self, graph: dict[str, Any]) -> Metagraph:
        """The worker's answer as a metagraph. A node can send nonsense that is well-formed."""
        try:
            return Metagraph(
                netuid=self.netuid,
                block=graph["block"],
                fetched_at=self.clock(),
                source=self.name,
                nodes=nodes_from_rows(_ROWS.validate_python(graph["nodes"])),
                genesis=self.genesis,
                tao_per_day=_AMOUNT.validate_python(graph.get("tao_per_day")),
            )
        except ValidationError as error:
            raise ChainUnavailable(f"{self.name} sent a metagraph with {node_problems(error)[0]}") from None
        except ValueError as error:
            raise ChainUnavailable(f"{self.name} sent a metagraph that makes no sense: {error}") from None

    async def _submit(self, identity: Hotkey, ip: str, port: int) -> PublishResult:
        request = {
            "hotkey": {
                "address": identity.ss58_address,
                "public_key": identity.public_key.hex(),
                "crypto_type": identity.crypto_type,
            },
            "channel": identity.channel.fileno(),
            "ip": ip,
            "port": port,
            "submit_timeout": self._submit_timeout,
        }
        try:
            result = await self._request(request, self._submit_timeout)
        except ChainUnavailable as error:
            return await self._check_published(identity, ip, port, str(error))
        if result["success"]:
            text = f"{host_and_port(ip, port)} is published on subnet {self.netuid}"
            return PublishResult(PublishOutcome.PUBLISHED, text, result["block_hash"])
        if result["error"] in UNDECIDED_ERRORS:
            return await self._check_published(identity, ip, port, result["message"])
        text = f"the chain refused: {result['message']} {result['help']}"
        return PublishResult(PublishOutcome.REFUSED, text)

    async def _check_published(self, identity: Hotkey, ip: str, port: int, doubt: str) -> PublishResult:
        """Find out if an interrupted call landed: sending it again blindly could do it twice."""
        log.warning("publishing the axon was cut off (%s); checking whether it landed", doubt)
        for wait in self.read_back:
            if wait:
                await self.pause(wait)
            try:
                graph = await self.metagraph()
            except ChainUnavailable as error:
                doubt = str(error)
                continue
            if shows_address(graph.nodes_by_key.get(identity.public_key), ip, port):
                place = host_and_port(ip, port)
                text = f"{place} is published: cut off while submitting, but the chain shows it"
                return PublishResult(PublishOutcome.PUBLISHED, text)
        return PublishResult(
            PublishOutcome.UNKNOWN,
            f"cut off while submitting ({doubt}), and the chain does not show {host_and_port(ip, port)} "
            "so far: look again with `god-miner chain status` in a minute, before publishing again",
        )

    async def _request(self, request: dict[str, Any], extra_seconds: float = 0.0) -> dict[str, Any]:
        """Run a request in a worker. Its own limits are tighter; the one here is for a worker that hangs."""
        request |= {
            "netuid": self.netuid,
            "node": self._node,
            "timeout": self.timeout,
            "fallbacks": self.fallbacks,
            "genesis": self._expected_genesis,
        }
        limit = self.start_timeout + 3 * self.timeout + extra_seconds
        passed = [request["channel"]] if "channel" in request else []
        response = await self._run_worker(json.dumps(request).encode(), limit, passed)
        if "wrong_chain" in response:
            raise WrongChain(
                f"{self.name}: {response['wrong_chain']}: check SUBTENSOR_NETWORK and SUBTENSOR_ADDRESS"
            )
        if "unavailable" in response:
            raise ChainUnavailable(f"{self.name} cannot answer: {response['unavailable']}")
        answer: dict[str, Any] = response["answer"]
        return answer

    async def _run_worker(self, request: bytes, limit: float, passed: Sequence[int]) -> dict[str, Any]:
        lines: list[bytes] = []
        try:
            async with asyncio.timeout(limit):
                child = await run_child(
                    self.worker,
                    request + b"\n",
                    lines.append,
                    environment=self._environment,
                    max_line=_MAX_ANSWER,
                    passed=passed,
                )
        except TimeoutError:
            raise ChainUnavailable(f"the chain worker was stuck and was killed after {limit:g} s") from None
        except OSError as error:
            raise ChainUnavailable(f"the chain worker cannot be started: {error}") from error
        noise = child.noise.decode(errors="replace").strip()
        if noise:
            log.debug("the chain worker said: %s", noise)
        try:
            response: dict[str, Any] = json.loads(b"".join(lines))
        except ValueError:
            last_line = noise.rpartition("\n")[2]
            raise ChainUnavailable(
                f"the chain worker ended with status {child.code} and no answer: {last_line}"
            ) from None
        return response


def _no_identity() -> ChainError:
    return ChainError("publishing needs the hotkey: set WALLET_NAME and HOTKEY_NAME", code="no_identity")


def node_without_credentials(node: str) -> str:
    """A network's name, or a node's address without user, path and query, where access tokens live."""
    if "://" not in node:
        return node
    parts = urlsplit(node)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{parts.port}" if parts.port else "")


def _worker_environment(cache_dir: Path | None) -> dict[str, str]:
    """The worker's environment: it has to import this very package, wherever the daemon was started."""
    environment = {**os.environ, "PYTHONPATH": python_path()}
    # The worker does not need it, and what it does not have it cannot leak.
    environment.pop("WALLET_PASSWORD", None)
    if cache_dir is not None:
        # Where the SDK keeps the chain's metadata, 400 kB per runtime version; its default is in the home
        # directory, which a service account may not have.
        environment.setdefault("BITTENSOR_RUNTIME_CACHE_DIR", str(cache_dir))
    return environment


POLL_SECONDS = 1.0

FileSignature = tuple[int, int, int]


class _NodesDocument(BaseModel):
    model_config = ConfigDict(extra="forbid")

    netuid: int | None = None
    block: int | None = None
    nodes: list[NodeRow]


class NodesFileSource:
    """Reads a nodes file. An invalid file raises each time; the refresher then goes on with what it has."""

    def __init__(
        self,
        path: Path,
        netuid: int,
        *,
        identity: Hotkey | Identity | None = None,
        allow_private: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self.netuid = netuid
        self.name = f"file:{path}"
        self.genesis: str | None = None
        self.poll_seconds: float | None = POLL_SECONDS
        self._identity = identity
        self._allow_private = allow_private
        self._clock = clock
        self._last_signature: FileSignature | None = None
        self._last_result: Metagraph | NodesFileError | None = None

    async def metagraph(self) -> Metagraph:
        return await asyncio.to_thread(self._read_if_changed)

    async def publish_axon(self, ip: str, port: int) -> PublishResult:
        """Write the address into the miner's own row, where a chain would store it."""
        ip = checked_axon_address(ip, port, allow_private=self._allow_private)
        if self._identity is None:
            raise _no_identity()
        key = self._identity.public_key
        graph = await self.metagraph()
        result = result_without_submitting(graph, key, ip, port)
        if result is not None:
            return result
        await asyncio.to_thread(self._write_address, key, ip, port)
        return PublishResult(PublishOutcome.PUBLISHED, f"{host_and_port(ip, port)} is written to {self.path}")

    def _read_if_changed(self) -> Metagraph:
        signature = self._signature()
        if self._last_result is None or signature != self._last_signature:
            self._last_signature = signature
            try:
                self._last_result = read_nodes(self.path, self.netuid, at=self._clock())
            except NodesFileError as error:
                self._last_result = error
        if isinstance(self._last_result, NodesFileError):
            raise NodesFileError(self._last_result.source, self._last_result.problems)
        self._last_result = self._last_result.with_fetched_at(self._clock())
        return self._last_result

    def _signature(self) -> FileSignature | None:
        """Differs whenever the file was changed; the inode changes with an editor's rename, too."""
        try:
            stat = self.path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _write_address(self, key: bytes, ip: str, port: int) -> None:
        document: Any = json.loads(self.path.read_bytes())
        for row in document if isinstance(document, list) else document["nodes"]:
            if public_key(row["hotkey"]) == key:
                row |= {"ip": ip, "port": port}
        mode = S_IMODE(self.path.stat().st_mode)
        write_atomically(self.path, json.dumps(document, indent=2).encode() + b"\n", mode=mode)


def read_nodes(path: Path, netuid: int, *, at: float) -> Metagraph:
    """The metagraph that a nodes file describes; NodesFileError names the file and each bad field."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise _nodes_file_error(path, "there is no such file; set NODES_FILE, or CHAIN=bittensor") from None
    except OSError as error:
        raise _nodes_file_error(path, f"cannot be read: {error.strerror}") from error
    try:
        document = _parse_document(content)
        if document.netuid not in (None, netuid):
            raise _nodes_file_error(
                path, f"the nodes are for another subnet than NETUID={netuid}", "netuid", document.netuid
            )
        return Metagraph(netuid, document.block, at, f"file:{path}", nodes_from_rows(document.nodes))
    except ValidationError as error:
        raise NodesFileError(str(path), node_problems(error)) from None
    except ValueError as error:
        raise _nodes_file_error(path, str(error)) from None


def _parse_document(content: bytes) -> _NodesDocument:
    if content.lstrip()[:1] == b"[":
        content = b'{"nodes":' + content + b"}"
    return _NodesDocument.model_validate_json(content)


def _nodes_file_error(path: Path, rule: str, where: str = "the file", value: object = None) -> NodesFileError:
    return NodesFileError(str(path), [Problem(where, "" if value is None else repr(value), rule)])


def build_source(settings: Settings, identity: Hotkey | None) -> ChainSource:
    """The source that `CHAIN` names. Connects to nothing; without an identity it can read but not publish."""
    if settings.chain is ChainKind.FILE:
        return NodesFileSource(
            settings.nodes_file,
            settings.netuid,
            identity=identity,
            allow_private=settings.allow_private_axon,
        )
    return SdkSource(
        settings.netuid,
        settings.subtensor_network,
        address=settings.subtensor_address,
        identity=identity,
        allow_private=settings.allow_private_axon,
        cache_dir=settings.data_dir / "runtime-cache",
    )
