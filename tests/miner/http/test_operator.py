"""The operator's port: who may look, and what there is to see."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from core.domain.tasks import TaskType
from miner import __version__
from miner.http.apps import operator_app
from tests.doubles.each import each
from tests.miner.http.daemon_in_process import (
    COMPACT,
    FEW_FAILURES,
    MINER,
    STRANGER,
    DaemonInProcess,
    open_daemon,
    task,
)

TOKEN = "operator-token-0123456789"
PAGES = ("/metrics", "/status")
WRONG = (f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", TOKEN, f"Basic {TOKEN}")


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[DaemonInProcess]:
    async with open_daemon(tmp_path, OPERATOR_TOKEN=TOKEN) as running:
        yield running


async def test_without_a_token_of_the_operators_the_daemon_makes_one_that_only_its_user_can_read(
    running: DaemonInProcess,
) -> None:
    path = running.daemon.settings.data_dir / "operator-token"
    token = path.read_text().strip()
    assert (path.stat().st_mode & 0o777, len(token)) == (0o600, 48)
    operator_app(running.daemon)  # another start
    assert path.read_text().strip() == token
    for page in PAGES:
        assert (await running.operator.get(page, headers={"authorization": ""})).status_code == 401
        assert (
            await running.operator.get(page, headers={"authorization": f"Bearer {token}"})
        ).status_code == 200


@pytest.mark.parametrize(
    ("address", "right"),
    [("127.0.0.1", 200), ("::1", 200), ("::ffff:127.0.0.1", 200), ("192.0.2.7", 429)],
)
async def test_wrong_tokens_are_limited_by_address(tmp_path: Path, address: str, right: int) -> None:
    """On loopback every user has the operator's address, and must not shut the operator out."""
    async with open_daemon(tmp_path, OPERATOR_TOKEN=TOKEN, **FEW_FAILURES) as running:
        transport = httpx.ASGITransport(operator_app(running.daemon), client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://miner.example") as client:
            wrong = [
                (await client.get("/status", headers={"authorization": "Bearer x"})).status_code
                for _ in range(5)
            ]
            assert wrong == [401, 401, 401, 429, 429]
            reply = await client.get("/status", headers={"authorization": f"Bearer {TOKEN}"})
            assert reply.status_code == right


async def test_jobs_are_read_and_cancelled_without_a_backend(running: DaemonInProcess) -> None:
    await running.start(task(seed=1))
    (job,) = (await running.operator.get("/jobs")).json()["jobs"]
    assert (job["task_id"], job["state"], job["live"]) == (task(seed=1).task_id, "queued", None)
    assert (await running.operator.get(f"/jobs/{job['id']}")).json()["attempts"] == []
    reply = await running.operator.post(f"/jobs/{job['id']}/cancel")
    assert (reply.status_code, reply.json()["state"]) == (200, "cancelled")
    reply = await running.operator.post(f"/jobs/{job['id']}/retry")
    assert (reply.status_code, reply.json()["error"]) == (503, "no_jobs_yet")


@each("path", PAGES)
@each(
    "authorization",
    [b"", b"Bearer", b"Bearer ", b"Bearer \xff\xe9", *(word.encode() for word in WRONG)],
)
async def test_only_the_token_opens(guarded: DaemonInProcess, path: str, authorization: bytes) -> None:
    reply = await guarded.operator.get(path, headers={"authorization": authorization})
    assert (reply.status_code, reply.json()["error"]) == (401, "unauthorized")
    assert reply.headers["www-authenticate"] == "Bearer"
    assert TOKEN not in reply.text
    headers = {"authorization": f"Bearer {TOKEN}", "host": "miner.example:7998"}
    assert (await guarded.operator.get(path, headers=headers)).status_code == 200


@each(
    ("method", "path", "status"),
    [("POST", "/metrics", 405), ("GET", "/metrics/", 404), ("GET", "/", 404), ("GET", "/task_offer/", 404)],
)
async def test_refusals_are_json_here_too(
    running: DaemonInProcess, method: str, path: str, status: int
) -> None:
    reply = await running.operator.request(method, path)
    assert reply.status_code == status
    assert set(reply.json()) == {"error", "message"}


async def test_the_status_shows_who_and_how_much(running: DaemonInProcess) -> None:
    await running.offer(task(seed=1))
    await running.offer(task(seed=2))
    await running.start(task(seed=2))
    status = (await running.operator.get("/status")).json()
    assert status["version"] == __version__
    assert (status["hotkey"], status["uid"]) == (MINER.ss58_address, 2)
    assert status["uptime_seconds"] >= 0
    assert (status["chain"]["nodes"], status["chain"]["stale"]) == (3, False)
    assert status["reservations"] == {"jobs": 1, "held_offers": 1}
    assert status["store"] == {"jobs": {"queued": 1}, "offers": {"accepted": 2}}
    assert status["live_nonces"] == 3


async def test_the_status_is_there_before_the_metagraph_is(tmp_path: Path) -> None:
    (tmp_path / "nodes.json").write_text("[")
    async with open_daemon(tmp_path) as running:
        status = (await running.operator.get("/status")).json()
        assert (status["uid"], status["chain"]["nodes"]) == (None, 0)
        assert "nodes.json" in status["chain"]["last_error"]
        assert running.metric('god_miner_alerts_total{kind="bad_nodes_file"}') == 1
        assert (await running.offer(task())).json()["error"] == "metagraph_unknown"
        assert (await running.public.get("/healthz")).status_code == 200


async def test_prometheus_can_read_the_page_and_finds_what_happened(running: DaemonInProcess) -> None:
    await running.offer(task(seed=1), separators=COMPACT)
    await running.offer(task(seed=1))
    await running.start(task(seed=1))
    await running.start(task(TaskType.GRPO, 2))
    await running.start(task(TaskType.GRPO, 2))
    await running.offer(task(), signer=STRANGER)
    reply = await running.operator.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=")
    values = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }
    assert values["god_miner_offers_total", "accepted"] == 2
    assert values["god_miner_offers_total", "refused"] == 0
    assert values["god_miner_starts_total", "new"] == 2
    assert values["god_miner_starts_total", "repeated"] == 1
    assert values["god_miner_requests_total", "/task_offer/", "200"] == 2
    assert values["god_miner_requests_total", "/task_offer/", "403"] == 1
    assert values["god_miner_request_seconds_count", "/task_offer/"] == 3
    assert (values["god_miner_open_jobs",], values["god_miner_held_offers",]) == (2, 0)
    assert (values["god_miner_live_nonces",], values["god_miner_pending_writes",]) == (5, 0)
    assert values["god_miner_metagraph_age_seconds",] >= 0
    assert values["process_resident_memory_bytes",] > 0


async def test_the_routes_are_described_to_whoever_has_the_token(running: DaemonInProcess) -> None:
    refused = await running.operator.get("/openapi.json", headers={"authorization": ""})
    assert refused.status_code == 401
    schema = (await running.operator.get("/openapi.json")).json()
    answer = schema["paths"]["/jobs"]["get"]["responses"]["200"]["content"]["application/json"]
    assert answer["schema"] == {"$ref": "#/components/schemas/JobList"}
    assert "`JobDetails`" in (await running.operator.get("/docs")).text
