"""Jobs on the operator's port."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.domain.job_states import JobState
from core.runs.run_files import RunEnd
from miner.http import jobs
from miner.jobs.events import MAX_QUEUED_EVENTS
from tests.doubles.each import each
from tests.miner.http.job_port import TOKEN, Port, open_port
from tests.miner.jobs.harness import DATASET, Trainer

pytestmark = pytest.mark.process


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    async with open_port(tmp_path / "data") as port:
        yield port


async def obeys(trainer: Trainer) -> None:
    trainer.step(3, 10, loss=0.5)
    Path(trainer.run.progress_path).with_name("log").write_text("one\ntwo\n")
    await trainer.wait_for_stop()
    trainer.end(RunEnd.STOPPED)


async def test_jobs_are_listed_with_what_goes_on(port: Port) -> None:
    harness = port.harness
    harness.backend.scripts = [obeys]
    job = await harness.start()
    live = harness.jobs.live(job)
    assert live is not None
    await harness.until(lambda: live.step == 3)
    (listed,) = (await port.ask("GET", "/jobs?open=true")).json()["jobs"]
    assert (listed["id"], listed["state"], listed["live"]["loss"]) == (job, "training", 0.5)
    await harness.jobs.cancel(job)
    await harness.over_within(job)
    assert (await port.ask("GET", "/jobs?open=true")).json()["jobs"] == []
    (listed,) = (await port.ask("GET", "/jobs")).json()["jobs"]
    assert (listed["state"], listed["live"]) == ("cancelled", None)


async def test_one_job_is_shown_whole_without_what_opens_something(port: Port) -> None:
    job = await port.harness.start()
    await port.harness.over_within(job)
    for word in (str(job), "t1"):
        shown = (await port.ask("GET", f"/jobs/{word}")).json()
        assert shown["meaning"]["validator"] == "a submission"
        assert [attempt["end_reason"] for attempt in shown["attempts"]] == ["trained"]
        assert shown["steps"][0]["name"] == "fetch"
        assert "X-Amz-Signature" not in json.dumps(shown)


async def test_a_job_is_cancelled_and_tried_again(port: Port) -> None:
    port.harness.backend.scripts = [obeys]
    job = await port.harness.start()
    await port.harness.until(lambda: bool(port.harness.backend.submitted))
    assert (await port.ask("POST", f"/jobs/{job}/cancel")).json()["state"] == "cancelled"
    await port.harness.over_within(job)
    again = await port.ask("POST", f"/jobs/{job}/cancel")
    assert (again.status_code, again.json()["error"]) == (409, "job_state")
    assert (await port.ask("POST", f"/jobs/{job}/retry")).json()["state"] == "queued"
    assert (await port.harness.over_within(job)).state is JobState.DONE


async def test_the_operators_own_task_is_taken(port: Port, tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text("[]")
    task = {
        "model": "a/b",
        "hours_to_complete": 1,
        "dataset": str(tmp_path / "d.json"),
        "dataset_type": DATASET,
    }
    reply = await port.ask("POST", "/jobs", json=task)
    assert reply.status_code == 201
    row = await port.harness.over_within(reply.json()["job_id"])
    assert (row.state, row.validator) == (JobState.DONE, "operator")


async def test_own_tasks_with_two_profiles_are_labelled_found_and_compared(
    port: Port, tmp_path: Path
) -> None:
    (tmp_path / "d.json").write_text("[]")
    task = {"model": "a/b", "hours_to_complete": 1, "dataset": str(tmp_path / "d.json"), "tags": ["ab"]}
    jobs = []
    for profile in ("h100x4", "steady"):
        given = {**task, "dataset_type": DATASET, "profile": profile, "note": f"with {profile}"}
        jobs.append((await port.ask("POST", "/jobs", json=given)).json()["job_id"])
        await port.harness.over_within(jobs[-1])
    first, second = jobs
    compared = (await port.ask("GET", f"/compare?jobs={first},{second}")).json()
    assert [one["profile"] for one in compared["jobs"]] == ["h100x4", "steady"]
    assert [one["job"]["note"] for one in compared["jobs"]] == ["with h100x4", "with steady"]
    task_id = compared["jobs"][0]["job"]["task_id"]
    twice = (await port.ask("GET", f"/compare?jobs={first},{task_id}")).json()
    assert [one["job"]["id"] for one in twice["jobs"]] == [first]
    differ = {row["name"]: row["values"] for row in compared["plan"]}
    assert len(differ["optimizer.learning_rate"]) == 2
    assert all(values[0] != values[1] for values in differ.values())
    labels = {"tags": ["better", "ab"], "note": "Äb kept"}
    labelled = (await port.ask("POST", f"/jobs/{second}/labels", json=labels)).json()
    assert (labelled["tags"], labelled["note"]) == (["ab", "better"], "Äb kept")
    for query, found in (
        ("tag=ab", jobs),
        ("tag=better", [second]),
        ("tag=bett", []),
        ("q=with%20h100", [first]),
        ("q=a/b&state=done&tag=ab", jobs),
        ("q=ÄB", [second]),
        ("state=failed", []),
    ):
        listed = (await port.ask("GET", f"/jobs?{query}")).json()["jobs"]
        assert sorted(one["id"] for one in listed) == found, query


@each(
    ("method", "path", "body", "status"),
    [
        ("GET", "/compare?jobs=", None, 422),
        ("GET", "/compare?jobs=1,2,3,4,5,6,7", None, 422),
        ("GET", "/compare?jobs=99", None, 404),
        ("GET", f"/compare?jobs={','.join(f'{number}' * 36 for number in range(6))}", None, 404),
        ("POST", "/jobs/99/labels", {"tags": [], "note": ""}, 404),
        ("POST", "/jobs", {"profile": "none-of-this-name"}, 422),
        ("POST", "/jobs", {"tags": ["two words"]}, 422),
        ("POST", "/jobs", {"tags": [f"t{number}" for number in range(21)]}, 422),
    ],
)
async def test_what_cannot_be_compared_or_labelled_is_refused(
    port: Port, tmp_path: Path, method: str, path: str, body: dict[str, Any] | None, status: int
) -> None:
    (tmp_path / "d.json").write_text("[]")
    task = {"model": "a/b", "hours_to_complete": 1, "dataset": str(tmp_path / "d.json")}
    given = {**task, "dataset_type": DATASET, **body} if path == "/jobs" and body else body
    assert (await port.ask(method, path, json=given)).status_code == status


async def test_a_task_that_is_wrong_is_refused_with_its_problems(port: Port) -> None:
    reply = await port.ask("POST", "/jobs", json={"model": "a/b"})
    assert (reply.status_code, reply.json()["error"]) == (422, "bad_config")
    assert "hours_to_complete" in reply.json()["message"]


@each("data", ["x" * 300, "/" + "x/" * 3000, "~nobody-of-this-name/x", "a\0b"])
async def test_a_task_whose_files_cannot_have_that_name_is_refused(port: Port, data: str) -> None:
    task = {"model": "a/b", "hours_to_complete": 1, "dataset_type": DATASET}
    for names in ({"dataset": data}, {"dataset_zip": data}, {"model_folder": data, "dataset": "http://x/y"}):
        reply = await port.ask("POST", "/jobs", json={**task, **names})
        assert (reply.status_code, reply.json()["error"]) == (422, "bad_config")


async def test_a_client_that_hangs_up_while_it_sends_a_task_leaves_no_line_in_the_log(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/jobs",
        "raw_path": b"/jobs",
        "query_string": b"",
        "headers": [(b"authorization", f"Bearer {TOKEN}".encode())],
        "client": ("127.0.0.1", 1),
    }
    coming = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return coming.pop(0)

    async def send(_message: Any) -> None: ...

    with caplog.at_level(logging.INFO):
        await port.app(scope, receive, send)
    assert caplog.records == []


@each(
    ("method", "path", "status"),
    [
        ("GET", "/jobs/99", 404),
        ("GET", "/jobs/99/log", 404),
        ("GET", "/jobs/99/events", 404),
        ("POST", "/jobs/99/cancel", 404),
        ("POST", "/jobs/x/retry", 404),
        ("GET", "/jobs?limit=0", 422),
    ],
)
async def test_unknown_jobs_and_invalid_parameters_are_refused(
    port: Port, method: str, path: str, status: int
) -> None:
    assert (await port.ask(method, path)).status_code == status


async def test_a_log_is_read_piece_by_piece(port: Port) -> None:
    port.harness.backend.scripts = [obeys]
    job = await port.harness.start()
    live = port.harness.jobs.live(job)
    assert live is not None
    await port.harness.until(lambda: live.step == 3)  # the log is written in the same turn
    first = (await port.ask("GET", f"/jobs/{job}/log?limit=4")).json()
    assert first["text"] == "one\n"
    second = (await port.ask("GET", f"/jobs/{job}/log?from={first['next']}")).json()
    assert (second["text"], second["ended"]) == ("two\n", False)
    assert (await port.ask("GET", f"/jobs/{job}/log?attempt=2")).status_code == 404
    await port.harness.jobs.cancel(job)


async def test_events_begin_with_how_it_is_and_end_with_the_daemon(port: Port) -> None:
    port.harness.backend.scripts = [obeys]
    job = await port.harness.start()
    await port.harness.until(lambda: bool(port.harness.backend.submitted))
    stream = jobs._event_lines(port.harness.jobs, job)
    assert (await anext(stream)).startswith(": ")
    now = await anext(stream)
    assert "event: job" in now
    assert json.loads(now.partition("data: ")[2])["job_id"] == job
    await port.harness.jobs.cancel(job)
    states = []
    async for text in stream:
        if "event: job" in text:
            states.append(json.loads(text.partition("data: ")[2])["state"])
        if states and states[-1] == "cancelled":
            port.harness.services.events.close()
    assert states[-1] == "cancelled"


async def test_a_quiet_stream_shows_that_it_lives(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "HEARTBEAT_SECONDS", 0.01)
    stream = jobs._event_lines(port.harness.jobs, None)
    assert [await anext(stream) for _ in range(3)] == [": god-miner\n\n", *[": still here\n\n"] * 2]
    await stream.aclose()


@each(
    ("method", "path"), [("GET", "/jobs"), ("POST", "/jobs"), ("GET", "/events"), ("POST", "/jobs/1/cancel")]
)
async def test_nothing_opens_without_the_token(port: Port, method: str, path: str) -> None:
    assert (await port.ask(method, path, headers={"authorization": ""})).status_code == 401
    assert (await port.ask("GET", "/jobs", headers={"host": "miner.example"})).status_code == 200


@each("address", ["127.0.0.1", "192.0.2.7"])
async def test_files_of_this_machine_are_named_from_this_machine_only(
    port: Port, tmp_path: Path, address: str
) -> None:
    """Else the token would let another machine have any file that the daemon can read."""
    rows = tmp_path / "rows.json"
    rows.write_text("[]")
    task = {"model": "tiny/llama", "hours_to_complete": 1, "dataset": str(rows), "dataset_type": DATASET}
    url = {**task, "dataset": "https://files.example.org/rows.json"}
    port.client._transport = httpx.ASGITransport(port.app, client=(address, 1))
    local = address == "127.0.0.1"
    profile = tmp_path / "own.yaml"
    profile.write_text("extends: steady\n")
    named = [{**url, "model_folder": str(tmp_path)}, {**url, "profile": str(profile)}]
    for given, taken in ((url, True), (task, local), *((one, local) for one in named)):
        reply = await port.ask("POST", "/jobs", json=given)
        assert reply.status_code == (201 if taken else 422), reply.text
        assert taken or "on this machine only" in reply.text


async def test_streams_of_events_leave_connections_for_the_rest(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs.EventStream, "open_now", jobs.MAX_EVENT_STREAMS)
    reply = await port.ask("GET", "/events")
    assert (reply.status_code, reply.json()["error"]) == (429, "too_many_requests")
    port.harness.services.events.close()
    monkeypatch.setattr(jobs.EventStream, "open_now", jobs.MAX_EVENT_STREAMS - 1)
    for _ in range(2):  # each gives its place back
        assert (await port.ask("GET", "/events")).status_code == 200


async def test_the_events_of_a_job_that_is_over_begin_with_its_end(port: Port) -> None:
    job = await port.harness.start()
    await port.harness.over_within(job)
    stream = jobs._event_lines(port.harness.jobs, job)
    assert (await anext(stream)).startswith(": ")
    event = json.loads((await anext(stream)).partition("data: ")[2])
    assert (event["state"], event["published"]) == ("done", "me/repo-1")
    await stream.aclose()


async def test_a_reader_too_slow_for_the_last_event_still_gets_the_end(port: Port) -> None:
    port.harness.backend.scripts = [obeys]
    job = await port.harness.start()
    await port.harness.until(lambda: bool(port.harness.backend.submitted))
    stream = jobs._event_lines(port.harness.jobs, job)
    for _ in range(2):
        await anext(stream)
    for number in range(MAX_QUEUED_EVENTS + 10):
        port.harness.services.events.send("note", job, {"number": number})
    await port.harness.jobs.cancel(job)
    await port.harness.over_within(job)
    async with asyncio.timeout(120):
        async for text in stream:
            if "event: missed" in text:
                break
        event = json.loads((await anext(stream)).partition("data: ")[2])
    assert event["state"] == "cancelled"
    await stream.aclose()
