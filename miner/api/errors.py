"""The one place where an error becomes an HTTP status. Replies are always JSON of one shape:

`{"error": code, "message": text}` and, for a request that does not fit its model, `"fields"`.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from core.errors import GodMinerError
from miner import auth
from miner.api import guard
from miner.nonces import NoncesFull
from miner.offers.inbox import NoSubmission, NotEntered
from miner.store.books import NonceUsed
from miner.store.jobs import ForeignJob
from miner.store.writer import StoreUnavailable

log = logging.getLogger(__name__)

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
    guard.BodyTooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    guard.BodyTooSlow: HTTPStatus.REQUEST_TIMEOUT,
    guard.HeadersTooLarge: HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    guard.Busy: HTTPStatus.SERVICE_UNAVAILABLE,
}

#: An offending value is shown this far; it came from outside.
MAX_SHOWN = 120


def status_of(error: GodMinerError) -> HTTPStatus:
    for kind in type(error).__mro__:
        if kind in STATUS:
            return STATUS[kind]
    return HTTPStatus.INTERNAL_SERVER_ERROR


def reply(status: int, code: str, message: str, **more: Any) -> Response:
    body = json.dumps({"error": code, "message": message, **more}, ensure_ascii=True)
    return Response(body, status_code=status, media_type="application/json")


def error_reply(error: GodMinerError) -> Response:
    response = reply(status_of(error), error.code, str(error))
    if isinstance(error, auth.TooManyRequests):
        response.headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if isinstance(error, guard.ClosesConnection):
        response.headers["connection"] = "close"
    return response


def install(app: FastAPI) -> None:
    app.add_exception_handler(GodMinerError, _on_known)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_unknown)


async def _on_known(request: Request, error: Exception) -> Response:
    assert isinstance(error, GodMinerError)
    response = error_reply(error)
    if response.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        log.error("%s %s: %s", request.method, request.url.path, error)
    return response


async def _on_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    fields = [_field(problem) for problem in error.errors()[:20]]
    named = "; ".join(f"{field['field']}: {field['message']}" for field in fields[:3])
    return reply(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid_request", named, fields=fields)


def _field(problem: dict[str, Any]) -> dict[str, str]:
    place: Sequence[Any] = problem.get("loc", ())
    path = ".".join(str(part) for part in place if part != "body") or "body"
    shown = repr(problem.get("input"))
    if len(shown) > MAX_SHOWN:
        shown = shown[:MAX_SHOWN] + "…"
    message = str(problem.get("msg", "is not valid")).removeprefix("Value error, ")
    return {"field": path[:MAX_SHOWN], "message": message[:1000], "value": shown}


async def _on_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    response = reply(error.status_code, code, str(error.detail))
    response.headers.update(error.headers or {})
    return response


async def _on_unknown(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return reply(
        HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error", "the miner failed on this request; it is logged"
    )
