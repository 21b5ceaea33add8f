import asyncio
import json
from collections.abc import Callable
from random import Random

import httpx
from bittensor_core import Keypair

from core.domain.tasks import TaskType
from core.domain.wire import TournamentType
from miner.chain import fiber
from miner.dev.samples import sample_task
from miner.dev.validator import (
    OFFER_LIMIT_S,
    OTHER_LIMIT_S,
    ForgedSigner,
    ValidatorClient,
    ValidatorOutcome,
)
from miner.support.addresses import public_key
from tests.doubles.each import each

VALIDATOR = Keypair.from_seed(b"v" * 32)
MINER = Keypair.from_seed(b"m" * 32)
TASK = sample_task(TaskType.CHAT, Random(3))


def client_for(
    answer: Callable[[httpx.Request], httpx.Response], signer: fiber.Signer = VALIDATOR
) -> ValidatorClient:
    transport = httpx.MockTransport(answer)
    return ValidatorClient("http://miner", signer, MINER.ss58_address, transport=transport)


def verifies(request: httpx.Request) -> bool:
    """The miner's side of the signing rule, over the bytes that travelled."""
    headers = request.headers
    nonce, miner = headers[fiber.NONCE], headers[fiber.MINER_HOTKEY]
    signature = fiber.signature_bytes(headers[fiber.SIGNATURE])
    key = public_key(headers[fiber.VALIDATOR_HOTKEY])
    assert signature is not None
    assert key == VALIDATOR.public_key
    messages = (
        fiber.signable_get_messages(nonce, miner)
        if request.method == "GET"
        else (fiber.signable_post_message(nonce, miner, request.content),)
    )
    return any(fiber.is_signed(message, signature, key) for message in messages)


class Miner:
    """Answers everything as a good miner would, and keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if request.url.path.startswith("/task_offer"):
            return httpx.Response(200, json={"message": "yes", "accepted": True})
        if request.url.path.startswith("/start_training"):
            return httpx.Response(200, json={"message": "started", "task_id": TASK.task_id})
        if request.url.path.startswith("/training_repo"):
            return httpx.Response(200, json={"github_repo": "u", "commit_hash": "a" * 40})
        if request.url.path == "/healthz":
            return httpx.Response(200, json={"status": "ok"})
        return httpx.Response(200, json={"repo": f"me/{TASK.expected_repo_name}", "model_hash": None})


async def test_every_call_is_signed_over_what_travels_and_understood() -> None:
    miner = Miner()
    async with client_for(miner) as client:
        outcomes = [
            (await client.offer(TASK)).conclusion.outcome,
            (await client.start(TASK)).conclusion.outcome,
            (await client.submission(TASK.task_id, TASK.expected_repo_name)).conclusion.outcome,
            (await client.training_repo(TournamentType.IMAGE)).conclusion.outcome,
        ]
    assert outcomes == [
        ValidatorOutcome.ACCEPTED,
        ValidatorOutcome.START_NOTED,
        ValidatorOutcome.SUBMISSION,
        ValidatorOutcome.ENTERED,
    ]
    assert all(verifies(request) for request in miner.requests)
    assert [f"{request.method} {request.url.path}" for request in miner.requests] == [
        "POST /task_offer/",
        "POST /start_training/",
        f"GET /get_latest_model_submission/{TASK.task_id}",
        "GET /training_repo/image",
    ]
    assert json.loads(miner.requests[1].content) == TASK.start()
    assert {request.headers["content-type"] for request in miner.requests} == {"application/json"}


async def test_nonces_are_never_repeated() -> None:
    miner = Miner()
    async with client_for(miner) as client:
        await asyncio.gather(*(client.offer(TASK) for _ in range(20)))
    assert len({request.headers[fiber.NONCE] for request in miner.requests}) == 20


async def test_health_is_asked_without_a_signature_and_a_task_id_stays_one_segment_of_the_path() -> None:
    miner = Miner()
    async with client_for(miner) as client:
        assert (await client.health()).conclusion.outcome is ValidatorOutcome.ALIVE
        await client.submission("../../healthz?x=1#y")
    assert fiber.SIGNATURE not in miner.requests[0].headers
    assert miner.requests[1].url.raw_path == b"/get_latest_model_submission/..%2F..%2Fhealthz%3Fx%3D1%23y"


async def test_a_forger_claims_the_hotkey_and_fails_the_check() -> None:
    miner = Miner()
    async with client_for(miner, ForgedSigner(VALIDATOR)) as client:
        await client.offer(TASK)
        await client.submission(TASK.task_id)
    assert not any(verifies(request) for request in miner.requests)


async def test_offers_wait_three_seconds_and_the_rest_ten() -> None:
    miner = Miner()
    async with client_for(miner) as client:
        await client.offer(TASK)
        await client.start(TASK)
        await client.submission(TASK.task_id)
    limits = [request.extensions["timeout"]["read"] for request in miner.requests]
    assert limits == [OFFER_LIMIT_S, OTHER_LIMIT_S, OTHER_LIMIT_S] == [3, 10, 10]


async def test_no_answer_in_time_and_no_connection_are_distinguished_and_both_are_a_no() -> None:
    def late(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("late", request=request)

    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    async with client_for(late) as client:
        timed_out = await client.offer(TASK)
    async with client_for(gone) as client:
        unreached = await client.offer(TASK)
    assert timed_out.failure == "no answer within 3 s"
    assert unreached.failure == "ConnectError: refused"
    for exchange in (timed_out, unreached):
        assert exchange.conclusion.outcome is ValidatorOutcome.NOT_ACCEPTED
        assert exchange.as_json()["status"] is None


@each(
    ("response", "reason"),
    [
        (httpx.Response(200, json={}), ""),
        (httpx.Response(404, json={"error": "x"}), "HTTP 404"),
        (httpx.Response(500, json={"error": "x"}), "HTTP 500"),
        (httpx.Response(200, text="hello"), "not JSON"),
        (httpx.Response(307, headers={"location": "/elsewhere/"}), "a redirect, not followed"),
    ],
)
async def test_an_answer_without_a_clear_yes_is_not_accepted(response: httpx.Response, reason: str) -> None:
    async with client_for(lambda _request: response) as client:
        exchange = await client.offer(TASK)
    assert exchange.conclusion.outcome is ValidatorOutcome.NOT_ACCEPTED
    assert reason in exchange.conclusion.reason


async def test_an_exchange_shows_a_long_or_binary_reply_cut_and_escaped() -> None:
    async with client_for(lambda _request: httpx.Response(200, content=b"\xff" * 10_000)) as client:
        shown = (await client.offer(TASK)).as_json()
    assert shown["reply"] == r"\xff" * 2000
    assert shown["outcome"] == "not accepted"
