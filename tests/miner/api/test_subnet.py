"""The validators' endpoints: what exactly is answered, and what is kept."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from core.tasks import TaskType
from core.wire import MinerSubmission
from miner import __version__
from miner.api.subnet import ROUTES
from miner.fleet.base import TaskKey
from tests.miner.api.house import COMPACT, DEFAULT, SECOND, VALIDATOR, House, open_house, task

ALL = pytest.mark.parametrize("kind", TaskType)
VECTORS = json.loads((Path(__file__).parents[2] / "data" / "fiber_vectors.json").read_text())
COMMIT = "0123456789abcdef0123456789abcdef01234567"


# Offers


@ALL
async def test_an_offer_is_answered_with_a_message_and_a_boolean(house: House, kind: TaskType) -> None:
    reply = await house.offer(task(kind))
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    assert set(reply.json()) == {"message", "accepted"}
    assert reply.json()["accepted"] is True
    assert isinstance(reply.json()["message"], str)


async def test_a_refused_offer_is_an_answer_not_an_error(tmp_path: Path, template: Path) -> None:
    async with open_house(tmp_path, template, TASK_TYPES="image", MAX_HOURS="1") as house:
        reply = await house.offer(task())
        assert reply.status_code == 200
        assert reply.json()["accepted"] is False
        assert reply.json()["message"].startswith("Not taken: this task type is not trained here")


@pytest.mark.parametrize("separators", [COMPACT, DEFAULT])
async def test_both_spellings_of_json_verify_and_are_kept_byte_for_byte(
    house: House, separators: tuple[str, str]
) -> None:
    payload = {**task().offer(), "from_the_future": {"a": [1, None]}, "hours_to_complete": 4}
    assert (await house.post("/task_offer/", payload, separators=separators)).json()["accepted"] is True
    (kept,) = house.rows("SELECT * FROM offers")
    assert kept["raw"] == json.dumps(payload, separators=separators).encode()
    assert json.loads(kept["raw"])["from_the_future"] == {"a": [1, None]}
    assert (kept["task_type"], kept["hours"]) == ("InstructTextTask", 4.0)


async def test_a_repeated_offer_gets_the_same_answer_and_one_row(house: House) -> None:
    first, again = [(await house.offer(task())).json() for _ in range(2)]
    assert first == again
    (kept,) = house.rows("SELECT times_seen FROM offers")
    assert kept["times_seen"] == 2


# Starts


@ALL
async def test_a_start_is_acknowledged_and_is_a_job(house: House, kind: TaskType) -> None:
    sample, before = task(kind), time.time()
    reply = await house.start(sample)
    assert reply.status_code == 200
    assert reply.json() == {"message": "Training is queued.", "task_id": sample.task_id}
    assert str(uuid.UUID(reply.json()["task_id"])) == sample.task_id
    (job,) = house.rows("SELECT * FROM jobs")
    assert (job["task_id"], job["task_type"], job["model"]) == (sample.task_id, kind, sample.model)
    assert (job["expected_repo_name"], job["state"], job["starts"]) == (
        sample.expected_repo_name,
        "queued",
        1,
    )
    assert before - 1 <= job["deadline_at"] - 3600 * sample.hours <= time.time()
    assert json.loads(job["request"]) == sample.start()


@ALL
async def test_a_repeated_start_renames_and_moves_the_deadline(house: House, kind: TaskType) -> None:
    sample = task(kind)
    again = replace(sample.restarted(Random(7)), hours=sample.hours + 3)
    await house.start(sample)
    reply = await house.start(again)
    assert reply.status_code == 200
    assert set(reply.json()) == {"message", "task_id"}
    (job,) = house.rows("SELECT * FROM jobs")
    assert (job["expected_repo_name"], job["starts"]) == (again.expected_repo_name, 2)
    assert job["deadline_at"] - time.time() == pytest.approx(3600 * again.hours, abs=5)
    assert json.loads(job["request"]) == again.start()


async def test_a_repeated_start_of_another_kind_is_told_that_the_job_stays_what_it_is(house: House) -> None:
    image = replace(task(TaskType.IMAGE), task_id=task().task_id, expected_repo_name="newer")
    await house.start(task())
    reply = await house.start(image)
    assert reply.status_code == 200
    assert "which it keeps" in reply.json()["message"]
    (job,) = house.rows("SELECT * FROM jobs")
    assert (job["task_type"], job["expected_repo_name"]) == (task().task_type, "newer")
    assert json.loads(job["request"]) == task().start()


async def test_a_start_keeps_what_a_newer_validator_adds(house: House) -> None:
    sample = task()
    payload = {**sample.start(), "priority": 7}
    payload["dataset_type"] = {**payload["dataset_type"], "field_new": "x"}
    assert (await house.post(sample.start_path, payload)).status_code == 200
    (job,) = house.rows("SELECT request FROM jobs")
    assert json.loads(job["request"]) == payload


async def test_a_start_of_a_task_that_another_validator_named_too_is_a_job_of_its_own(house: House) -> None:
    await house.start(task())
    before = house.rows("SELECT * FROM jobs")
    reply = await house.start(task().restarted(Random(1)), signer=SECOND)
    assert (reply.status_code, reply.json()["message"]) == (200, "Training is queued.")
    assert house.rows("SELECT * FROM jobs WHERE id = 1") == before
    assert [row["validator"] for row in house.rows("SELECT validator FROM jobs ORDER BY id")] == [
        VALIDATOR.ss58_address,
        SECOND.ss58_address,
    ]


async def test_a_start_takes_the_place_that_its_offer_held(house: House) -> None:
    await house.offer(task())
    promises, key = house.daemon.inbox.promises, TaskKey(VALIDATOR.ss58_address, task().task_id)
    assert (promises.jobs, set(promises.holds)) == (set(), {key})
    await house.start(task())
    assert (promises.jobs, set(promises.holds)) == ({key}, set())
    assert [row["state"] for row in house.rows("SELECT state FROM reservations")] == ["started"]


async def test_promises_outlive_the_daemon(tmp_path: Path, template: Path) -> None:
    async with open_house(tmp_path, template) as house:
        await house.offer(task(seed=1))
        await house.start(task(seed=2))
    async with open_house(tmp_path, template) as house:
        promises = house.daemon.inbox.promises
        assert set(promises.holds) == {TaskKey(VALIDATOR.ss58_address, task(seed=1).task_id)}
        assert promises.jobs == {TaskKey(VALIDATOR.ss58_address, task(seed=2).task_id)}


# Submissions


async def test_there_is_no_submission_until_one_is_made(house: House) -> None:
    path = f"/get_latest_model_submission/{task().task_id}"
    key = TaskKey(VALIDATOR.ss58_address, task().task_id)
    for before in (None, await house.start(task())):
        reply = await house.get(path)
        assert (reply.status_code, reply.json()["error"]) == (404, "no_submission"), before
    assert await house.daemon.books.record_submission(key, MinerSubmission(repo="me/it"))
    reply = await house.get(path)
    assert (reply.status_code, reply.json()) == (200, {"repo": "me/it", "model_hash": None})
    made = MinerSubmission(repo="me/it", model_hash="ab" * 32)
    assert await house.daemon.books.record_submission(key, made)
    assert (await house.get(path)).json() == {"repo": "me/it", "model_hash": "ab" * 32}
    assert (await house.get(path, signer=SECOND)).status_code == 404  # that one has published nothing


# Tournament repositories


@pytest.mark.parametrize("kind", ["text", "image", "environment"])
async def test_a_tournament_entry_is_served_for_its_type_only(
    tmp_path: Path, template: Path, kind: str
) -> None:
    name = f"TRAINING_REPO_{kind.upper()}"
    entry = {f"{name}_URL": "https://github.com/me/trainer", f"{name}_COMMIT": COMMIT}
    async with open_house(tmp_path, template, **entry) as house:
        reply = await house.get(f"/training_repo/{kind}")
        assert reply.status_code == 200
        assert reply.json() == {
            "github_repo": "https://github.com/me/trainer",
            "commit_hash": COMMIT,
            "github_token": None,
            "requested_datasets": None,
        }
        for other in {"text", "image", "environment"} - {kind}:
            reply = await house.get(f"/training_repo/{other}")
            assert (reply.status_code, reply.json()["error"]) == (404, "not_entered")


async def test_a_tournament_entry_carries_its_token_and_datasets(tmp_path: Path, template: Path) -> None:
    entry = {
        "TRAINING_REPO_TEXT_URL": "https://github.com/me/trainer",
        "TRAINING_REPO_TEXT_COMMIT": COMMIT,
        "TRAINING_REPO_TEXT_TOKEN": "github_pat_not_a_real_one_0123456789",
        "TRAINING_REPO_TEXT_DATASETS": "a/one,b/two",
    }
    async with open_house(tmp_path, template, **entry) as house:
        found = (await house.get("/training_repo/text")).json()
        assert found["github_token"] == "github_pat_not_a_real_one_0123456789"
        assert found["requested_datasets"] == ["a/one", "b/two"]


@pytest.mark.parametrize(
    "kind", ["audio", "Text", "text ", "InstructTextTask", "%00", "text%2F", "..%2Ftext"]
)
async def test_a_type_that_is_none_is_named(house: House, kind: str) -> None:
    reply = await house.get(f"/training_repo/{kind}")
    if "%2F" in kind:  # a slash is a slash, however it is written
        assert (reply.status_code, reply.json()["error"]) == (404, "not_found")
    else:
        assert (reply.status_code, reply.json()["error"]) == (422, "invalid_request")
        assert reply.json()["fields"][0]["field"] == "task_type"


# Paths


async def test_health_needs_no_signature(house: House) -> None:
    reply = await house.public.get("/healthz")
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


@pytest.mark.parametrize("path", [path for method, path, _ in ROUTES if method == "POST"])
async def test_a_path_without_its_slash_is_not_found_and_not_redirected(house: House, path: str) -> None:
    reply = await house.post(path.rstrip("/"), task().offer())
    assert (reply.status_code, reply.json()["error"]) == (404, "not_found")
    assert "location" not in reply.headers


@pytest.mark.parametrize("path", ["/get_latest_model_submission/x/", "/training_repo/text/", "/healthz/"])
async def test_a_path_with_a_slash_too_many_is_not_found_and_not_redirected(house: House, path: str) -> None:
    reply = await house.get(path)
    assert (reply.status_code, reply.json()["error"]) == (404, "not_found")
    assert "location" not in reply.headers


@pytest.mark.parametrize("path", ["/", "/docs", "/redoc", "/openapi.json", "/metrics", "/status", "/.env"])
async def test_strangers_find_nothing_else(house: House, path: str) -> None:
    reply = await house.public.get(path)
    assert (reply.status_code, reply.json()["error"]) == (404, "not_found")


@pytest.mark.parametrize(("method", "path"), [*((m, p) for m, p, _ in ROUTES), ("GET", "/healthz")])
async def test_another_method_is_refused_in_json_with_the_right_one_named(
    house: House, method: str, path: str
) -> None:
    path = path.format(task_id="x", task_type="text")
    for other in {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} - {method}:
        reply = await house.public.request(other, path)
        assert (reply.status_code, reply.json()["error"]) == (405, "method_not_allowed")
        assert reply.headers["allow"] == method


# Requests signed by the reference rule


async def _send(house: House, vector: dict[str, Any]) -> Any:
    return await house.public.request(
        vector["method"],
        vector["path"],
        content=bytes.fromhex(vector.get("body_hex") or ""),
        headers=vector["headers"],
    )


@pytest.mark.parametrize("vector", VECTORS["requests"], ids=lambda v: v["headers"]["nonce"][-2:])
async def test_reference_requests_are_judged_as_the_reference_does(
    tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch, vector: dict[str, Any]
) -> None:
    entry = {
        "TRAINING_REPO_TEXT_URL": "https://github.com/me/trainer",
        "TRAINING_REPO_TEXT_COMMIT": COMMIT,
    }
    monkeypatch.setattr(time, "time", lambda: VECTORS["clock_ns"] / 1e9)
    async with open_house(tmp_path, template, **entry) as house:
        house.daemon.authenticator.now_ns = lambda: VECTORS["clock_ns"]
        nothing = house.counts()
        reply = await _send(house, vector)
        if not vector["valid"]:
            assert (reply.status_code, reply.json()["error"]) == (401, "bad_credentials")
            assert house.counts() == nothing
            assert house.rows("SELECT * FROM nonces") == []
            return
        expected = 404 if "submission" in vector["path"] else 200
        assert reply.status_code == expected, reply.text
        again = await _send(house, vector)
        assert (again.status_code, again.json()["error"]) == (401, "bad_credentials")
