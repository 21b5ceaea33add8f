import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from random import Random

import httpx
import pytest
from bittensor_core import Keypair

from core.domain.tasks import OFFERED_TASKS, TaskType
from miner.chain.fiber import NONCE, SIGNATURE, is_signed, signable_post_message, signature_bytes
from miner.dev import tour as touring
from miner.dev import validator
from miner.dev.samples import sample_task
from miner.dev.tour import (
    TourExpectation,
    TourResult,
    TourStep,
    run_tour,
    tour_steps,
    wait_for_submission,
    work_folder,
)
from miner.dev.validator import ForgedSigner, ValidatorClient, ValidatorOutcome

VALIDATOR = Keypair.from_seed(b"v" * 32)
MINER = Keypair.from_seed(b"m" * 32).ss58_address
COMMIT = touring.TOUR_SETTINGS["TRAINING_REPO_TEXT_COMMIT"]
Answer = Callable[[httpx.Request], httpx.Response]


def good_miner(request: httpx.Request) -> httpx.Response:
    path = request.url.path
    if path == "/healthz":
        return httpx.Response(200, json={"status": "ok"})
    if request.method == "POST":
        signature = signature_bytes(request.headers[SIGNATURE])
        message = signable_post_message(request.headers[NONCE], MINER, request.content)
        if signature is None or not is_signed(message, signature, VALIDATOR.public_key):
            return httpx.Response(401, json={"error": "bad_credentials"})
        if path.startswith("/task_offer"):
            return httpx.Response(200, json={"message": "yes", "accepted": True})
        return httpx.Response(200, json={"message": "ok", "task_id": json.loads(request.content)["task_id"]})
    if path in ("/training_repo/text", "/training_repo/image"):
        return httpx.Response(200, json={"github_repo": "https://x/y", "commit_hash": COMMIT})
    return httpx.Response(404, json={"error": "none"})


def asking(answer: Answer, forged: bool = False) -> ValidatorClient:
    signer = ForgedSigner(VALIDATOR) if forged else VALIDATOR
    return ValidatorClient("http://miner", signer, MINER, transport=httpx.MockTransport(answer))


async def toured(answer: Answer) -> list[TourStep]:
    async with asking(answer) as client, asking(answer, forged=True) as forger:
        return [step async for step in tour_steps(client, forger, Random(0))]


async def test_the_tour_visits_every_request_of_every_task_type_and_a_good_miner_passes() -> None:
    starts: list[dict[str, str]] = []

    def noting(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/start_training/":
            starts.append(json.loads(request.content))
        return good_miner(request)

    steps = await toured(noting)
    assert [step.title for step in steps if not step.held] == []
    paths = {f"{step.exchange.method} {step.exchange.path}" for step in steps}
    assert {
        "GET /healthz",
        "POST /task_offer/",
        "POST /task_offer_image/",
        "POST /start_training/",
        "POST /start_training_grpo/",
        "POST /start_training_image/",
        "GET /training_repo/text",
        "GET /training_repo/image",
        "GET /training_repo/environment",
    } < paths
    for call in ("offer", "start", "submission"):
        assert sum(step.exchange.call == call for step in steps) >= len(OFFERED_TASKS)
    again = [start for start in starts if start["task_id"] == starts[0]["task_id"]]
    assert len({start["expected_repo_name"] for start in again}) == 2, "the second start has a new name"


@pytest.mark.parametrize(
    ("broken", "failing"),
    [
        (lambda request: httpx.Response(200, json={"message": "yes", "accepted": True}), "forged"),
        (lambda request: httpx.Response(200, text="ok"), "start"),
        (lambda request: httpx.Response(500, json={}), "health"),
    ],
    ids=["accepts everything", "speaks no JSON", "fails"],
)
async def test_a_bad_miner_does_not_pass(broken: Answer, failing: str) -> None:
    steps = await toured(broken)
    assert any(failing in step.title for step in steps if not step.held)


@pytest.mark.parametrize(
    ("answers_after", "patience_s", "outcome", "slept"),
    [
        (2, 60.0, ValidatorOutcome.SUBMISSION, 2 * touring.POLL_S),
        (99, 10.0, ValidatorOutcome.NO_SUBMISSION, 10.0),
        (99, 0.0, ValidatorOutcome.NO_SUBMISSION, 0.0),
        (99, -5.0, ValidatorOutcome.NO_SUBMISSION, 0.0),
    ],
)
async def test_waiting_ends_with_the_first_submission_or_with_patience_and_asks_at_least_once(
    answers_after: int, patience_s: float, outcome: ValidatorOutcome, slept: float
) -> None:
    task, now, asked = sample_task(TaskType.CHAT, Random(1)), 0.0, 0

    def answer(_request: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += 1
        there = asked > answers_after
        return httpx.Response(200 if there else 404, json={"repo": f"me/{task.expected_repo_name}"})

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    async with asking(answer) as client:
        done = await wait_for_submission(client, task, patience_s, sleep=sleep, clock=lambda: now)
    assert asked >= 1
    assert (done.conclusion.outcome, now) == (outcome, slept)


async def test_with_patience_a_submission_is_expected() -> None:
    async with asking(good_miner) as client, asking(good_miner, forged=True) as forger:
        steps = [step async for step in tour_steps(client, forger, Random(0), patience_s=0.01)]
    missed = [step for step in steps if not step.held]
    assert len(missed) == len(OFFERED_TASKS)
    assert {step.expected for step in missed} == {TourExpectation(200, ValidatorOutcome.SUBMISSION)}


async def test_a_tour_holds_only_when_every_step_did_and_the_daemon_ended_well(tmp_path: Path) -> None:
    steps = await toured(good_miner)
    bad = TourStep(steps[0].title, steps[0].exchange, TourExpectation(404, ValidatorOutcome.ALIVE))
    results = [(steps, 0), (steps, -9), ([], 0), ([*steps, bad], 0)]
    held = [TourResult(tmp_path, taken, exit_code=code).held for taken, code in results]
    assert held == [True, False, False, False]
    shown = TourResult(tmp_path, steps, exit_code=0).as_json()
    assert len(json.loads(json.dumps(shown))["steps"]) == len(steps)


def test_a_folder_of_a_trials_own_is_gone_afterwards_also_on_sigterm() -> None:
    seen: list[Path] = []
    before = signal.getsignal(signal.SIGTERM)

    def visit() -> None:
        with work_folder(None) as made:
            seen.append(made)
            assert made.is_dir()
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        visit()
    assert ended.value.code == 143
    assert not seen[0].exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_folder_that_was_given_is_kept(tmp_path: Path) -> None:
    with work_folder(tmp_path) as place:
        (place / "kept").touch()
    assert (tmp_path / "kept").exists()


@pytest.mark.process
def test_the_tour_holds_against_the_real_daemon_also_a_second_time_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine may answer late.
    monkeypatch.setattr(validator, "OFFER_LIMIT_S", 120.0)
    monkeypatch.setattr(validator, "OTHER_LIMIT_S", 120.0)
    for _ in range(2):
        seen: list[TourStep] = []
        result = run_tour(tmp_path, on_step=seen.append)
        assert [step.title for step in result.steps if not step.held] == []
        assert result.held
        assert seen == result.steps
        assert (tmp_path / "data").is_dir()
