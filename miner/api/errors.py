"""The one place where an error becomes an HTTP status. Replies are always JSON of one shape:

`{"error": code, "message": text}` and, for a request that does not fit its model, `"fields"`.
"""

from __future__ import annotations

import logging
import math
import reprlib
from collections.abc import Collection, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from core.errors import ConfigError, GodMinerError
from miner import auth
from miner.api import front
from miner.api.reply import Headers, Reply
from miner.api.reply import error as error_of
from miner.jobs.manager import NoJobsYet, NotNow
from miner.nonces import NoncesFull
from miner.offers.inbox import NoSubmission, NotEntered
from miner.store.books import NonceUsed
from miner.store.work import NoSuchJob
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
    NoSubmission: HTTPStatus.NOT_FOUND,
    NotEntered: HTTPStatus.NOT_FOUND,
    NotNow: HTTPStatus.CONFLICT,
    NoJobsYet: HTTPStatus.SERVICE_UNAVAILABLE,
    NoSuchJob: HTTPStatus.NOT_FOUND,
    ConfigError: HTTPStatus.UNPROCESSABLE_ENTITY,
    front.Busy: HTTPStatus.SERVICE_UNAVAILABLE,
    front.Stopping: HTTPStatus.SERVICE_UNAVAILABLE,
    MethodNotAllowed: HTTPStatus.METHOD_NOT_ALLOWED,
    InvalidRequest: HTTPStatus.UNPROCESSABLE_ENTITY,
}

#: An offending value is shown this far; it came from outside.
MAX_SHOWN = 120
#: Wrong fields that are named.
MAX_FIELDS = 20
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist = 3, 4, 4
_SHORT.maxstring = _SHORT.maxother = MAX_SHOWN


def status_of(error: GodMinerError) -> HTTPStatus:
    for kind in type(error).__mro__:
        if kind in STATUS:
            return STATUS[kind]
    return HTTPStatus.INTERNAL_SERVER_ERROR


def error_reply(error: GodMinerError) -> Reply:
    more = {"fields": error.fields} if isinstance(error, InvalidRequest) else {}
    headers: Headers = []
    if isinstance(error, auth.TooManyRequests):
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after))))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", error.allowed.encode()))
    return error_of(status_of(error), error.code, str(error), headers, **more)


def internal_error() -> Reply:
    text = "the miner failed on this request; its log says why"
    return error_of(HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error", text)


def install(app: FastAPI) -> None:
    app.add_exception_handler(GodMinerError, _on_known)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_unknown)


async def _on_known(_: Request, error: Exception) -> Response:
    assert isinstance(error, GodMinerError)
    return error_reply(error).response()


async def _on_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_reply(InvalidRequest(error.errors())).response()


async def _on_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    headers = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
    return error_of(error.status_code, code, str(error.detail), headers).response()


async def _on_unknown(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return internal_error().response()


def _field(problem: Any) -> dict[str, str]:
    place: Sequence[Any] = problem.get("loc", ())
    path = ".".join(str(part) for part in place if part != "body") or "body"
    message = str(problem.get("msg", "is not valid")).removeprefix("Value error, ")
    named = {"field": path[:MAX_SHOWN], "message": message[:1000]}
    # Of a field that is missing, the input is all the rest of the request.
    if "input" in problem and problem.get("type") != "missing":
        shown = _SHORT.repr(problem["input"])
        named["value"] = shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + "…"
    return named
