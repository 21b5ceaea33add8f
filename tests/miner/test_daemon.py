"""The daemon's parts put together, without a socket."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from core.domain.job_states import EndReason, JobState
from miner.chain import fiber
from miner.daemon import Daemon
from miner.dev.stack import ThrowawayKeys, throwaway_keys
from miner.http.apps import public_app
from miner.jobs.manager import JobStateConflict
from miner.settings import BackendKind, load_settings
from miner.store.alerts import open_alerts
from miner.store.ranks import newest_rank
from miner.support.background import OneBlockingCall

TASK = {"task_id": "t1", "model": "a/b-1b", "hours_to_complete": 1}
OFFER = {**TASK, "task_type": "InstructTextTask"}
START = {**TASK, "dataset": "a/b", "file_format": "hf", "dataset_type": {"field_instruction": "a"}}


@pytest.fixture
def keys(tmp_path: Path) -> ThrowawayKeys:
    return throwaway_keys(tmp_path)


@pytest.fixture
async def daemon(
    keys: ThrowawayKeys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Daemon]:
    env = {
        "BACKEND": "none",
        "GPUS": "8xH100",
        "POLICY": "everything-feasible",
        "DATA_DIR": str(tmp_path / "data"),
    }
    settings = load_settings(env={**keys.settings(), **env}, env_file=None)
    monkeypatch.setattr("miner.backends.build_fleet.SAMPLE_SECONDS", 0)  # it would start a process
    made = Daemon(settings, keys.miner.ss58_address)
    await made.start()
    yield made
    await made.stop()


async def call(daemon: Daemon, keys: ThrowawayKeys, path: str, *pieces: bytes) -> list[Any]:
    """What was sent in answer to a signed POST whose body comes in pieces; b"" is the client hanging up."""
    headers = fiber.sign_headers(keys.validator, keys.miner.ss58_address, b"".join(pieces))
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("192.0.2.7", 1),
    }
    coming = [
        {"type": "http.request", "body": piece, "more_body": piece != pieces[-1]}
        if piece
        else {"type": "http.disconnect"}
        for piece in pieces
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return coming.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    await public_app(daemon)(scope, receive, send)
    return sent


async def post(daemon: Daemon, keys: ThrowawayKeys, path: str, payload: dict[str, Any]) -> Any:
    _, body = await call(daemon, keys, path, json.dumps(payload).encode())
    return json.loads(body["body"])


async def test_a_caller_that_hangs_up_leaves_no_line_in_the_log(
    daemon: Daemon, keys: ThrowawayKeys, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert await call(daemon, keys, "/task_offer/", b"abc", b"") == []
    assert caplog.records == []


async def test_a_start_that_comes_too_late_gives_its_place_back(daemon: Daemon, keys: ThrowawayKeys) -> None:
    over = {**START, "hours_to_complete": 0}
    await post(daemon, keys, "/start_training/", over)
    await daemon.offer_service.expire(daemon.started_at + 1e6)
    assert (await post(daemon, keys, "/task_offer/", OFFER))["accepted"] is True
    assert len(daemon.offer_service.reservations.holds) == len(daemon.fleet.ledger.reservations) == 1
    await post(daemon, keys, "/start_training/", over)
    await daemon.offer_service.expire(daemon.started_at + 10)
    assert len(daemon.offer_service.reservations.holds) == len(daemon.fleet.ledger.reservations) == 0


async def test_a_job_is_cancelled_without_a_backend_and_gives_its_gpus_back(
    daemon: Daemon, keys: ThrowawayKeys
) -> None:
    await post(daemon, keys, "/task_offer/", OFFER)
    await post(daemon, keys, "/start_training/", START)
    assert len(daemon.fleet.ledger.reservations) == 1
    row = await daemon.cancel_job(1)
    assert (row.state, row.end_reason) == (JobState.CANCELLED, EndReason.CANCELLED)
    assert len(daemon.offer_service.reservations.holds) == len(daemon.fleet.ledger.reservations) == 0
    with pytest.raises(JobStateConflict, match="over already"):
        await daemon.cancel_job(1)


async def test_offers_are_answered_while_the_file_system_of_the_operators_files_hangs(
    daemon: Daemon, keys: ThrowawayKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(daemon.policy_runtime, "refresh", lambda _hardware: answers.wait())
    monkeypatch.setattr(daemon, "_file_looks", OneBlockingCall("the operator's files", 0.05))
    for _ in range(2):
        await daemon.reload_files()
    assert (await post(daemon, keys, "/task_offer/", OFFER))["accepted"] is True
    await daemon.alert_service.evaluate()
    kinds = [row.rule for row in await daemon.store.read(open_alerts)]
    assert kinds.count("files_hang") == 1
    answers.set()
    while "files_hang" in [row.rule for row in await daemon.store.read(open_alerts)]:
        await daemon.reload_files()
        await daemon.alert_service.evaluate()


async def test_a_policy_that_names_no_profile_is_alerted_of_and_keeps_no_other_edit_from_its_effect(
    daemon: Daemon,
) -> None:
    file = daemon.settings.policy_dir / "everything-feasible.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text("extends: everything-feasible\nprofile: nope\n")
    daemon.settings.alerts_file.write_text("rules: {gpu-hot: {off: true}}\n")
    before = daemon.policy_runtime.profile
    for _ in range(2):
        await daemon.reload_files()
    await daemon.alert_service.evaluate()
    rows = await daemon.store.read(open_alerts)
    assert [row.rule for row in rows].count("profile_problem") == 1
    assert "nope" in str(daemon.policy_runtime.problems["profile_problem"])
    assert daemon.policy_runtime.profile is before
    assert "gpu-hot" not in daemon.alert_service.rules.current().rules
    file.write_text("extends: everything-feasible\n")
    await daemon.reload_files()
    assert daemon.policy_runtime.problems["profile_problem"] is None


async def test_an_alert_of_the_operators_files_lasts_while_their_file_system_fails_and_ends_then(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as failing:
        failing.setattr(daemon.inventory, "refresh_file", lambda: os.stat("/dev/null/file"))
        await daemon.reload_files()
    await daemon.alert_service.evaluate()
    assert "files_hang" in [row.rule for row in await daemon.store.read(open_alerts)]
    while "files_hang" in [row.rule for row in await daemon.store.read(open_alerts)]:
        await daemon.reload_files()
        await daemon.alert_service.evaluate()


async def test_a_named_pipe_in_the_place_of_the_operators_files_stops_nothing(
    daemon: Daemon, keys: ThrowawayKeys
) -> None:
    for place in ("alerts.yaml", "profiles/h100x8.yaml", "policies/everything-feasible.yaml"):
        pipe = daemon.settings.data_dir / place
        pipe.parent.mkdir(exist_ok=True)
        os.mkfifo(pipe)
    await daemon.reload_files()
    assert (await post(daemon, keys, "/task_offer/", OFFER))["accepted"] is True
    await daemon.alert_service.evaluate()
    assert "not a regular file" in str(daemon.alert_service.rules.problem)


async def test_jobs_that_cannot_be_started_are_started_later_and_no_offer_is_accepted_till_then(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Jobs:
        tries = 0

        async def start(self) -> None:
            self.tries += 1
            if self.tries < 3:
                raise OSError(28, "No space left on device")

        async def close(self) -> None: ...

    jobs = Jobs()

    async def built() -> Any:
        return jobs

    monkeypatch.setattr("miner.daemon.BACKEND_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(daemon, "_build_jobs", built)
    daemon.settings = daemon.settings.model_copy(update={"backend": (BackendKind.AUTO,)})
    await daemon._start_jobs()
    assert jobs.tries == 3
    assert "No space left" in (daemon.fleet.ability.problem or "")
    monkeypatch.setattr(daemon, "jobs", None)


async def test_the_own_place_is_kept_of_every_metagraph_that_is_read(daemon: Daemon) -> None:
    await daemon.metagraphs.refresh_once()
    found = await daemon.store.write(newest_rank)  # after all writes before it
    graph = daemon.metagraphs.current
    rank = graph.rank(daemon.authenticator.miner_key)
    assert (found.rank, found.miners) == (rank, len(graph.nodes))
