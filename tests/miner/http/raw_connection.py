"""A connection to write bytes into and read replies from."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Self

from tests.doubles.http_bytes import Reply, Torn, take_reply

PATIENCE = 60.0


class RawConnection:
    """Use as `with`. Every wait ends after `PATIENCE` seconds with an error."""

    def __init__(self, port: int, *, address: str = "127.0.0.1", receive_buffer: int | None = None) -> None:
        self._socket = socket.socket()
        if receive_buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._socket.settimeout(PATIENCE)
        self._socket.bind((address, 0))
        self._socket.connect(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._left = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, *parts: bytes | str) -> Self:
        """All in one piece, as far as the network lets it."""
        self._socket.sendall(
            b"".join(part.encode("latin-1") if isinstance(part, str) else part for part in parts)
        )
        return self

    def send_until_refused(self, part: bytes, most: int) -> int:
        """Keep sending; the number of bytes that went out before the other side hung up."""
        sent = 0
        try:
            while sent < most:
                sent += self._socket.send(part)
        except OSError:
            pass
        return sent

    def end(self) -> Self:
        """Close our side; replies can still come."""
        with suppress(OSError):  # the other side may have hung up already
            self._socket.shutdown(socket.SHUT_WR)
        return self

    def reset(self) -> None:
        """Hang up the rude way."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        self._socket.close()

    def reply(self, *, to_head: bool = False) -> Reply:
        while (reply := take_reply(self._left, to_head=to_head)) is None:
            self._more()
        return reply

    def at_end(self) -> bool:
        """Wait for more; whether the other side hung up instead."""
        if not self._left:
            try:
                self._left += self._socket.recv(65536)
            except ConnectionResetError:
                return True
        return not self._left

    def closed(self) -> bool:
        """Wait for the other side to hang up; anything that comes before that is an error."""
        assert self.at_end(), f"came unasked: {bytes(self._left[:300])!r}"
        return True

    def last_reply(self) -> Reply:
        """The one reply that is still to come before the other side hangs up."""
        reply = self.reply()
        assert self.closed()
        return reply

    def silent(self, seconds: float) -> bool:
        """Nothing comes, and nobody hangs up, for so long."""
        self._socket.settimeout(seconds)
        try:
            self._left += self._socket.recv(65536)
        except TimeoutError:
            return not self._left
        finally:
            self._socket.settimeout(PATIENCE)
        return False

    def _more(self) -> None:
        try:
            data = self._socket.recv(65536)
        except ConnectionResetError:
            data = b""
        if not data:
            raise Torn(f"the other side hung up after {bytes(self._left[:300])!r}")
        self._left += data
