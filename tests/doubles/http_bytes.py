"""HTTP/1.1 in bytes: requests as they are sent, and replies that are whole, torn or not there yet."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_HEAD_END = b"\r\n\r\n"
_STATUS_LINE = re.compile(rb"HTTP/1\.1 ([1-5]\d\d) [ -~]*")


class Torn(AssertionError):
    """Bytes came, and they are not a whole reply."""


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        content = self.json
        assert isinstance(content["message"], str)
        assert content["message"]
        return str(content["error"])

    @property
    def closes(self) -> bool:
        return self.headers.get("connection", "").lower() == "close"


def take_reply(received: bytearray, *, to_head: bool = False) -> Reply | None:
    """Remove the first whole reply from `received` and return it; None while it is not all there."""
    head, found, rest = bytes(received).partition(_HEAD_END)
    if not found:
        return None
    status_line, *lines = head.split(b"\r\n")
    matched = _STATUS_LINE.fullmatch(status_line)
    if matched is None:
        raise Torn(f"not the beginning of a reply: {status_line[:100]!r}")
    status, headers = int(matched[1]), _headers(lines)
    length = "0" if status == 100 else headers.get("content-length", "")
    if not length.isdigit():
        raise Torn(f"content-length is {length!r} in {headers}")
    body = b"" if to_head else rest[: int(length)]
    if not to_head and len(body) < int(length):
        return None
    del received[: len(head) + len(_HEAD_END) + len(body)]
    if body:
        _check_json(headers, body)
    return Reply(status, headers, body)


def _headers(lines: list[bytes]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.decode("ascii").partition(":")
        if not colon or name.lower() in headers:
            raise Torn(f"not a header, or a second one: {line!r}")
        headers[name.lower()] = value.strip()
    return headers


def _check_json(headers: dict[str, str], body: bytes) -> None:
    if headers.get("content-type") != "application/json":
        raise Torn(f"content-type is {headers.get('content-type')!r}")
    try:
        json.loads(body)
    except ValueError:
        raise Torn(f"not JSON: {body[:200]!r}") from None


def request(
    target: str,
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
    *,
    method: str | None = None,
    version: str = "HTTP/1.1",
) -> bytes:
    """Return one whole request."""
    lines = [f"{method or ('POST' if body else 'GET')} {target} {version}", "host: miner"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    if body:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)
