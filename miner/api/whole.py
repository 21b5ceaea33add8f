"""Replies in one piece: the head waits for its body, and both leave together.

uvicorn writes the two one after the other, and a daemon killed in between leaves a torn reply behind.
"""

from __future__ import annotations

import asyncio

#: "100 Continue": not a reply, and followed by none until the body is here.
_INTERIM = b"HTTP/1.1 100 "


class WholeReplies:
    """What uvicorn writes one reply to, in place of the transport."""

    __slots__ = ("_head", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        #: None until uvicorn writes it, empty once it has left.
        self._head: bytes | None = None

    def write(self, data: bytes) -> None:
        if self._head is None and not data.startswith(_INTERIM):
            self._head = data
        elif self._head:
            self._transport.write(self._head + data)
            self._head = b""
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()
