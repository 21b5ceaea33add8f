"""Refusals: the right status, JSON of one shape, the field named, nothing stored, no secret shown."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from core.domain.errors import ConfigError, GodMinerError
from core.domain.tasks import TaskType
from core.domain.wire import MinerTaskOffer, TrainRequestImage, TrainRequestText
from miner.chain.auth import BadCredentials, CallerRefused, HeaderInvalid, HeaderMissing, MetagraphUnknown
from miner.chain.metagraph import NodesFileError
from miner.chain.nonces import NoncesFull, NonceUsed
from miner.http import errors
from miner.jobs.manager import JobsNotReady, JobStateConflict
from miner.store.database import StoreUnavailable
from tests.doubles.each import each
from tests.miner.http.daemon_in_process import (
    FEW_FAILURES,
    STRANGER,
    DaemonInProcess,
    open_daemon,
    task,
)

TRAVERSALS = [
    "../../etc/passwd",
    "..",
    ".",
    "a/../b",
    "/etc/passwd",
    "a\\b",
    "a%2e%2e",
    "a\0b",
    "a\n",
    "-",
    "é",
    "",
]
#: As it stands in the JSON: libraries write neither 1e999 nor NaN for a whole number.
HOURS = ["NaN", "Infinity", "-1", "1e9", "1e999", "9" * 3000, '"4"', "true", "null", "[]", "{}"]
COUNTS = ["-1", "1.5", '"1"', "true", "9" * 3000, "1e30"]
NAMES = [json.dumps(name) for name in [*TRAVERSALS, "a b", "a" * 500]]


def set_field(sample: dict[str, Any], field: str, raw: str) -> bytes:
    """The request as JSON, with `raw` put in as it is."""
    return json.dumps({**sample, field: "@"}).replace('"@"', raw).encode()


@each(
    ("field", "values"),
    [
        ("hours_to_complete", HOURS),
        ("task_id", NAMES),
        ("model", NAMES),
        ("expected_repo_name", NAMES),
        ("ds_size", COUNTS),
        ("model_params_count", COUNTS),
    ],
)
def test_no_model_takes_a_value_that_means_nothing_or_could_climb(field: str, values: list[str]) -> None:
    requests = (
        (MinerTaskOffer, task().offer()),
        (TrainRequestText, task().start()),
        (TrainRequestText, task(TaskType.GRPO).start()),
        (TrainRequestImage, task(TaskType.IMAGE).start()),
    )
    for model, sample in requests:
        for value in values if field in model.model_fields else []:
            with pytest.raises(ValidationError) as refused:
                model.model_validate_json(set_field(sample, field, value))
            assert [problem["loc"] for problem in refused.value.errors()] == [(field,)], value


OFFER, START, IMAGE = task().offer(), task().start(), task(TaskType.IMAGE)


@each(
    ("path", "body", "field"),
    [
        ("/task_offer/", set_field(OFFER, "hours_to_complete", "NaN"), "hours_to_complete"),
        ("/task_offer/", set_field(OFFER, "ds_size", "9" * 3000), "ds_size"),
        ("/task_offer/", set_field(OFFER, "task_type", '["DpoTask"]'), "task_type"),
        ("/task_offer/", json.dumps({**OFFER, "hours_to_complete": None}).encode(), "hours_to_complete"),
        ("/task_offer/", json.dumps({"model": "a/b"}).encode(), "task_id"),
        ("/task_offer_image/", set_field(IMAGE.offer(), "model", '"../../etc/passwd"'), "model"),
        ("/start_training/", set_field(START, "expected_repo_name", '".."'), "expected_repo_name"),
        ("/start_training/", set_field(START, "dataset", '"file:///etc/passwd"'), "body"),
        (
            "/start_training/",
            set_field(START, "dataset_type", '{"environment_names": ["a"]}'),
            "dataset_type",
        ),
        ("/start_training_grpo/", set_field(START, "task_id", '"a\\u0000b"'), "task_id"),
        ("/start_training_image/", set_field(IMAGE.start(), "hours_to_complete", "-1"), "hours_to_complete"),
        *(
            ("/task_offer/", body, "body")
            for body in (b"", b"{", b"null", b"[]", b"1", b"\xff{}", b"[" * 100_000, b"model=a&task_id=b")
        ),
    ],
)
async def test_an_invalid_request_names_its_field_and_leaves_nothing(
    running: DaemonInProcess, path: str, body: bytes, field: str
) -> None:
    before, used = running.counts(), len(running.rows("SELECT * FROM nonces"))
    reply = await running.post(path, body)
    assert (reply.status_code, reply.json()["error"]) == (422, "invalid_request"), reply.text
    assert set(reply.json()) == {"error", "message", "fields"}
    assert field in [entry["field"].split(".")[0] for entry in reply.json()["fields"]]
    assert field in reply.json()["message"]
    assert len(reply.content) < 4096
    assert running.counts() == before
    assert len(running.rows("SELECT * FROM nonces")) == used + 1  # used up all the same


@each("name", ["a.b", "a%00b", "%2e%2e", "a" * 129, "é", "-"])
async def test_an_invalid_task_id_in_a_path_is_refused(running: DaemonInProcess, name: str) -> None:
    reply = await running.get(f"/get_latest_model_submission/{name}")
    assert (reply.status_code, reply.json()["error"]) == (422, "invalid_request")
    assert reply.json()["fields"][0]["field"] == "task_id"


async def test_thousands_of_wrong_parts_do_not_make_a_long_reply(running: DaemonInProcess) -> None:
    start = task(TaskType.GRPO).start()
    start["dataset_type"]["reward_functions"] = [{"reward_weight": -1}] * 60
    reply = await running.post("/start_training_grpo/", start)
    assert reply.status_code == 422
    assert len(reply.json()["fields"]) == 20
    assert reply.json()["fields"][0]["field"] == "dataset_type.grpo.reward_functions.0.reward_func"


async def test_a_wrong_value_is_shown_up_to_a_point(running: DaemonInProcess) -> None:
    reply = await running.post("/task_offer/", {**task().offer(), "model": "x " * 100_000})
    (named,) = reply.json()["fields"]
    assert "value" not in named  # it would have to be put together from a very long request
    reply = await running.post("/task_offer/", {**task().offer(), "model": "x " * 1000})
    (named,) = reply.json()["fields"]
    assert errors.MAX_VALUE_CHARS - 5 < len(named["value"]) <= errors.MAX_VALUE_CHARS + 1


# Who is calling


async def test_strangers_are_refused_before_their_body_is_judged(running: DaemonInProcess) -> None:
    reply = await running.post("/task_offer/", b"{", signer=STRANGER)
    assert (reply.status_code, reply.json()["error"]) == (403, "caller_refused")
    assert reply.json()["message"] == "Hotkey not found in metagraph"
    assert running.rows("SELECT * FROM nonces") == []


async def test_too_many_failures_are_refused_with_a_retry_after(tmp_path: Path) -> None:
    async with open_daemon(tmp_path, **FEW_FAILURES) as running:
        for _ in range(3):
            assert (await running.offer(task(), signer=STRANGER)).status_code == 403
        reply = await running.offer(task())
        assert (reply.status_code, reply.json()["error"]) == (429, "too_many_requests")
        assert int(reply.headers["retry-after"]) > 0


# Our own failures


async def test_a_bug_is_a_500_in_json_and_a_traceback_in_the_log(
    running: DaemonInProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError("secret details")

    monkeypatch.setattr(running.daemon.offer_service, "offer", broken)
    reply = await running.offer(task())
    assert (reply.status_code, reply.json()["error"]) == (500, "internal_error")
    assert "secret" not in reply.text
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.exc_info is not None
    assert "ZeroDivisionError" in (record.exc_text or logging.Formatter().formatException(record.exc_info))


@each(
    ("error", "status"),
    [
        (HeaderMissing("nonce"), 422),
        (HeaderInvalid("x"), 400),
        (CallerRefused("x"), 403),
        (BadCredentials("x"), 401),
        (NonceUsed("x"), 401),
        (NoncesFull("x"), 503),
        (MetagraphUnknown("x"), 503),
        (StoreUnavailable("x"), 503),
        (JobsNotReady("x"), 503),
        (JobStateConflict("x"), 409),
        (ConfigError("a", []), 422),
        (NodesFileError("a", []), 422),  # as its base class
        (GodMinerError("x"), 500),
    ],
)
def test_every_error_has_its_status(error: GodMinerError, status: int) -> None:
    assert errors.http_status_of(error) == status


def test_every_status_belongs_to_an_error_that_exists() -> None:
    kinds, waiting = set(), [GodMinerError]
    while waiting:
        kinds.add((kind := waiting.pop()).code)
        waiting += kind.__subclasses__()
    assert set(errors.STATUS) <= kinds


@given(
    st.none() | st.booleans() | st.floats() | st.text() | st.integers() | st.binary() | st.lists(st.text())
)
def test_any_offending_value_can_be_shown(value: Any) -> None:
    shown = errors._field({"loc": ("body", "a", 0), "msg": "Value error, no", "input": value})
    assert shown["field"] == "a.0"
    assert shown["message"] == "no"
    assert len(shown["value"]) <= errors.MAX_VALUE_CHARS + 1
