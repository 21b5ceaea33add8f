import asyncio
import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import httpx
from bittensor_core import Keypair
from hypothesis import given
from hypothesis import strategies as st

from core.domain.tasks import TaskType
from core.domain.wire import TournamentType
from miner.chain import fiber
from miner.dev.samples import sample_task
from miner.dev.validator import (
    OFFER_LIMIT_S,
    OTHER_LIMIT_S,
    ForgedSigner,
    MinerReply,
    ValidatorClient,
    ValidatorConclusion,
    ValidatorOutcome,
    read_health,
    read_offer,
    read_start,
    read_submission,
    read_training_repo,
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


COMMIT = "0123456789abcdef0123456789abcdef01234567"
READERS = (read_offer, read_start, read_submission, read_training_repo, read_health)


def answered(value: Any, status: int = 200) -> MinerReply:
    return MinerReply(status, json.dumps(value).encode())


YES = {"message": "ok", "accepted": True}
REPO = {"github_repo": "https://x/y", "commit_hash": COMMIT}
BODIES = (b"", b"ok", b"<html>", b"{", b"\xff\xfe\x00", b"[" * 100_000)
NO_OFFERS = (
    *(None, answered(YES, 201), answered(YES, 307), answered({"detail": "no"}, 403)),
    *(MinerReply(200, body) for body in BODIES),
    *map(answered, ([YES], True, {}, {"message": "ok"}, {"message": "no", "accepted": False})),
    *(answered({"message": "ok", "accepted": value}) for value in (None, 2, "perhaps")),
    *(answered({"message": value, "accepted": True}) for value in (None, ["ok"])),
)
NO_SUBMISSIONS = (
    *(None, answered({}, 404), MinerReply(200, b"me/m"), answered({"repo": "me/m", "model_hash": 7})),
    *map(answered, (None, "None", {"repo": None}, {"repo": 7})),
)
NO_REPOS = (
    *(None, answered(REPO, 404), MinerReply(200, b"no")),
    *map(answered, ([], {"github_repo": "u"}, {**REPO, "github_repo": None})),
    *(answered({**REPO, "commit_hash": commit}) for commit in ("main", COMMIT[:12])),
)
NOT_ALIVE = (
    *(None, answered({"status": "ok"}, 503), MinerReply(200, b"ok")),
    *map(answered, ({"status": "starting"}, "ok")),
)


def read_model_1(reply: MinerReply | None) -> ValidatorConclusion:
    return read_submission(reply, "model-1")


@each(
    ("read", "outcome", "replies"),
    [
        (read_offer, ValidatorOutcome.NOT_ACCEPTED, NO_OFFERS),
        (read_start, ValidatorOutcome.START_IGNORED, (None, answered({}, 400), MinerReply(500, b"oops"))),
        (read_start, ValidatorOutcome.STARTS_RESENT, [MinerReply(200, body) for body in BODIES]),
        (read_start, ValidatorOutcome.START_NOTED, [*map(answered, ({}, YES, [], None, 1))]),
        (read_model_1, ValidatorOutcome.SUBMISSION, [answered("me/model-1")]),  # as older miners said it
        (read_model_1, ValidatorOutcome.NO_SUBMISSION, NO_SUBMISSIONS),
        (
            read_model_1,
            ValidatorOutcome.SUBMISSION_REJECTED,
            [*map(answered, ({"repo": "model-1"}, {"error": "none"}, 42, ["me/x"], {"repo": "me/model-2"}))],
        ),
        (read_training_repo, ValidatorOutcome.NOT_ENTERED, NO_REPOS),
        (read_training_repo, ValidatorOutcome.ENTERED, [answered(REPO)]),
        (read_training_repo, ValidatorOutcome.ENTERED, [answered({**REPO, "github_token": None})]),
        (read_health, ValidatorOutcome.NOT_ALIVE, NOT_ALIVE),
        (read_health, ValidatorOutcome.ALIVE, [answered({"status": "ok", "version": "1"})]),
    ],
)
def test_a_reply_is_read_as_the_reference_reads_it(
    read: Callable[[MinerReply | None], ValidatorConclusion],
    outcome: ValidatorOutcome,
    replies: Sequence[MinerReply | None],
) -> None:
    assert {read(reply).outcome for reply in replies} == {outcome}


@each("yes", [True, 1, "true", "yes", "on", "1"])
def test_a_yes_in_any_spelling_of_pydantics_is_a_yes_and_no_boolean_is_pointed_out(yes: object) -> None:
    read = read_offer(answered({"message": "ok", "accepted": yes}))
    assert read.outcome is ValidatorOutcome.ACCEPTED
    assert (read.reason == "ok") is (yes is True)


def test_an_offer_accepted_without_a_message_still_counts() -> None:
    read = read_offer(answered({"accepted": True}))
    assert (read.outcome, read.reason) == (ValidatorOutcome.ACCEPTED, "No message given")


def test_a_submission_counts_with_the_expected_name_and_with_or_without_a_hash() -> None:
    bare = read_model_1(answered({"repo": "me/model-1"}))
    hashed = read_model_1(answered({"repo": "me/model-1", "model_hash": "ab"}))
    assert bare.outcome is hashed.outcome is ValidatorOutcome.SUBMISSION
    assert "no hash" in bare.reason
    assert "will be verified" in hashed.reason


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
named = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ("message", "accepted", "repo", "model_hash", "github_repo", "commit_hash", "status"), json_values
    ),
)


@given(
    st.sampled_from(READERS),
    st.sampled_from((200, 204, 307, 404, 500)),
    st.binary(max_size=30) | (json_values | named).map(lambda value: json.dumps(value).encode()),
)
def test_no_reply_whatsoever_breaks_a_reader(reader: Any, status: int, body: bytes) -> None:
    read = reader(MinerReply(status, body))
    assert isinstance(read.outcome, ValidatorOutcome)
    assert len(read.reason) < 2000
    assert str(read).startswith(str(read.outcome))
