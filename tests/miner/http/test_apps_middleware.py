"""What every public request passes first: how many at once, what is counted, what is logged."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from miner.chain.fiber import sign_headers
from miner.http.apps import CLIENT_GONE, public_app
from tests.miner.http.daemon_in_process import (
    FEW_FAILURES,
    MINER,
    STRANGER,
    VALIDATOR,
    DaemonInProcess,
    open_daemon,
    task,
)


@pytest.fixture
async def narrow(tmp_path: Path) -> AsyncIterator[DaemonInProcess]:
    async with open_daemon(tmp_path, **{"miner.http.apps.MAX_CONCURRENT_REQUESTS": "3"}) as running:
        yield running


def hold(running: DaemonInProcess, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Offers are answered when the event is set."""
    gate, offer = asyncio.Event(), running.daemon.offer_service.offer

    async def held(*arguments: Any) -> Any:
        await gate.wait()
        return await offer(*arguments)

    monkeypatch.setattr(running.daemon.offer_service, "offer", held)
    return gate


async def until(true: Any) -> None:
    for _ in range(1000):
        if true():
            return
        await asyncio.sleep(0)
    raise AssertionError("never became true")


async def test_beyond_so_many_at_once_the_rest_is_asked_to_come_back(
    narrow: DaemonInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold(narrow, monkeypatch)
    first = [asyncio.create_task(narrow.offer(task(seed=seed))) for seed in range(3)]
    await until(lambda: len(narrow.daemon.nonces) == 3)
    for reply in (await narrow.offer(task(seed=9)), await narrow.public.get("/healthz")):
        assert (reply.status_code, reply.json()["error"]) == (503, "busy")
        assert "3 requests" in reply.json()["message"]
    gate.set()
    assert [(await reply).status_code for reply in first] == [200, 200, 200]
    for number in range(10):  # places are given back however a request ends
        await narrow.post("/task_offer/", b"{")
        await narrow.public.get(f"/{number}")
    assert (await narrow.offer(task(seed=9))).status_code == 200
    # The one turned away was not even looked at: its nonce was not used up.
    assert len(narrow.rows("SELECT * FROM nonces")) == 4 + 10


async def test_a_request_whose_body_is_on_its_way_takes_no_place(narrow: DaemonInProcess) -> None:
    gate = asyncio.Event()

    async def slow(body: bytes) -> AsyncIterator[bytes]:
        yield body[:10]
        await gate.wait()
        yield body[10:]

    async def send(seed: int) -> int:
        body = json.dumps(task(seed=seed).offer()).encode()
        headers = sign_headers(VALIDATOR, MINER.ss58_address, body)
        return (await narrow.public.post("/task_offer/", content=slow(body), headers=headers)).status_code

    sending = [asyncio.create_task(send(seed)) for seed in range(10)]
    await asyncio.sleep(0)
    assert (await narrow.offer(task(seed=11))).status_code == 200
    gate.set()
    assert [await status for status in sending] == [200] * 10


async def hang_up(running: DaemonInProcess, address: str) -> None:
    """Send half a body to the daemon, and no more."""
    headers = sign_headers(VALIDATOR, MINER.ss58_address, b"{}")
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/task_offer/",
        "raw_path": b"/task_offer/",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": (address, 1),
    }
    coming = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return coming.pop(0)

    async def send(_: Any) -> None:
        """Nobody is there."""

    await public_app(running.daemon)(scope, receive, send)


async def test_who_hangs_up_is_counted_as_such_and_is_no_error(
    running: DaemonInProcess, caplog: pytest.LogCaptureFixture
) -> None:
    await hang_up(running, "192.0.2.1")
    assert running.metric(f'god_miner_requests_total{{route="/task_offer/",status="{CLIENT_GONE}"}}') == 1
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


async def test_bodies_that_do_not_come_count_as_failures(tmp_path: Path) -> None:
    async with open_daemon(tmp_path, **FEW_FAILURES) as running:
        for _ in range(3):
            await hang_up(running, "127.0.0.1")
        assert (await running.offer(task())).status_code == 429


async def test_requests_are_counted_by_route_and_status_not_by_what_was_asked(
    running: DaemonInProcess,
) -> None:
    await running.offer(task())
    await running.offer(task())
    await running.get("/get_latest_model_submission/one")
    await running.get("/get_latest_model_submission/two")
    await running.post("/task_offer/", b"{")
    for _ in range(50):
        await running.public.get("/" + secrets.token_hex(4))
    counted = "god_miner_requests_total"
    assert running.metric(f'{counted}{{route="/task_offer/",status="200"}}') == 2
    assert running.metric(f'{counted}{{route="/task_offer/",status="422"}}') == 1
    submissions = f'{counted}{{route="/get_latest_model_submission/{{task_id}}",status="404"}}'
    assert running.metric(submissions) == 2
    assert running.metric(f'{counted}{{route="other",status="404"}}') == 50
    assert running.metric('god_miner_request_seconds_count{route="/task_offer/"}') == 3
    page = running.daemon.metrics.render().decode()
    assert len([line for line in page.splitlines() if line.startswith(counted)]) == 4


async def test_strangers_leave_no_lines_and_at_debug_level_one_without_what_they_wrote(
    running: DaemonInProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="miner")
    await running.public.get("/healthz?token=secret")
    await running.public.get("/" + "x" * 5000)
    await running.offer(task(), signer=STRANGER)
    assert [record.getMessage() for record in caplog.records if record.name.startswith("miner")] == []
    caplog.set_level(logging.DEBUG, logger="miner.access")
    await running.public.get("/healthz?token=secret")
    await running.public.get("/" + "x" * 5000)
    first, second = [record.getMessage() for record in caplog.records if record.name == "miner.access"]
    assert first.startswith("GET /healthz 200 ")
    assert first.endswith(" ms 127.0.0.1")
    assert second.startswith("GET other 404 ")
