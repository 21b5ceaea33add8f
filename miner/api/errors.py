"""The one place where an error becomes an HTTP status. Replies are always JSON of one shape:

`{"error": code, "message": text}` and, for a request that does not fit its model, `"fields"`.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from core.errors import GodMinerError
from miner import auth
from miner.api import front
from miner.nonces import NoncesFull
from miner.offers.inbox import NoSubmission, NotEntered
from miner.store.books import NonceUsed
from miner.store.jobs import ForeignJob
from miner.store.writer import StoreUnavailable

log = logging.getLogger(__name__)


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


STATUS: dict[type[GodMinerError], HTTPStatus] = {
    auth.HeaderMissing: HTTPStatus.UNPROCESSABLE_ENTITY,
    auth.HeaderInvalid: HTTPStatus.BAD_REQUEST,
    auth.CallerRefused: HTTPStatus.FORBIDDEN,
    auth.BadCredentials: HTTPStatus.UNAUTHORIZED,
    auth.TooManyRequests: HTTPStatus.TOO_MANY_REQUESTS,
    auth.MetagraphUnknown: HTTPStatus.SERVICE_UNAVAILABLE,
    NonceUsed: HTTPStatus.UNAUTHORIZED,
    NoncesFull: HTTPStatus.SERVICE_UNAVAILABLE,
    StoreUnavailable: HTTPStatus.SERVICE_UNAVAILABLE,
    ForeignJob: HTTPStatus.CONFLICT,
    NoSubmission: HTTPStatus.NOT_FOUND,
    NotEntered: HTTPStatus.NOT_FOUND,
    front.Busy: HTTPStatus.SERVICE_UNAVAILABLE,
    MethodNotAllowed: HTTPStatus.METHOD_NOT_ALLOWED,
    InvalidRequest: HTTPStatus.UNPROCESSABLE_ENTITY,
}

#: An offending value is shown this far; it came from outside.
MAX_SHOWN = 120
#: Wrong fields that are named.
MAX_FIELDS = 20


def status_of(error: GodMinerError) -> HTTPStatus:
    for kind in type(error).__mro__:
        if kind in STATUS:
            return STATUS[kind]
    return HTTPStatus.INTERNAL_SERVER_ERROR


def reply(status: int, code: str, message: str, **more: Any) -> Response:
    body = json.dumps({"error": code, "message": message, **more}, ensure_ascii=True)
    return Response(body, status_code=status, media_type="application/json")


def error_reply(error: GodMinerError) -> Response:
    more = {"fields": error.fields} if isinstance(error, InvalidRequest) else {}
    response = reply(status_of(error), error.code, str(error), **more)
    if isinstance(error, auth.TooManyRequests):
        response.headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if isinstance(error, MethodNotAllowed):
        response.headers["allow"] = error.allowed
    return response


def install(app: FastAPI) -> None:
    app.add_exception_handler(GodMinerError, _on_known)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_unknown)


async def _on_known(_: Request, error: Exception) -> Response:
    assert isinstance(error, GodMinerError)
    return error_reply(error)


async def _on_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_reply(InvalidRequest(error.errors()))


def _field(problem: Any) -> dict[str, str]:
    place: Sequence[Any] = problem.get("loc", ())
    path = ".".join(str(part) for part in place if part != "body") or "body"
    message = str(problem.get("msg", "is not valid")).removeprefix("Value error, ")
    named = {"field": path[:MAX_SHOWN], "message": message[:1000]}
    # Of a field that is missing, the input is all the rest of the request.
    if "input" in problem and problem.get("type") != "missing":
        shown = repr(problem["input"])
        named["value"] = shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + "…"
    return named


async def _on_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    response = reply(error.status_code, code, str(error.detail))
    response.headers.update(error.headers or {})
    return response


async def _on_unknown(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return internal_error()


def internal_error() -> Response:
    text = "the miner failed on this request; its log says why"
    return reply(HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error", text)
