"""What the network does to a job, at its dataset and at its hub: cut, slow, 500, 429, truncated, too long."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from core.domain.job_states import EndReason, JobState
from tests.doubles import hub_upload
from tests.doubles.hub import Hub
from tests.integration.jobs.field import Field, Files, process_field

assert hub_upload  # brings the routes that write
DO = {"*": {"steps": 4}}


@pytest.mark.kept("cut")
@pytest.mark.parametrize(
    "fault",
    [
        {"status": 500, "times": 2},
        {"cut_after": 1000, "times": 2},
        {"declared_length": 50_000_000, "cut_after": 3000, "how": "close"},
        {"rate": 20_000.0},
    ],
    ids=["500", "cut", "wrong length", "slow"],
)
async def test_a_dataset_behind_a_bad_network_arrives_whole(
    whole: Field, files: Files, fault: dict[str, Any]
) -> None:
    files.fail("/t1", **fault)
    job = await whole.start("t1", DO)
    await whole.published(job)
    assert await whole.ends(job) == [EndReason.TRAINED]


async def test_a_dataset_that_is_gone_ends_the_job_at_once(whole: Field, files: Files) -> None:
    files.fail("/t1", status=403, times=None)
    job = await whole.start("t1", DO)
    row = await whole.over(job)
    assert (row.state, row.end_reason) == (JobState.FAILED, EndReason.DATA_GONE)
    assert await whole.attempts(job) == []


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        yield hub


@pytest_asyncio.fixture
async def online(tmp_path: Path, files: Files, hub: Hub) -> AsyncIterator[Field]:
    """Published to what speaks like the hub."""
    settings = {"hub": "huggingface", "hf_endpoint": hub.url, "hf_token": hub.token}
    async with process_field(tmp_path / "data", files, **settings) as field:
        yield field


@pytest.mark.kept("no reply")
@pytest.mark.parametrize(
    "fault",
    [
        {"match": "POST /api/models/tester/repo-t1/commit", "no_reply": True},
        {"match": "POST /api/repos/create", "status": 429, "headers": {"Retry-After": "0"}},
        {"match": "PUT /", "cut_request_after": 600},
    ],
    ids=["no reply", "429", "upload cut"],
)
async def test_a_hub_behind_a_bad_network_gets_the_model_once(
    online: Field, hub: Hub, fault: dict[str, Any]
) -> None:
    hub.fail(**{"times": 1, **fault})
    job = await online.start("t1", DO)
    row = await online.published(job)
    assert row.submission is not None
    assert row.submission.repo == "tester/repo-t1"
    assert row.submission.model_hash
    trained = online.attempt_file(job, 1, "submission/adapter_model.safetensors").read_bytes()
    uploaded = hub.repo("tester/repo-t1").head.files["adapter_model.safetensors"]
    assert uploaded.sha256 == sha256(trained).hexdigest()


async def test_neither_token_nor_signed_address_is_left_in_any_file(
    online: Field, caplog: pytest.LogCaptureFixture
) -> None:
    signature = "X-Amz-Signature=0123456789abcdef0123456789abcdef"
    token = online.settings.hf_token
    assert token is not None
    job = await online.start("t1", {"*": {"steps": 4, "tell": True}}, query=f"?{signature}")
    await online.published(job)
    log = (online.data_dir / f"jobs/{job}/latest/log").read_text()
    assert "PATH=" in log, "the trainer has printed its whole environment"
    secrets = (token.get_secret_value().encode(), signature.encode())
    for path in online.data_dir.rglob("*"):
        # The store keeps requests as received, and says so; nobody but the daemon reads them.
        if path.is_file() and not path.name.startswith("god-miner.sqlite3"):
            content = b""
            with suppress(FileNotFoundError):  # removed at this moment
                content = path.read_bytes()
            assert not any(secret in content for secret in secrets), path
    assert not any(secret.decode() in caplog.text for secret in secrets)


async def test_a_hub_that_refuses_the_token_is_asked_again_until_the_deadline(
    online: Field, hub: Hub
) -> None:
    hub.tokens.clear()
    job = await online.start("t1", DO)
    await online.until(job, lambda live: "HF_TOKEN" in live.trouble)
    # Now that it is asking, a second start moves the deadline near.
    assert await online.start("t1", DO, seconds=5) == job
    row = await online.over(job)
    assert (row.state, row.end_reason) == (JobState.FAILED, EndReason.DEADLINE)
    assert "HF_TOKEN" in row.detail
