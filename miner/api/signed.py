"""Routes for verified validators: declared to FastAPI, run without its machinery.

FastAPI reads and parses a body before it asks its dependencies who is calling; here a stranger's body is
not even read. And its middleware, exit stacks and dependency solving cost more than all that an offer needs:
a signed offer took 510 µs of CPU through them and takes 190 without (benchmarks/offers.py). So a signed route
keeps what FastAPI is good at, the declaration, the routing of paths with parameters and the schema, and
answers the request itself.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any, NamedTuple

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from core.errors import GodMinerError
from miner.api import errors
from miner.api.front import ClientGone
from miner.api.reply import Reply
from miner.auth import Authenticator, Caller
from miner.offers.inbox import Inbox

log = logging.getLogger(__name__)

#: The largest request whose offending values are shown in the refusal.
MAX_BODY_SHOWN = 64 * 1024


class Call(NamedTuple):
    """A verified request, as an endpoint gets it."""

    inbox: Inbox
    caller: Caller
    #: The body as received.
    raw: bytes


def _given_by_the_route() -> Call:
    raise NotImplementedError("a Call is made by SignedRoute; declare the endpoint with it")


#: An endpoint's first parameter. The marker only keeps FastAPI from taking it for part of the body.
SignedCall = Annotated[Call, Depends(_given_by_the_route)]


class SignedRoute(APIRoute):
    """A route whose endpoint takes a `call` and one of: `body`, a model; a path parameter; nothing."""

    def __init__(self, path: str, endpoint: Any, **more: Any) -> None:
        super().__init__(path, endpoint, **more)
        (self._method,) = self.methods or {"GET"}
        signature = inspect.signature(endpoint, eval_str=True)
        hints = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        del hints["call"]
        body = hints.pop("body", None)
        self._body: TypeAdapter[Any] | None = TypeAdapter(body) if body else None
        self._parameters = {name: TypeAdapter(hint) for name, hint in hints.items()}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, whoever sent it. Called by FastAPI's routing and by `Front`."""
        try:
            answer = await self._answer(scope, receive)
        except GodMinerError as error:
            reply = errors.error_reply(error)
        except ClientGone:
            # Ended here and not further out: Starlette would log it with its traceback, at a stranger's will.
            return
        except Exception:
            log.exception("%s %s failed", scope["method"], self.path)
            reply = errors.internal_error()
        else:
            reply = Reply(HTTPStatus.OK, answer.model_dump_json().encode())
        await reply.send(send)

    async def _answer(self, scope: Scope, receive: Receive) -> BaseModel:
        if scope["method"] != self._method:
            raise errors.MethodNotAllowed([self._method])
        state, address = scope["app"].state, scope["client"][0] if scope["client"] else ""
        auth: Authenticator = state.authenticator
        claim = auth.admit(scope["headers"], address)
        try:
            # A GET's signature covers no body, so none is read.
            raw = b"" if self._body is None else await _body(receive)
        except ClientGone:
            auth.note_failure(address)  # good-looking headers are free to make up, with nothing behind them
            raise
        caller = auth.verify(claim, self._method, raw, address)
        try:
            arguments = self._arguments(raw, scope.get("path_params", {}))
            answer: BaseModel = await self.endpoint(Call(state.inbox, caller, raw), **arguments)
        except GodMinerError as error:
            log.info("%s refused to %s: %s", self.path, caller.hotkey, error)
            raise
        finally:
            # Also when the request itself was refused: its nonce is used up.
            await caller.ticket.settle()
        return answer

    def _arguments(self, raw: bytes, path: Mapping[str, str]) -> dict[str, Any]:
        if self._body is not None:
            return {"body": _valid_body(self._body, raw)}
        return {name: _parameter(name, adapter, path) for name, adapter in self._parameters.items()}


def direct(app: FastAPI) -> dict[str, ASGIApp]:
    """The signed routes without parameters in their path, which need no routing to be found."""

    def called(route: SignedRoute) -> ASGIApp:
        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            scope["app"], scope["route"] = app, route
            await route.handle(scope, receive, send)

        return call

    routes = [route for route in app.router.routes if isinstance(route, SignedRoute)]
    return {route.path: called(route) for route in routes if not route.param_convertors}


async def _body(receive: Receive) -> bytes:
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body"):
        return bytes(message["body"])
    parts: list[bytes] = []
    while message["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)
        message = await receive()
    raise ClientGone


def _valid_body(adapter: TypeAdapter[Any], raw: bytes) -> Any:
    try:
        return adapter.validate_json(raw)
    except ValidationError as error:
        # Putting values back together to show them takes seconds where somebody sent megabytes of them.
        with_values = len(raw) <= MAX_BODY_SHOWN
        problems = error.errors(include_url=False, include_context=False, include_input=with_values)
        raise errors.InvalidRequest(problems) from None


def _parameter(name: str, adapter: TypeAdapter[Any], given: Mapping[str, str]) -> Any:
    try:
        return adapter.validate_python(given[name])
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        raise errors.InvalidRequest([{**problem, "loc": (name,)} for problem in problems]) from None
