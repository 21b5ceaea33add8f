"""The validators' endpoints, exactly as they call them: paths, trailing slashes, reply shapes."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any, cast

from fastapi import APIRouter, Path, Request, Response
from fastapi.routing import APIRoute

from core.wire import (
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
from miner.auth import Authenticator, Caller
from miner.offers.inbox import Inbox

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class SignedRoute(APIRoute):
    """A route that runs only for a verified validator.

    A route class and not a dependency: FastAPI parses the body before it asks its dependencies, and a
    stranger's body must not be read, let alone parsed.
    """

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def signed(request: Request) -> Response:
            auth: Authenticator = request.app.state.authenticator
            address = request.client.host if request.client else ""
            claim = auth.admit(request.scope["headers"], address)
            # A GET has no body worth waiting for: its signature doesn't cover one.
            body = b"" if request.method == "GET" else await request.body()
            caller = auth.verify(claim, request.method, body, address)
            request.state.caller = caller
            try:
                return await handle(request)
            finally:
                await caller.nonce_saved  # also when the request itself was refused: its nonce is used up

        return signed


def caller_of(request: Request) -> Caller:
    return cast(Caller, request.state.caller)


def inbox_of(request: Request) -> Inbox:
    return cast(Inbox, request.app.state.inbox)


def build_router() -> APIRouter:
    router = APIRouter(route_class=SignedRoute)

    @router.post("/task_offer/")
    @router.post("/task_offer_image/")
    async def offer(request: Request, offer: MinerTaskOffer) -> MinerTaskResponse:
        """Would this miner take the task?"""
        decision = await inbox_of(request).offer(caller_of(request), offer, await request.body())
        return MinerTaskResponse(message=decision.message, accepted=decision.accepted)

    @router.post("/start_training/")
    @router.post("/start_training_grpo/")
    async def start(request: Request, start: TrainRequestText) -> TrainResponse:
        """The task is this miner's. Acknowledged at once; a repeat replaces the repository name."""
        started = await inbox_of(request).start_text(caller_of(request), start, await request.body())
        return TrainResponse(message=_acknowledged(started.repeated), task_id=start.task_id)

    @router.post("/start_training_image/")
    async def start_image(request: Request, start: TrainRequestImage) -> TrainResponse:
        started = await inbox_of(request).start_image(caller_of(request), start, await request.body())
        return TrainResponse(message=_acknowledged(started.repeated), task_id=start.task_id)

    @router.get("/get_latest_model_submission/{task_id}")
    async def submission(request: Request, task_id: Annotated[TaskId, Path()]) -> MinerSubmission:
        """What is published for a task; 404 while there is nothing."""
        return await inbox_of(request).submission(task_id)

    @router.get("/training_repo/{task_type}")
    async def training_repo(request: Request, task_type: TournamentType) -> TrainingRepoResponse:
        """The tournament entry of a type; 404 when the operator entered none."""
        return inbox_of(request).training_repo(task_type)

    return router


def _acknowledged(repeated: bool) -> str:
    return "Training is queued; repository name and deadline updated." if repeated else "Training is queued."
