"""A store of files with signed addresses, as validators' datasets come from, and everything can go wrong."""

from __future__ import annotations

import hashlib
from pathlib import Path
from urllib.parse import quote

from tests.doubles.flaky import FlakyServer, Reply, Request

SIGNATURE = "d34db33f" * 8


class FileStore(FlakyServer):
    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, bytes | Path] = {}
        #: Path → what is answered besides.
        self.headers: dict[str, dict[str, str]] = {}
        self.signatures = {SIGNATURE}
        self.etags = True

    def add(self, name: str, content: bytes | Path, **headers: str) -> str:
        """The signed address of a new (or newly written) file."""
        path = f"/bucket/{quote(name)}"
        self.files[path] = content
        self.headers[path] = {key.replace("_", "-"): value for key, value in headers.items()}
        return self.sign(name)

    def sign(self, name: str, signature: str = SIGNATURE) -> str:
        signed = f"X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Expires=604800&X-Amz-Signature={signature}"
        return f"{self.url}/bucket/{quote(name)}?{signed}"

    def answer(self, request: Request) -> Reply:
        if request.query.get("X-Amz-Signature", [""])[0] not in self.signatures:
            return Reply(403, body=b"<Error><Code>AccessDenied</Code></Error>")
        content = self.files.get(request.path)
        if content is None:
            return Reply(404, body=b"<Error><Code>NoSuchKey</Code></Error>")
        headers = dict(self.headers[request.path])
        if self.etags:
            data = content if isinstance(content, bytes) else content.read_bytes()
            headers.setdefault("ETag", f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"')
            if request.headers.get("if-none-match") == headers["ETag"]:
                return Reply(304, headers)
        return Reply(200, headers, content, ranged=True)
