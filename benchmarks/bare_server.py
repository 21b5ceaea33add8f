"""The least that can answer HTTP: counts bytes, looks at nothing. What the load generator can do at most.

python -m benchmarks.bare_server PORT
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop

_BODY = b'{"message":"yes","accepted":true}'
_REPLY = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: "
    + str(len(_BODY)).encode()
    + b"\r\n\r\n"
    + _BODY
)
_LENGTH = b"content-length: "


class Bare(asyncio.Protocol):
    def __init__(self) -> None:
        self.seen = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.seen += data
        while (size := self._size()) and len(self.seen) >= size:
            self.seen = self.seen[size:]
            self.transport.write(_REPLY)

    def _size(self) -> int:
        """Length of the request at the front, headers and body; 0 while its headers are incomplete."""
        end = self.seen.find(b"\r\n\r\n")
        if end < 0:
            return 0
        at = self.seen.find(_LENGTH, 0, end)
        if at < 0:
            return end + 4
        value = at + len(_LENGTH)
        return end + 4 + int(self.seen[value : self.seen.find(b"\r", value)])


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Bare, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
