"""Refusals: the right status, JSON of one shape, the field named, nothing kept, no secret told."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import GodMinerError
from core.tasks import TaskType
from miner import fiber
from miner.api import errors
from tests.doubles.each import each
from tests.miner.api.house import MINER, STRANGER, VALIDATOR, House, open_house, task, write_nodes

TRAVERSALS = (
    "../../etc/passwd",
    "..",
    ".",
    "a/../b",
    "/etc/passwd",
    "a\\b",
    "a%2e%2e",
    "a\0b",
    "a b",
    "a\n",
    "-",
    "é",
    "",
    "a" * 500,
)
WILD_HOURS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "-1",
    "1e9",
    "1e999",
    "9" * 3000,
    '"4"',
    "true",
    "null",
    "[]",
    "{}",
)


def set_field(sample: dict[str, Any], field: str, raw: str) -> bytes:
    """The request as JSON, with `raw` put in as it is: JSON libraries write neither NaN twice nor 1e999."""
    return json.dumps({**sample, field: "@"}).replace('"@"', raw).encode()


async def refused(house: House, path: str, body: bytes, field: str) -> None:
    before, used = house.counts(), len(house.rows("SELECT * FROM nonces"))
    reply = await house.post(path, body)
    assert (reply.status_code, reply.json()["error"]) == (422, "invalid_request"), reply.text
    assert set(reply.json()) == {"error", "message", "fields"}
    assert field in [entry["field"] for entry in reply.json()["fields"]]
    assert field in reply.json()["message"]
    assert len(reply.content) < 4096
    assert house.counts() == before
    assert len(house.rows("SELECT * FROM nonces")) == used + 1  # used up all the same


@each("hours", WILD_HOURS)
@each("kind", [TaskType.INSTRUCT, TaskType.IMAGE])
async def test_hours_that_mean_nothing_are_refused(house: House, kind: TaskType, hours: str) -> None:
    sample = task(kind)
    await refused(
        house, sample.offer_path, set_field(sample.offer(), "hours_to_complete", hours), "hours_to_complete"
    )


@each("hours", WILD_HOURS)
async def test_hours_that_mean_nothing_start_nothing(house: House, hours: str) -> None:
    body = set_field(task().start(), "hours_to_complete", hours)
    await refused(house, "/start_training/", body, "hours_to_complete")


@each("name", TRAVERSALS)
@each("field", ["task_id", "model", "expected_repo_name"])
async def test_names_that_could_climb_are_refused(house: House, field: str, name: str) -> None:
    for kind in (TaskType.INSTRUCT, TaskType.GRPO, TaskType.IMAGE):
        sample = task(kind)
        if field != "expected_repo_name":
            reply = await house.post(sample.offer_path, {**sample.offer(), field: name})
            assert (reply.status_code, reply.json()["fields"][0]["field"]) == (422, field)
        reply = await house.post(sample.start_path, {**sample.start(), field: name})
        assert (reply.status_code, reply.json()["fields"][0]["field"]) == (422, field)
    assert set(house.counts().values()) == {0}


@each("name", ["a.b", "..", "a%00b", "%2e%2e", "a" * 129, "é", "-"])
async def test_task_ids_that_could_climb_are_not_looked_up(house: House, name: str) -> None:
    reply = await house.get(f"/get_latest_model_submission/{name}")
    if name == "..":  # taken away by the client, as any client does
        assert reply.status_code == 404
    else:
        assert (reply.status_code, reply.json()["error"]) == (422, "invalid_request")
        assert reply.json()["fields"][0]["field"] == "task_id"


@each("kind", ["TextTask", "instructtexttask", "", None, 1, ["DpoTask"]])
async def test_a_task_type_that_is_none_is_named(house: House, kind: Any) -> None:
    await refused(
        house, "/task_offer/", json.dumps({**task().offer(), "task_type": kind}).encode(), "task_type"
    )


@each("field", ["model", "hours_to_complete", "task_id", "task_type"])
async def test_a_field_that_is_missing_is_named(house: House, field: str) -> None:
    offer = task().offer()
    del offer[field]
    await refused(house, "/task_offer/", json.dumps(offer).encode(), field)


@each("field", ["ds_size", "model_params_count"])
@each("value", ["-1", "1.5", '"1"', "true", "9" * 3000, "1e30"])
async def test_a_count_that_is_none_is_named(house: House, field: str, value: str) -> None:
    await refused(house, "/task_offer/", set_field(task().offer(), field, value), field)


@each(
    ("field", "value"),
    [
        ("dataset", "file:///etc/passwd"),
        ("dataset", "http://"),
        ("dataset", ""),
        ("dataset", "https://a/" + "b" * 9000),
        ("file_format", "parquet"),
        ("dataset_type", {}),
        ("dataset_type", {"field_instruction": "a", "field_chosen": "b"}),
        ("dataset_type", {"environment_names": ["a"]}),
        ("dataset_type", [1]),
        ("dataset_type", None),
    ],
)
async def test_a_dataset_that_is_none_is_named(house: House, field: str, value: Any) -> None:
    reply = await house.post("/start_training/", {**task().start(), field: value})
    assert reply.status_code == 422
    named = reply.json()["fields"][0]
    # Where the data is and what it is are judged together, so the whole may be to blame.
    assert named["field"].split(".")[0] in (field, "body")
    assert set(house.counts().values()) == {0}


@each(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"a"',
        b"1",
        b'{"model": "a/b", "task_id": "t',
        b"\xff\xfe{}",
        b'{"model": "\\ud800"}',
        b'{"hours_to_complete": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\0" * 10,
        b"model=a&task_id=b",
    ],
)
async def test_what_is_no_object_is_refused(house: House, body: bytes) -> None:
    for path in ("/task_offer/", "/task_offer_image/", "/start_training/", "/start_training_image/"):
        reply = await house.post(path, body)
        assert (reply.status_code, reply.json()["error"]) == (422, "invalid_request")
        assert len(reply.content) < 4096
    assert set(house.counts().values()) == {0}


async def test_thousands_of_wrong_parts_do_not_make_a_long_reply(house: House) -> None:
    start = task(TaskType.GRPO).start()
    start["dataset_type"]["reward_functions"] = [{"reward_weight": -1}] * 60
    reply = await house.post("/start_training_grpo/", start)
    assert reply.status_code == 422
    assert len(reply.json()["fields"]) == 20
    assert reply.json()["fields"][0]["field"] == "dataset_type.grpo.reward_functions.0.reward_func"


async def test_a_wrong_value_is_shown_up_to_a_point(house: House) -> None:
    reply = await house.post("/task_offer/", {**task().offer(), "model": "x " * 100_000})
    (named,) = reply.json()["fields"]
    assert "value" not in named  # it would have to be put together from a very long request
    reply = await house.post("/task_offer/", {**task().offer(), "model": "x " * 1000})
    (named,) = reply.json()["fields"]
    assert errors.MAX_SHOWN - 5 < len(named["value"]) <= errors.MAX_SHOWN + 1


async def test_a_million_wrong_values_do_not_keep_others_waiting(house: House) -> None:
    start = {**task().start(), "dataset_type": {"environment_names": [0] * 1_000_000}}
    body = json.dumps(start).encode()
    began = time.process_time()
    reply = await house.post("/start_training/", body)
    assert reply.status_code == 422
    assert time.process_time() - began < 1.0


# Who is calling


async def test_strangers_are_refused_before_their_body_is_judged(house: House) -> None:
    reply = await house.post("/task_offer/", b"{", signer=STRANGER)
    assert (reply.status_code, reply.json()["error"]) == (403, "caller_refused")
    assert reply.json()["message"] == "Hotkey not found in metagraph"
    assert house.rows("SELECT * FROM nonces") == []


@each("name", fiber.AUTH_HEADERS)
async def test_a_missing_header_is_named(house: House, name: str) -> None:
    headers = fiber.sign_headers(VALIDATOR, MINER.ss58_address, b"{}")
    del headers[name]
    reply = await house.public.post("/task_offer/", content=b"{}", headers=headers)
    assert (reply.status_code, reply.json()["error"]) == (422, "header_missing")
    assert name in reply.json()["message"]


async def test_a_repeated_request_is_refused(house: House) -> None:
    nonce = fiber.new_nonce()
    assert (await house.offer(task(), nonce=nonce)).status_code == 200
    again = await house.offer(task(), nonce=nonce)
    assert (again.status_code, again.json()["error"]) == (401, "bad_credentials")
    assert house.rows("SELECT times_seen FROM offers") == [{"times_seen": 1}]


async def test_a_request_from_the_future_is_refused_with_the_reason(house: House) -> None:
    reply = await house.offer(task(), nonce=fiber.new_nonce(time.time_ns() + 500 * 10**9))
    assert (reply.status_code, reply.json()["error"]) == (401, "bad_credentials")
    assert "500 s ahead of this miner's clock" in reply.json()["message"]


async def test_too_little_stake_is_refused(tmp_path: Path, template: Path) -> None:
    write_nodes(tmp_path / "nodes.json", (VALIDATOR, 999.0))
    async with open_house(tmp_path, template) as house:
        reply = await house.offer(task())
        assert (reply.status_code, reply.json()["error"]) == (403, "caller_refused")


async def test_without_a_metagraph_validators_are_asked_to_come_back(tmp_path: Path, template: Path) -> None:
    (tmp_path / "nodes.json").write_text("{")
    async with open_house(tmp_path, template) as house:
        reply = await house.offer(task())
        assert (reply.status_code, reply.json()["error"]) == (503, "metagraph_unknown")
        assert (await house.public.get("/healthz")).status_code == 200


async def test_who_fails_too_often_is_told_when_to_come_back(tmp_path: Path, template: Path) -> None:
    async with open_house(tmp_path, template, FAILURE_BURST_PER_ADDRESS="3") as house:
        for _ in range(3):
            assert (await house.offer(task(), signer=STRANGER)).status_code == 403
        reply = await house.offer(task())
        assert (reply.status_code, reply.json()["error"]) == (429, "too_many_requests")
        assert 1 <= int(reply.headers["retry-after"]) <= 60


async def test_when_no_more_nonces_are_taken_validators_are_asked_to_come_back(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(house.daemon.nonces, "_max_live", 1)
    assert (await house.offer(task())).status_code == 200
    reply = await house.offer(task())
    assert (reply.status_code, reply.json()["error"]) == (503, "too_many_nonces")


# Our own failures


async def test_a_bug_is_a_500_in_json_and_a_traceback_in_the_log(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError("secret details")

    monkeypatch.setattr(house.daemon.inbox, "offer", broken)
    reply = await house.offer(task())
    assert (reply.status_code, reply.json()["error"]) == (500, "internal_error")
    assert "secret" not in reply.text
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.exc_info is not None
    assert "ZeroDivisionError" in (record.exc_text or logging.Formatter().formatException(record.exc_info))


def test_every_status_is_given_once_and_no_code_means_two_things() -> None:
    assert all(400 <= status < 600 for status in errors.STATUS.values())
    codes: dict[str, set[int]] = {}
    for kind in errors.STATUS:
        codes.setdefault(kind.code, set()).add(errors.STATUS[kind])
    assert {code: statuses for code, statuses in codes.items() if len(statuses) > 1} == {}


def test_an_error_without_a_status_of_its_own_is_our_own_failure() -> None:
    assert errors.status_of(GodMinerError("x")) == 500


@given(
    st.none() | st.booleans() | st.floats() | st.text() | st.integers() | st.binary() | st.lists(st.text())
)
def test_any_offending_value_can_be_shown(value: Any) -> None:
    shown = errors._field({"loc": ("body", "a", 0), "msg": "Value error, no", "input": value})
    assert shown["field"] == "a.0"
    assert shown["message"] == "no"
    assert len(shown["value"]) <= errors.MAX_SHOWN + 1


# What is told to whom

SECRETS = {
    "OPERATOR_TOKEN": "operator-token-0123456789",
    "TRAINING_REPO_TEXT_TOKEN": "github_pat_0123456789_text",
    "WALLET_PASSWORD": "a wallet password",
}


async def test_no_secret_is_in_a_reply_or_a_log_but_the_one_a_validator_is_owed(
    tmp_path: Path, template: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = {"TRAINING_REPO_TEXT_URL": "https://github.com/me/it", "TRAINING_REPO_TEXT_COMMIT": "ab" * 20}
    caplog.set_level(logging.DEBUG)
    async with open_house(tmp_path, template, **SECRETS, **entry) as house:
        texts = [
            (await reply).text
            for reply in (
                house.public.get("/training_repo/text"),
                house.get("/training_repo/text", signer=STRANGER),
                house.get("/training_repo/image"),
                house.offer(task()),
                house.start(task()),
                house.start(dataclasses.replace(task(), model="..")),
                house.operator.get("/status"),
                house.operator.get("/status", headers={"authorization": "Bearer wrong"}),
                house.operator.get(
                    "/status", headers={"authorization": f"Bearer {SECRETS['OPERATOR_TOKEN']}"}
                ),
                house.operator.get(
                    "/metrics", headers={"authorization": f"Bearer {SECRETS['OPERATOR_TOKEN']}"}
                ),
            )
        ]
        owed = (await house.get("/training_repo/text")).json()["github_token"]
    assert owed == SECRETS["TRAINING_REPO_TEXT_TOKEN"]
    told = "\n".join([*texts, caplog.text])
    for name, secret in SECRETS.items():
        assert secret not in told, name
    assert MINER.keyfile() not in told
    assert json.loads(MINER.keyfile())["secretSeed"] not in told
    # A presigned address is a key to somebody's data.
    assert "X-Amz-Signature" not in told
