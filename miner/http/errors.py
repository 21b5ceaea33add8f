"""Replies, and the one place where an error becomes an HTTP status.

Every error reply is JSON of one shape: `{"error": code, "message": text}` and, for a request that does not
fit its model, `"fields"`.
"""

from __future__ import annotations

import json
import logging
import math
import reprlib
from collections.abc import Collection, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Send

from core.domain.errors import GodMinerError
from miner.chain.auth import TooManyRequests

log = logging.getLogger(__name__)

#: The status of each error, by its `code`, so that this file need not import whoever raises it. A class that
#: is not listed has the status of its base class; an error with neither is our own failure, a 500.
STATUS = {
    "header_missing": HTTPStatus.UNPROCESSABLE_ENTITY,
    "header_invalid": HTTPStatus.BAD_REQUEST,
    "caller_refused": HTTPStatus.FORBIDDEN,
    "bad_credentials": HTTPStatus.UNAUTHORIZED,
    "nonce_used": HTTPStatus.UNAUTHORIZED,
    "too_many_requests": HTTPStatus.TOO_MANY_REQUESTS,
    "too_many_nonces": HTTPStatus.SERVICE_UNAVAILABLE,
    "metagraph_unknown": HTTPStatus.SERVICE_UNAVAILABLE,
    "store_unavailable": HTTPStatus.SERVICE_UNAVAILABLE,
    "no_submission": HTTPStatus.NOT_FOUND,
    "not_entered": HTTPStatus.NOT_FOUND,
    "no_such_job": HTTPStatus.NOT_FOUND,
    "no_such_offer": HTTPStatus.NOT_FOUND,
    "no_such_silence": HTTPStatus.NOT_FOUND,
    "nobody_notified": HTTPStatus.SERVICE_UNAVAILABLE,
    "job_state": HTTPStatus.CONFLICT,
    "no_jobs_yet": HTTPStatus.SERVICE_UNAVAILABLE,
    "no_such_file": HTTPStatus.NOT_FOUND,
    "stale_file": HTTPStatus.CONFLICT,
    "not_writable": HTTPStatus.FORBIDDEN,
    "what_if_busy": HTTPStatus.TOO_MANY_REQUESTS,
    "what_if_failed": HTTPStatus.SERVICE_UNAVAILABLE,
    "bad_config": HTTPStatus.UNPROCESSABLE_ENTITY,
    "busy": HTTPStatus.SERVICE_UNAVAILABLE,
    "stopping": HTTPStatus.SERVICE_UNAVAILABLE,
    "method_not_allowed": HTTPStatus.METHOD_NOT_ALLOWED,
    "invalid_request": HTTPStatus.UNPROCESSABLE_ENTITY,
}

#: How much of an invalid value is shown; it came from outside.
MAX_VALUE_CHARS = 120
#: How many invalid fields are named.
MAX_FIELDS = 20
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist = 3, 4, 4
_SHORT.maxstring = _SHORT.maxother = MAX_VALUE_CHARS

#: nginx's status for a client that hung up before the reply.
CLIENT_GONE = 499

RawHeaders = list[tuple[bytes, bytes]]


class JsonReply(NamedTuple):
    """A finished reply: what all of HTTP sends."""

    status: int
    #: JSON.
    content: bytes
    more_headers: Sequence[tuple[bytes, bytes]] = ()

    def headers(self) -> RawHeaders:
        length = b"%d" % len(self.content)
        return [(b"content-type", b"application/json"), (b"content-length", length), *self.more_headers]

    def response(self) -> Response:
        """Make the response object that FastAPI needs."""
        response = Response(self.content, status_code=self.status)
        response.raw_headers = self.headers()
        return response

    async def send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers()})
        await send({"type": "http.response.body", "body": self.content})


class ServerBusy(GodMinerError):
    code = "busy"


class ServerStopping(GodMinerError):
    """The grace period of a stop is over, and this request is not answered yet."""

    code = "stopping"


class MethodNotAllowed(GodMinerError):
    code = "method_not_allowed"

    def __init__(self, allowed: Collection[str]) -> None:
        self.allowed = ", ".join(sorted(allowed))
        super().__init__(f"only {self.allowed} is served here")


class InvalidRequest(GodMinerError):
    """A body, or a part of the path, that does not fit."""

    code = "invalid_request"

    def __init__(self, problems: Sequence[Any]) -> None:
        self.fields = [_field(problem) for problem in problems[:MAX_FIELDS]]
        super().__init__("; ".join(f"{field['field']}: {field['message']}" for field in self.fields[:3]))


def http_status_of(error: GodMinerError) -> HTTPStatus:
    for kind in type(error).__mro__:
        if (status := STATUS.get(getattr(kind, "code", ""))) is not None:
            return status
    return HTTPStatus.INTERNAL_SERVER_ERROR


def error_reply(error: GodMinerError) -> JsonReply:
    fields = {"fields": error.fields} if isinstance(error, InvalidRequest) else {}
    headers: RawHeaders = []
    if isinstance(error, TooManyRequests):
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after))))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", error.allowed.encode()))
    return _error(http_status_of(error), error.code, str(error), headers, **fields)


def internal_error() -> JsonReply:
    text = "the miner failed on this request; its log says why"
    return _error(HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error", text)


def _error(status: int, code: str, message: str, headers: RawHeaders | None = None, **more: Any) -> JsonReply:
    content = json.dumps({"error": code, "message": message, **more}, ensure_ascii=True).encode()
    return JsonReply(int(status), content, headers or ())


def install_error_handlers(app: FastAPI) -> None:
    for kind in (GodMinerError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)


async def _on_client_gone(_request: Request, _error: Exception) -> Response:
    """Answer a client that has hung up; it is not a failure of ours."""
    return Response(status_code=CLIENT_GONE)


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, GodMinerError):
        reply = error_reply(error)
    elif isinstance(error, RequestValidationError):
        reply = error_reply(InvalidRequest(error.errors()))
    elif isinstance(error, HTTPException):
        code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
        headers = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
        reply = _error(error.status_code, code, str(error.detail), headers)
    else:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        reply = internal_error()
    return reply.response()


def _field(problem: Any) -> dict[str, str]:
    """One of pydantic's problems, as the reply shows it."""
    path = ".".join(str(part) for part in problem.get("loc", ()) if part != "body") or "body"
    message = str(problem.get("msg", "is not valid")).removeprefix("Value error, ")
    field = {"field": path[:MAX_VALUE_CHARS], "message": message[:1000]}
    # The input of a missing field is all the rest of the request.
    if "input" in problem and problem.get("type") != "missing":
        value = _SHORT.repr(problem["input"])
        field["value"] = value if len(value) <= MAX_VALUE_CHARS else value[:MAX_VALUE_CHARS] + "…"
    return field
