"""Connections whose headers never end, all from one address: `python slow_clients.py PORT ADDRESS`.

A program of its own that needs only the standard library: a dozen of them must not take the time of the
test's own process. It holds up to 256 connections, opens at most 60 new ones a second in the place of those
that it loses, and ends with its standard input.
"""

from __future__ import annotations

import selectors
import socket
import sys
import time
from contextlib import suppress

MOST_OPEN, NEW_PER_SECOND = 256, 60
FULL = "full\n"
BEGUN = b"GET /healthz HTTP/1.1\r\nx: "


def hold_connections(port: int, address: str) -> None:
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    open_now, is_full, next_at = 0, False, time.monotonic()
    while True:
        for key, events in selector.select(max(0.0, next_at - time.monotonic())):
            if key.fileobj is sys.stdin:
                return
            assert isinstance(key.fileobj, socket.socket)
            if not goes_on(selector, key.fileobj, events):
                selector.unregister(key.fileobj)
                key.fileobj.close()
                open_now -= 1
                if not is_full:
                    is_full = True
                    sys.stdout.write(FULL)
                    sys.stdout.flush()
        if open_now < MOST_OPEN and time.monotonic() >= next_at:
            next_at = time.monotonic() + 1 / NEW_PER_SECOND
            selector.register(begin(port, address), selectors.EVENT_WRITE)
            open_now += 1


def begin(port: int, address: str) -> socket.socket:
    connection = socket.socket()
    connection.setblocking(False)
    connection.bind((address, 0))
    with suppress(BlockingIOError):
        connection.connect(("127.0.0.1", port))
    return connection


def goes_on(selector: selectors.BaseSelector, connection: socket.socket, events: int) -> bool:
    """Send the beginning of a request, or read what comes. False if the other side has hung up."""
    try:
        if events & selectors.EVENT_WRITE:
            connection.send(BEGUN)
            selector.modify(connection, selectors.EVENT_READ)
            return True
        return bool(connection.recv(4096))
    except OSError:
        return False


if __name__ == "__main__":
    hold_connections(int(sys.argv[1]), sys.argv[2])
