"""A finished answer, before it is anybody's response object."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from starlette.responses import Response
from starlette.types import Send

Headers = list[tuple[bytes, bytes]]

_JSON = (b"content-type", b"application/json")


class Reply(NamedTuple):
    status: int
    #: JSON.
    content: bytes
    more_headers: tuple[tuple[bytes, bytes], ...] = ()

    def headers(self) -> Headers:
        return [_JSON, (b"content-length", b"%d" % len(self.content)), *self.more_headers]

    def response(self) -> Response:
        """For FastAPI, which wants an object."""
        response = Response(self.content, status_code=self.status)
        response.raw_headers = self.headers()
        return response

    async def send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers()})
        await send({"type": "http.response.body", "body": self.content})


def error(status: int, code: str, message: str, headers: Headers | None = None, **more: Any) -> Reply:
    content = json.dumps({"error": code, "message": message, **more}, ensure_ascii=True).encode()
    return Reply(int(status), content, tuple(headers or ()))
