"""The validators' endpoints, exactly as they call them: paths, trailing slashes, reply shapes."""

from __future__ import annotations

from fastapi import FastAPI

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
from miner.http.signed import SignedRequestArgument, SignedRoute
from miner.store.jobs import RecordedStart


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
    """What is published for a task; 404 while there is nothing."""
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
