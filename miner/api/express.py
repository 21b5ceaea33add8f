"""The express lane: a small signed POST is answered without ASGI in between.

An ASGI request is a scope, a cycle object, a task through five layers and two writes to the socket; for an
offer that is as much work as checking its signature. Requests of the usual form (POST to a path without
parameters, body announced and small, nothing else under way on the connection) are collected here, answered
by the very function that the ASGI route calls, and written in one go. All else takes the normal road.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from miner.api.front import Express
from miner.api.protocol import BoundedProtocol, WireLimits
from miner.api.reply import Reply

#: Larger bodies take the normal road, where a stranger's body is not even read.
MAX_EXPRESS_BODY = 16 * 1024


class _Nobody:
    """Stands where uvicorn's cycle has an event for a waiting `receive`: on this lane nobody waits."""

    def set(self) -> None:
        return


class _Express:
    """A request on the lane, as far as uvicorn's protocol looks at one."""

    __slots__ = ("body", "disconnected", "keep_alive", "response_complete", "response_started")
    message_event = _Nobody()

    def __init__(self) -> None:
        self.body = bytearray()
        self.keep_alive = True
        self.disconnected = False
        self.response_started = False
        self.response_complete = False


class ExpressProtocol(BoundedProtocol):
    answers: ClassVar[Mapping[bytes, Express]] = {}

    _express: _Express | None = None

    def begin_request(self, length: int) -> bool:
        free = not self.pipeline and (self.cycle is None or self.cycle.response_complete)
        fits = (
            free
            and self.url in self.answers
            and 0 < length <= MAX_EXPRESS_BODY
            and self.parser.get_method() == b"POST"
            and self.parser.get_http_version() == "1.1"
            and self.parser.should_keep_alive()
            and not self.expect_100_continue
        )
        if fits:
            # uvicorn sees a request under way: it queues what is pipelined behind it, and at shutdown waits.
            self._express = express = _Express()
            self.cycle = express  # type: ignore[assignment]
        return fits

    def on_body(self, body: bytes) -> None:
        if self._express is None:
            super().on_body(body)
        else:
            self._express.body += body  # bounded: it was announced, and the parser holds it to that

    def on_message_complete(self) -> None:
        express, self._express = self._express, None
        if express is None:
            super().on_message_complete()
            return
        self.end_request()
        address = self.client[0] if self.client else ""
        answer = self.answers[self.url](self.headers, bytes(express.body), address)
        task = self.loop.create_task(self._reply(express, answer))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _reply(self, express: _Express, answer: Awaitable[Reply]) -> None:
        reply = await answer
        express.response_complete = True
        if express.disconnected or self.transport.is_closing():
            return
        headers = (*self.server_state.default_headers, *reply.headers())
        lines = [STATUS_LINE[reply.status], *(b"%b: %b\r\n" % header for header in headers)]
        if not express.keep_alive:
            lines.append(b"connection: close\r\n")
        self.transport.write(b"".join([*lines, b"\r\n", reply.content]))
        if not express.keep_alive:
            self.transport.close()
        self.on_response_complete()


def protocol(
    limits: WireLimits, on_refusal: Callable[[int], None], answers: Mapping[str, Express]
) -> type[HttpToolsProtocol]:
    """The protocol class with an operator's limits; uvicorn makes the instances itself."""
    members = {
        "limits": limits,
        "callers": Counter(),
        "note_refusal": staticmethod(on_refusal),
        "answers": {path.encode(): answer for path, answer in answers.items()},
    }
    return type("ExpressProtocol", (ExpressProtocol,), members)
