"""A web site on loopback for trials: datasets under any path, and a model as the hub's client asks for it.

It reads from memory and answers GET and HEAD; whoever needs a hub that misbehaves, or takes uploads, finds
one in the tests.
"""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

_COMMIT = "0" * 40


class Site:
    """Use as `with Site() as site`; then add what it is to answer."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}
        self._answers: dict[str, bytes] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="site", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add_file(self, path: str, content: bytes) -> str:
        """Its address."""
        self._files[path] = content
        return f"{self.url}{path}"

    def add_model(self, model_id: str, files: dict[str, bytes]) -> None:
        siblings = []
        for name, content in files.items():
            siblings.append({"rfilename": name, "blobId": _blob_id(content), "size": len(content)})
            for revision in ("main", _COMMIT):
                self._files[f"/{model_id}/resolve/{revision}/{name}"] = content
        info: dict[str, Any] = {
            "_id": "0" * 24,
            "id": model_id,
            "modelId": model_id,
            "author": model_id.partition("/")[0],
            "sha": _COMMIT,
            "private": False,
            "gated": False,
            "disabled": False,
            "tags": [],
            "siblings": siblings,
        }
        for path in (f"/api/models/{model_id}", f"/api/models/{model_id}/revision/main"):
            self._answers[path] = json.dumps(info).encode()

    def find(self, path: str) -> tuple[bytes, str] | None:
        """Content and kind."""
        if path in self._answers:
            return self._answers[path], "application/json"
        found = self._files.get(path)
        return None if found is None else (found, "application/octet-stream")


def _blob_id(content: bytes) -> str:
    """Git's name of a file with this content, which is what the hub lists for small ones."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _handler(site: Site) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def _answer(self, body: bool) -> None:
            found = site.find(unquote(urlsplit(self.path).path))
            content, kind = found or (b'{"error": "not found"}', "application/json")
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("X-Repo-Commit", _COMMIT)
            self.send_header("ETag", f'"{_blob_id(content)}"')
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base class's
            """Silent: the daemon's log says what it fetched."""

    return Handler
