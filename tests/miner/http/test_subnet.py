"""The validators' endpoints: what exactly is answered, and what is kept."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from core.domain.keys import TaskKey
from core.domain.tasks import OFFERED_TASKS, TaskType
from core.domain.wire import MinerSubmission
from miner import __version__
from miner.alerts.request_watch import unknown_fields
from miner.http.subnet import ROUTES
from miner.store.jobs import record_submission
from tests.doubles.each import each
from tests.miner.http.daemon_in_process import (
    COMPACT,
    DEFAULT,
    SECOND,
    VALIDATOR,
    DaemonInProcess,
    open_daemon,
    task,
)

ALL = each("kind", OFFERED_TASKS)
VECTORS = json.loads((Path(__file__).parents[2] / "data" / "fiber_vectors.json").read_text())
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ENTRY = {
    "TRAINING_REPO_TEXT_URL": "https://github.com/me/trainer",
    "TRAINING_REPO_TEXT_COMMIT": COMMIT,
}


# Offers


@ALL
async def test_an_offer_is_answered_with_a_message_and_a_boolean(
    running: DaemonInProcess, kind: TaskType
) -> None:
    reply = await running.offer(task(kind))
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    assert set(reply.json()) == {"message", "accepted"}
    assert reply.json()["accepted"] is True
    assert isinstance(reply.json()["message"], str)


async def test_a_refused_offer_is_an_answer_not_an_error(tmp_path: Path) -> None:
    async with open_daemon(tmp_path, TASK_TYPES="image", MAX_HOURS="1") as running:
        reply = await running.offer(task())
        assert reply.status_code == 200
        assert reply.json()["accepted"] is False
        assert reply.json()["message"].startswith("Not taken: this task type is not trained here")


@pytest.mark.parametrize("separators", [COMPACT, DEFAULT])
async def test_both_spellings_of_json_verify_and_are_kept_byte_for_byte(
    running: DaemonInProcess, separators: tuple[str, str]
) -> None:
    payload = {**task().offer(), "from_the_future": {"a": [1, None]}, "hours_to_complete": 4}
    assert (await running.post("/task_offer/", payload, separators=separators)).json()["accepted"] is True
    (kept,) = running.rows("SELECT * FROM offers")
    assert kept["raw"] == json.dumps(payload, separators=separators).encode()
    assert json.loads(kept["raw"])["from_the_future"] == {"a": [1, None]}
    assert (kept["task_type"], kept["hours"]) == ("InstructTextTask", 4.0)


# Starts


@ALL
async def test_a_start_is_a_job_and_a_repeat_renames_it_and_moves_its_deadline(
    running: DaemonInProcess, kind: TaskType
) -> None:
    sample = task(kind, OFFERED_TASKS.index(kind))
    again = replace(sample.restarted(Random(7)), hours=sample.hours + 3)
    messages = ("Training is queued.", "Training is queued; repository name and deadline updated.")
    for starts, (given, message) in enumerate(zip((sample, again), messages, strict=True), 1):
        before = time.time()
        reply = await running.start(given)
        assert (reply.status_code, reply.json()) == (200, {"message": message, "task_id": sample.task_id})
        (job,) = running.rows("SELECT * FROM jobs WHERE task_id = ?", sample.task_id)
        assert (job["task_type"], job["model"], job["state"]) == (kind, sample.model, "queued")
        assert (job["expected_repo_name"], job["starts"]) == (given.expected_repo_name, starts)
        assert before - 1 < job["deadline_at"] - 3600 * given.hours < time.time() + 1
        assert json.loads(job["request"]) == given.start()


async def test_a_repeated_start_of_another_kind_changes_no_task(
    running: DaemonInProcess,
) -> None:
    image = replace(task(TaskType.IMAGE), task_id=task().task_id, expected_repo_name="newer")
    await running.start(task())
    reply = await running.start(image)
    assert reply.status_code == 200
    assert "which it keeps" in reply.json()["message"]
    (job,) = running.rows("SELECT * FROM jobs")
    assert (job["task_type"], job["expected_repo_name"]) == (task().task_type, "newer")
    assert json.loads(job["request"]) == task().start()


async def test_a_start_keeps_what_a_newer_validator_adds(running: DaemonInProcess) -> None:
    sample = task()
    payload = {**sample.start(), "priority": 7}
    payload["dataset_type"] = {**payload["dataset_type"], "field_new": "x"}
    assert (await running.post(sample.start_path, payload)).status_code == 200
    (job,) = running.rows("SELECT request FROM jobs")
    assert json.loads(job["request"]) == payload


# Submissions


async def test_requests_are_counted_for_their_validator_whether_they_can_be_read_or_not(
    running: DaemonInProcess,
) -> None:
    sample = task()
    await running.post(sample.offer_path, {**sample.offer(), "urgency": 3})
    broken = {name: value for name, value in sample.offer().items() if name != "model"}
    assert (await running.post(sample.offer_path, broken)).status_code == 422
    watch = running.daemon.request_watch
    (hotkey, outcomes), *others = watch.outcomes()
    assert (hotkey, [bad for _, bad in outcomes], others) == (VALIDATOR.ss58_address, [0.0, 1.0], [])
    assert watch.problem(hotkey).startswith(f"{sample.offer_path}: model")
    ((_, raw),) = watch.take_bodies().values()
    assert unknown_fields(sample.offer_path, raw) == ["urgency"]


async def test_there_is_no_submission_until_one_is_made(running: DaemonInProcess) -> None:
    path = f"/get_latest_model_submission/{task().task_id}"
    key = TaskKey(VALIDATOR.ss58_address, task().task_id)
    for before in (None, await running.start(task())):
        reply = await running.get(path)
        assert (reply.status_code, reply.json()["error"]) == (404, "no_submission"), before
    assert await running.daemon.store.write(record_submission, key, MinerSubmission(repo="me/it"), 1.0)
    reply = await running.get(path)
    assert (reply.status_code, reply.json()) == (200, {"repo": "me/it", "model_hash": None})
    submission = MinerSubmission(repo="me/it", model_hash="ab" * 32)
    assert await running.daemon.store.write(record_submission, key, submission, 2.0)
    assert (await running.get(path)).json() == {"repo": "me/it", "model_hash": "ab" * 32}
    assert (await running.get(path, signer=SECOND)).status_code == 404  # that one has published nothing


# Tournament repositories


async def test_a_tournament_entry_is_served_for_its_type_only(tmp_path: Path) -> None:
    entries = {
        "TRAINING_REPO_ENVIRONMENT_URL": "https://github.com/me/player",
        "TRAINING_REPO_ENVIRONMENT_COMMIT": COMMIT,
        **ENTRY,
        "TRAINING_REPO_TEXT_TOKEN": "github_pat_not_a_real_one_0123456789",
        "TRAINING_REPO_TEXT_DATASETS": "a/one,b/two",
    }
    async with open_daemon(tmp_path, **entries) as running:
        assert (await running.get("/training_repo/environment")).json() == {
            "github_repo": "https://github.com/me/player",
            "commit_hash": COMMIT,
            "github_token": None,
            "requested_datasets": None,
        }
        assert (await running.get("/training_repo/text")).json() == {
            "github_repo": "https://github.com/me/trainer",
            "commit_hash": COMMIT,
            "github_token": "github_pat_not_a_real_one_0123456789",
            "requested_datasets": ["a/one", "b/two"],
        }
        reply = await running.get("/training_repo/image")
        assert (reply.status_code, reply.json()["error"]) == (404, "not_entered")


@each("kind", ["audio", "Text", "text ", "InstructTextTask", "%00"])
async def test_an_unknown_tournament_type_is_refused(running: DaemonInProcess, kind: str) -> None:
    reply = await running.get(f"/training_repo/{kind}")
    assert (reply.status_code, reply.json()["error"]) == (422, "invalid_request")
    assert reply.json()["fields"][0]["field"] == "task_type"


# Paths


async def test_health_needs_no_signature(running: DaemonInProcess) -> None:
    reply = await running.public.get("/healthz")
    assert (reply.status_code, reply.json()) == (200, {"status": "ok", "version": __version__})


def test_the_paths_are_the_validators() -> None:
    assert {(method, path) for method, path, _ in ROUTES} == {
        ("POST", "/task_offer/"),
        ("POST", "/task_offer_image/"),
        ("POST", "/start_training/"),
        ("POST", "/start_training_grpo/"),
        ("POST", "/start_training_image/"),
        ("GET", "/get_latest_model_submission/{task_id}"),
        ("GET", "/training_repo/{task_type}"),
    }


@each(
    ("method", "path"),
    [
        *((method, path.rstrip("/")) for method, path, _ in ROUTES if method == "POST"),
        ("GET", "/get_latest_model_submission/x/"),
        ("GET", "/training_repo/text/"),
        ("GET", "/training_repo/..%2Ftext"),  # a slash is a slash, however it is written
        ("GET", "/healthz/"),
    ],
)
async def test_a_slash_too_few_or_too_many_is_not_found_and_not_redirected(
    running: DaemonInProcess, method: str, path: str
) -> None:
    reply = await (running.get(path) if method == "GET" else running.post(path, task().offer()))
    assert (reply.status_code, reply.json()["error"]) == (404, "not_found")
    assert "location" not in reply.headers


@each("path", ["/", "/docs", "/redoc", "/openapi.json", "/metrics", "/status", "/.env"])
async def test_strangers_find_nothing_else(running: DaemonInProcess, path: str) -> None:
    reply = await running.public.get(path)
    assert (reply.status_code, reply.json()["error"]) == (404, "not_found")


@each(("method", "path"), [*((method, path) for method, path, _ in ROUTES), ("GET", "/healthz")])
async def test_another_method_is_refused_in_json_with_the_right_one_named(
    running: DaemonInProcess, method: str, path: str
) -> None:
    path = path.format(task_id="x", task_type="text")
    for other in {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} - {method}:
        reply = await running.public.request(other, path)
        assert (reply.status_code, reply.json()["error"]) == (405, "method_not_allowed")
        assert reply.headers["allow"] == method


# Requests signed by the reference rule


@pytest.fixture
async def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DaemonInProcess]:
    """A daemon at the time at which the reference requests were signed."""
    monkeypatch.setattr(time, "time", lambda: VECTORS["clock_ns"] / 1e9)
    async with open_daemon(tmp_path, **ENTRY) as running:
        running.daemon.authenticator.now_ns = lambda: VECTORS["clock_ns"]
        yield running


@each("vector", VECTORS["requests"])
async def test_reference_requests_are_judged_as_the_reference_does(
    judged: DaemonInProcess, vector: dict[str, Any]
) -> None:
    async def send() -> Any:
        body = bytes.fromhex(vector.get("body_hex") or "")
        return await judged.public.request(
            vector["method"], vector["path"], content=body, headers=vector["headers"]
        )

    before, used = judged.counts(), judged.rows("SELECT * FROM nonces")
    reply = await send()
    if not vector["valid"]:
        assert (reply.status_code, reply.json()["error"]) == (401, "bad_credentials")
        assert (judged.counts(), judged.rows("SELECT * FROM nonces")) == (before, used)
        return
    assert reply.status_code == (404 if "submission" in vector["path"] else 200), reply.text
    again = await send()
    assert (again.status_code, again.json()["error"]) == (401, "bad_credentials")
