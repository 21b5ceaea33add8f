"""The validators' endpoints, exactly as they call them: paths, trailing slashes, reply shapes.

Their routes are declared to FastAPI and run without its machinery. It reads and parses a body before it asks
its dependencies who is calling; here a stranger's body is not even read. And its middleware, exit stacks and
dependency solving cost more than all that an offer needs: a signed offer took 510 µs of CPU through them and
takes 190 without (benchmarks/offers.py). So a signed route keeps what FastAPI is good at, the declaration,
the routing of paths with parameters and the schema, and answers the request itself.

Verifying a request opens its transaction: the nonce is stored together with the first thing that the endpoint
writes (`caller.ticket.write`), so that a reply costs one fsync. A route waits for that before it replies.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any, NamedTuple

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.types import Receive, Scope, Send

from core.domain.errors import GodMinerError
from core.domain.wire import (
    MinerSubmission,
    MinerTaskOffer,
    MinerTaskResponse,
    TaskId,
    TournamentType,
    TrainingRepoResponse,
    TrainRequestImage,
    TrainRequestText,
    TrainResponse,
)
from miner.alerts.request_watch import RequestWatch
from miner.chain.auth import Authenticator, Caller
from miner.http.errors import InvalidRequest, JsonReply, MethodNotAllowed, error_reply, internal_error
from miner.offers.service import OfferService
from miner.store.jobs import RecordedStart

log = logging.getLogger(__name__)

#: The largest request whose invalid values are shown in the refusal.
MAX_BODY_WITH_VALUES = 64 * 1024


class ClientGone(Exception):
    """The client hung up while it was still sending; there is nobody to reply to."""


class SignedRequest(NamedTuple):
    """A verified request, as an endpoint gets it."""

    service: OfferService
    caller: Caller
    #: The body as received, which is what was signed and is stored.
    raw: bytes


def _supplied_by_the_route() -> SignedRequest:
    raise NotImplementedError("SignedRoute makes the SignedRequest; declare the endpoint with it")


#: An endpoint's first parameter. The marker only keeps FastAPI from taking it for part of the body.
SignedRequestArgument = Annotated[SignedRequest, Depends(_supplied_by_the_route)]


class SignedRoute(APIRoute):
    """A route whose endpoint takes a `request` and one of: `body`, a model; a path parameter; nothing."""

    def __init__(self, path: str, endpoint: Any, **more: Any) -> None:
        super().__init__(path, endpoint, **more)
        (self._method,) = self.methods or {"GET"}
        signature = inspect.signature(endpoint, eval_str=True)
        hints = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        del hints["request"]
        body = hints.pop("body", None)
        self._body: TypeAdapter[Any] | None = TypeAdapter(body) if body else None
        self._parameters = {name: TypeAdapter(hint) for name, hint in hints.items()}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, whoever sent it. Called by FastAPI's routing and by `RequestMiddleware`."""
        try:
            answer = await self._answer(scope, receive)
        except GodMinerError as error:
            reply = error_reply(error)
        except ClientGone:
            # Ended here and not further out: Starlette would log it with its traceback, at a stranger's will.
            return
        except Exception:
            log.exception("%s %s failed", scope["method"], self.path)
            reply = internal_error()
        else:
            reply = JsonReply(HTTPStatus.OK, answer.model_dump_json().encode())
        await reply.send(send)

    async def _answer(self, scope: Scope, receive: Receive) -> BaseModel:
        if scope["method"] != self._method:
            raise MethodNotAllowed([self._method])
        state, address = scope["app"].state, scope["client"][0] if scope["client"] else ""
        authenticator: Authenticator = state.authenticator
        unverified = authenticator.admit(scope["headers"], address)
        try:
            # A GET's signature covers no body, so none is read.
            raw = b"" if self._body is None else await _read_body(receive)
        except ClientGone:
            # Good-looking headers are free to make up, with nothing behind them.
            authenticator.note_failure(address)
            raise
        caller = authenticator.verify(unverified, self._method, raw, address)
        try:
            arguments = self._arguments(raw, scope.get("path_params", {}), caller, state.request_watch)
            request = SignedRequest(state.offer_service, caller, raw)
            answer: BaseModel = await self.endpoint(request, **arguments)
        except GodMinerError as error:
            log.info("%s refused to %s: %s", self.path, caller.hotkey, error)
            raise
        finally:
            # Also when the request itself was refused: its nonce is used up.
            await caller.ticket.wait_until_saved()
        return answer

    def _arguments(
        self, raw: bytes, path: Mapping[str, str], caller: Caller, watch: RequestWatch
    ) -> dict[str, object]:
        if self._body is not None:
            try:
                body = _validated_body(self._body, raw)
            except InvalidRequest as refused:
                watch.note_invalid(caller.hotkey, self.path, str(refused), time.time())
                raise
            watch.note_valid(caller.hotkey, self.path, raw, time.time())
            return {"body": body}
        return {name: _validated_parameter(name, adapter, path) for name, adapter in self._parameters.items()}


