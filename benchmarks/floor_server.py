"""The least that keeps the offer protocol's promises in one CPython process: the signature is checked, a row
is on disk before the reply, many rows in one commit. It decides nothing, checks no header's form, keeps no
nonces, limits nobody and survives no odd request: what lies between it and us is what all of that costs.

    python -m benchmarks.floor_server PORT FILE
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from pathlib import Path
from typing import cast

import uvloop
from httptools import HttpRequestParser

from miner.fiber import is_signed, post_message, public_key, signature_bytes
from miner.store.writer import Writer

_BODY = b'{"message":"no","accepted":false}'
_REPLY = (
    b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: "
    + str(len(_BODY)).encode()
    + b"\r\n\r\n"
) + _BODY


class Floor(asyncio.Protocol):
    writer: Writer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.parser = HttpRequestParser(self)
        self.headers: dict[bytes, bytes] = {}
        self.body = b""

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        headers, body, self.headers, self.body = self.headers, self.body, {}, b""
        if b"nonce" not in headers:  # whether it is up
            self.transport.write(_REPLY % b"200 OK")
            return
        nonce, validator, miner, signature = (
            headers[name].decode() for name in (b"nonce", b"validator-hotkey", b"miner-hotkey", b"signature")
        )
        key, signed = public_key(validator), signature_bytes(signature)
        if key is None or signed is None or not is_signed(post_message(nonce, miner, body), signed, key):
            self.transport.write(_REPLY % b"401 Unauthorized")
            return
        row = (nonce, key, body)
        saved = self.writer.submit(lambda books: books.execute("INSERT INTO offers VALUES (?, ?, ?)", row))
        saved.add_done_callback(lambda _: self.transport.write(_REPLY % b"200 OK"))


def _books(path: Path) -> sqlite3.Connection:
    books = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    books.execute("PRAGMA journal_mode=WAL")
    books.execute("PRAGMA synchronous=FULL")
    books.execute("CREATE TABLE offers (nonce TEXT PRIMARY KEY, validator BLOB, body BLOB) WITHOUT ROWID")
    return books


async def main(port: int, path: Path) -> None:
    loop = asyncio.get_running_loop()
    Floor.writer = Writer(lambda: _books(path))
    Floor.writer.start(loop)
    server = await loop.create_server(Floor, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), Path(sys.argv[2])))
