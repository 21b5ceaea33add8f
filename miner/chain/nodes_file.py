"""The subnet from a JSON file: for trying things out, and for a machine that must not talk to a chain.

The file is a list of nodes, or an object with `nodes` and, to be safe from mix-ups, `netuid`. It is read
again whenever its time or size has changed, so an edit counts within a second or two.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from stat import S_IMODE
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from core.domain.errors import Problem
from core.system.files import write_atomically
from miner.chain.hotkey import Hotkey
from miner.chain.identity import Identity
from miner.chain.metagraph import (
    IdentityMissing,
    Metagraph,
    NodeRow,
    NodesFileError,
    PublishOutcome,
    PublishResult,
    checked_axon_address,
    host_and_port,
    node_problems,
    nodes_from_rows,
    result_without_submitting,
)
from miner.support.addresses import public_key

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
            raise IdentityMissing("publishing needs the hotkey: set WALLET_NAME and HOTKEY_NAME")
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
