"""The node that serves a `Subtensor` over a websocket, and all the ways in which it can misbehave."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import threading
from collections.abc import Callable, Coroutine
from enum import Enum
from types import TracebackType
from typing import Any, Self

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from tests.doubles.chain import RpcError, Subtensor

WATCH = "author_submitAndWatchExtrinsic"
ANY = "*"


class Fault(Enum):
    """What a node does instead of answering a request."""

    SILENT = "reads the request and never answers"
    CLOSE_1000 = 1000
    CLOSE_1001 = 1001
    CLOSE_1011 = 1011
    DROP = "resets the TCP connection"
    NOT_JSON = "answers with a frame that is not JSON"
    WRONG_TYPE = "answers with a value of another type"
    RANDOM_BYTES = "answers with bytes that are no SCALE value of the type"
    DROP_AFTER_INCLUSION = "accepts the call, puts it into a block and hangs up before it says so"
    SILENT_AFTER_READY = "accepts the call, says `ready`, puts it into a block and says no more"


class ChainDouble:
    """A node on a port of loopback. `stop` is a kill: no goodbye to anyone. `start` brings it back."""

    def __init__(self, chain: Subtensor) -> None:
        self.chain = chain
        #: By JSON-RPC method, or ANY. A fault set on a runtime call's own name works as well.
        self.faults: dict[str, Fault] = {}
        self.calls: list[str] = []
        self.port = 0
        self._ids = itertools.count(1)
        self._server: Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chain-double", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._run(self._start())

    def stop(self) -> None:
        self._run(self._stop())

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(5)

    async def _start(self) -> None:
        self._server = await serve(
            self._talk, "127.0.0.1", self.port, max_size=2**24, compression=None, close_timeout=0.2
        )
        self.port = next(iter(self._server.sockets)).getsockname()[1]

    async def _drop(self) -> None:
        for connection in list(self._server.connections):
            connection.transport.abort()

    async def _stop(self) -> None:
        if self._server is None:
            return
        await self._drop()
        self._server.close(close_connections=False)
        await self._server.wait_closed()
        self._server = None

    async def _talk(self, connection: ServerConnection) -> None:
        try:
            async for frame in connection:
                await self._handle(connection, json.loads(frame))
        except ConnectionClosed:
            pass

    async def _handle(self, connection: ServerConnection, request: dict[str, Any]) -> None:
        method, params = request["method"], request.get("params") or []
        name = params[0] if method == "state_call" else method
        self.calls.append(name)
        fault = self.faults.get(name) or self.faults.get(method) or self.faults.get(ANY)
        if fault is not None and fault not in (Fault.DROP_AFTER_INCLUSION, Fault.SILENT_AFTER_READY):
            await self._misbehave(connection, request, fault)
        elif method == WATCH:
            await self._watch(connection, request, fault)
        elif method == "author_unwatchExtrinsic":
            await connection.send(_reply(request, True))
        else:
            await connection.send(_attempt(request, lambda: self.chain.answer(method, params)))

    async def _watch(
        self, connection: ServerConnection, request: dict[str, Any], fault: Fault | None
    ) -> None:
        subscription = f"watch{next(self._ids)}"
        block: list[str] = []

        def submit() -> str:
            block.append(self.chain.submit(request["params"][0]))
            return subscription

        reply = _attempt(request, submit)
        if fault is Fault.DROP_AFTER_INCLUSION:
            connection.transport.abort()
            return
        await connection.send(reply)
        for state in ["ready", *({"inBlock": b} for b in block), *({"finalized": b} for b in block)]:
            if not block or (fault is Fault.SILENT_AFTER_READY and state != "ready"):
                return
            await connection.send(_update(subscription, state))

    async def _misbehave(self, connection: ServerConnection, request: dict[str, Any], fault: Fault) -> None:
        match fault:
            case Fault.CLOSE_1000 | Fault.CLOSE_1001 | Fault.CLOSE_1011:
                await connection.close(fault.value)
            case Fault.DROP:
                connection.transport.abort()
            case Fault.NOT_JSON:
                await connection.send("<html>502 Bad Gateway</html>")
            case Fault.WRONG_TYPE:
                await connection.send(_reply(request, [{"surprise": True}]))
            case Fault.RANDOM_BYTES:
                noise = hashlib.shake_256(b"noise").digest(4096)
                await connection.send(_reply(request, "0x01" + noise.hex()))
            case Fault.SILENT:
                pass


def _attempt(request: dict[str, Any], answer: Callable[[], Any]) -> str:
    try:
        return _reply(request, answer())
    except RpcError as error:
        return json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": error.payload})


def _reply(request: dict[str, Any], result: Any) -> str:
    return json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result})


def _update(subscription: str, state: Any) -> str:
    params = {"subscription": subscription, "result": state}
    return json.dumps({"jsonrpc": "2.0", "method": "author_extrinsicUpdate", "params": params})
