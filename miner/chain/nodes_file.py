"""The subnet from a JSON file: for trying things out, and for a machine that must not talk to a chain.

The file is a list of nodes, or an object with `nodes` and, to be safe from mix-ups, `netuid`. It is looked
at often and read again when its time or size has changed, so an edit counts within a second or two.
"""

from __future__ import annotations

import asyncio
import json
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from core.errors import Problem
from core.files import write_atomically
from miner.chain import axon
from miner.chain.base import Metagraph, PublishOutcome, PublishResult, endpoint
from miner.chain.errors import IdentityMissing, NodesFileError
from miner.chain.rows import NodeRow, nodes_of, problems
from miner.fiber import public_key
from miner.identity import Identity

POLL_SECONDS = 1.0

Signature = tuple[int, int, int]


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid")

    netuid: int | None = None
    block: int | None = None
    nodes: list[NodeRow]


class NodesFileSource:
    """Reads a nodes file. A bad file raises on every look; the keeper then goes on with what it has."""

    def __init__(
        self,
        path: Path,
        netuid: int,
        *,
        identity: Identity | None = None,
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
        self._seen: Signature | None = None
        self._last: Metagraph | NodesFileError | None = None

    async def metagraph(self) -> Metagraph:
        return await asyncio.to_thread(self._look)

    async def publish_axon(self, ip: str, port: int) -> PublishResult:
        """Write the address into the miner's own row, as a chain would remember it."""
        ip = axon.checked_address(ip, port, allow_private=self._allow_private)
        if self._identity is None:
            raise IdentityMissing("publishing needs the hotkey: set WALLET_NAME and HOTKEY_NAME")
        key = self._identity.public_key
        graph = await self.metagraph()
        result = axon.settled(graph, key, ip, port)
        if result is not None:
            return result
        await asyncio.to_thread(self._write_address, key, ip, port)
        return PublishResult(PublishOutcome.PUBLISHED, f"{endpoint(ip, port)} is written to {self.path}")

    async def close(self) -> None:
        """Nothing is held open."""

    def _look(self) -> Metagraph:
        signature = self._signature()
        if self._last is None or signature != self._seen:
            self._seen = signature
            try:
                self._last = read_nodes(self.path, self.netuid, at=self._clock())
            except NodesFileError as error:
                self._last = error
        if isinstance(self._last, NodesFileError):
            raise NodesFileError(self._last.source, self._last.problems)
        self._last = self._last.seen_again(self._clock())
        return self._last

    def _signature(self) -> Signature | None:
        """What tells one state of the file from another; the inode sees an editor's rename, too."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _write_address(self, key: bytes, ip: str, port: int) -> None:
        document: Any = json.loads(self.path.read_bytes())
        for row in document if isinstance(document, list) else document["nodes"]:
            if public_key(row["hotkey"]) == key:
                row |= {"ip": ip, "port": port}
        mode = stat.S_IMODE(self.path.stat().st_mode)
        write_atomically(self.path, json.dumps(document, indent=2).encode() + b"\n", mode=mode)


def read_nodes(path: Path, netuid: int, *, at: float) -> Metagraph:
    """The metagraph that a nodes file describes; NodesFileError names the file and each bad field."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise _bad(
            path, "there is no such file: `god-miner dev nodes` writes one, or set NODES_FILE"
        ) from None
    except OSError as error:
        raise _bad(path, f"can't be read: {error.strerror}") from error
    try:
        document = _parse(content)
        if document.netuid not in (None, netuid):
            raise _bad(
                path, f"the nodes are for another subnet than NETUID={netuid}", "netuid", document.netuid
            )
        return Metagraph(netuid, document.block, at, f"file:{path}", nodes_of(document.nodes))
    except ValidationError as error:
        raise NodesFileError(str(path), problems(error)) from None
    except ValueError as error:
        raise _bad(path, str(error)) from None


def _parse(content: bytes) -> _Document:
    if content.lstrip()[:1] == b"[":
        content = b'{"nodes":' + content + b"}"
    return _Document.model_validate_json(content)


def _bad(path: Path, rule: str, where: str = "the file", value: object = None) -> NodesFileError:
    return NodesFileError(str(path), [Problem(where, "" if value is None else repr(value), rule)])