async def _read_body(receive: Receive) -> bytes:
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


def _validated_body(adapter: TypeAdapter[Any], raw: bytes) -> Any:
    try:
        return adapter.validate_json(raw)
    except ValidationError as error:
        # Putting values back together to show them takes seconds where somebody sent megabytes of them.
        with_values = len(raw) <= MAX_BODY_WITH_VALUES
        problems = error.errors(include_url=False, include_context=False, include_input=with_values)
        raise InvalidRequest(problems) from None


def _validated_parameter(name: str, adapter: TypeAdapter[Any], path: Mapping[str, str]) -> Any:
    try:
        return adapter.validate_python(path[name])
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        raise InvalidRequest([{**problem, "loc": (name,)} for problem in problems]) from None


# The endpoints


async def answer_offer(request: SignedRequestArgument, body: MinerTaskOffer) -> MinerTaskResponse:
    """Would this miner take the task?"""
    decision = await request.service.offer(request.caller, body, request.raw)
    return MinerTaskResponse(message=decision.message, accepted=decision.accepted)


async def start_text(request: SignedRequestArgument, body: TrainRequestText) -> TrainResponse:
    """The task is this miner's. Acknowledged at once; a repeat replaces repository name and deadline."""
    started = await request.service.start_text(request.caller, body, request.raw)
    return TrainResponse(message=_start_message(started), task_id=body.task_id)


async def start_image(request: SignedRequestArgument, body: TrainRequestImage) -> TrainResponse:
    """The same for an image task."""
    started = await request.service.start_image(request.caller, body, request.raw)
    return TrainResponse(message=_start_message(started), task_id=body.task_id)


async def latest_submission(request: SignedRequestArgument, task_id: TaskId) -> MinerSubmission:
    """Return the published model of a task, or 404 while there is none."""
    return await request.service.submission(request.caller, task_id)


async def training_repo(request: SignedRequestArgument, task_type: TournamentType) -> TrainingRepoResponse:
    """The tournament entry of a type; 404 when the operator entered none."""
    return request.service.training_repo(task_type)


#: Method, path, endpoint. POST paths end in a slash, and nothing is redirected to them: most clients lose
#: the body on the way.
ROUTES = (
    ("POST", "/task_offer/", answer_offer),
    ("POST", "/task_offer_image/", answer_offer),
    ("POST", "/start_training/", start_text),
    ("POST", "/start_training_grpo/", start_text),
    ("POST", "/start_training_image/", start_image),
    ("GET", "/get_latest_model_submission/{task_id}", latest_submission),
    ("GET", "/training_repo/{task_type}", training_repo),
)


def add_routes(app: FastAPI) -> None:
    for method, path, endpoint in ROUTES:
        app.router.add_api_route(path, endpoint, methods=[method], route_class_override=SignedRoute)


def _start_message(started: RecordedStart) -> str:
    """Always an answer, never an error: one reply that is not JSON breaks the validator's whole round."""
    if started.end_reason is not None:
        return "Noted, but nothing can be trained for this task here in the time that is left."
    if started.differs:
        return "Known with another type, model or data, which it keeps; repository name and deadline updated."
    if started.repeated:
        return "Training is queued; repository name and deadline updated."
    return "Training is queued."
