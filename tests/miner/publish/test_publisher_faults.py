"""Every way in which publishing goes wrong, with the real client: what is tried again, resumed, reported."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from core.domain.job_states import EndReason, StepFailed
from core.domain.wire import MinerSubmission
from miner.publish import publisher as module
from tests.core.submission import folders
from tests.core.submission.folders import bf16, safetensors, write
from tests.doubles.flaky import Reply, Request
from tests.doubles.hub import Hub
from tests.doubles.hub_repos import Blob, Commit
from tests.miner.publish.conftest import REPO, Bench, until, workers

#: The client's own use of its own client.
pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")]


PART = 100_000


def large(bench: Bench, files: int = 1) -> Path:
    """A submission whose weights are sent in ten parts each."""
    bench.hub.part_size = PART
    width = PART * 10 // 2 // 100 - 60
    if files == 1:
        weights = {"a.lora_A.weight": bf16(width, 100)}
        return write(bench.submission, {"adapter_model.safetensors": safetensors(weights)})
    folder, where, content = bench.folder / "full", {}, {}
    for number in range(1, files + 1):
        name = f"model-{number:05}-of-{files:05}.safetensors"
        content[name] = safetensors({f"model.{number}.weight": bf16(width, 100, seed=number)})
        where[f"model.{number}.weight"] = name
    index = {"weight_map": where}
    return write(
        folder, {"config.json": folders.SAVED_CONFIG, "model.safetensors.index.json": index, **content}
    )


async def failed(bench: Bench, publisher: module.HubPublisher | None = None, **changes: object) -> StepFailed:
    with pytest.raises(StepFailed) as caught:
        await bench.publish(publisher, **changes)
    return caught.value


async def test_a_connection_cut_in_the_last_part_costs_that_part_and_nothing_else(bench: Bench) -> None:
    folder = large(bench)
    bench.hub.fail("PUT /upload/[0-9a-f]+/10", cut_request_after=PART // 2)
    made = await bench.publish(bench.publisher(tries=1), folder=folder)
    assert made.model_hash == bench.hash_of()
    size = (folder / "adapter_model.safetensors").stat().st_size
    assert size < bench.hub.bytes_taken("PUT /upload") <= size + PART


async def test_killed_at_99_percent_the_files_that_arrived_are_not_sent_again(bench: Bench) -> None:
    folder = large(bench, files=4)
    bench.hub.fail("PUT /upload/[0-9a-f]+/10", skip=3, request_rate=10_000)
    publishing = asyncio.create_task(bench.publish(folder=folder))

    def nearly_done() -> bool:
        """Three files have arrived, and of the fourth, which is sent beside them, all but the last part."""
        three = len(bench.hub.lines("POST /complete")) == 3
        return three and bench.hub.bytes_taken("PUT /upload") > 3.85 * 10 * PART

    assert await asyncio.to_thread(until, nearly_done)
    (pid,) = workers()
    os.kill(pid, signal.SIGKILL)
    first = bench.hub.bytes_taken("PUT /upload")
    made = await publishing
    assert made.model_hash == bench.hash_of()
    assert first > 3.8 * 10 * PART
    assert bench.hub.bytes_taken("PUT /upload") - first < 1.2 * 10 * PART


@pytest.mark.thorough
async def test_killed_at_the_end_a_deduplicated_file_goes_on_in_its_middle(
    bench: Bench, tmp_path: Path
) -> None:
    bench.hub.deduplicated = tmp_path / "store"
    size = 200_000_000
    write(
        bench.submission, {"adapter_model.safetensors": safetensors({"a": ("I8", [size], os.urandom(size))})}
    )
    publishing = asyncio.create_task(bench.publish())
    # Pieces of 64 MB are stored; what the client knows of them it writes down every second.
    assert await asyncio.to_thread(until, lambda: _stored(tmp_path) > 0.9 * size)
    (pid,) = workers()
    os.kill(pid, signal.SIGKILL)
    made = await publishing
    assert made.model_hash is not None
    assert bench.hub.lines("PUT /upload") == []
    (note,) = [text for text in bench.noted if text.startswith("published")]
    assert int(note.split("bytes, ")[1].split(" ")[0].replace(",", "")) < 0.75 * size


def _stored(folder: Path) -> int:
    size = 0
    for path in (folder / "store").rglob("*"):
        with suppress(OSError):  # renamed meanwhile
            size += path.stat().st_size if path.is_file() else 0
    return size


async def test_a_store_that_fails_again_and_again_is_gone_around(bench: Bench, tmp_path: Path) -> None:
    bench.hub.deduplicated = tmp_path / "no" / "such" / "\0store"
    made = await bench.publish()
    assert made.model_hash == bench.hash_of()
    assert bench.hub.lines("PUT /upload")


@pytest.mark.usefixtures("here")
@pytest.mark.kept("POST /api/repos/create-500")
@pytest.mark.parametrize(
    ("where", "status"),
    [("POST /api/repos/create", 500), ("GET /api/models/.*/tree", 503), ("POST .*/commit", 502)],
)
async def test_a_hub_in_trouble_is_asked_again(bench: Bench, where: str, status: int) -> None:
    bench.hub.fail(where, status=status)
    assert (await bench.publish()).model_hash == bench.hash_of()


READER = {"tester": {"role": "read"}}
WRONG = "hf_" + "w" * 34


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("fault", "roles", "more", "reason", "text", "creations"),
    [
        ({"status": 500}, {}, {"tries": 3}, EndReason.NETWORK, "answers 500", 3),
        ({"status": 429}, {}, {"tries": 2}, EndReason.RATE_LIMITED, "answers 429", 2),
        ({}, {}, {"tries": 2, "endpoint": "http://127.0.0.1:9"}, EndReason.NETWORK, "cannot be reached", 0),
        ({}, {}, {"token": None}, EndReason.HUB_REFUSED, "HF_TOKEN is not set", 0),
        ({}, {}, {"token": SecretStr(WRONG), "user": None}, EndReason.HUB_REFUSED, "HF_TOKEN", 0),
        ({}, READER, {}, EndReason.HUB_REFUSED, "may not write there", 1),
    ],
    ids=["server", "rate limit", "away", "no token", "wrong token", "may only read"],
)
async def test_trouble_that_stays_is_left_for_later_or_refused_at_once(
    bench: Bench,
    fault: dict[str, Any],
    roles: dict[str, Any],
    more: dict[str, Any],
    reason: EndReason,
    text: str,
    creations: int,
) -> None:
    bench.hub.roles |= roles
    if fault:
        bench.hub.fail("POST /api/repos/create", times=None, headers={"Retry-After": "0"}, **fault)
    error = await failed(bench, bench.publisher(**more))
    assert error.reason is reason
    assert text in str(error)
    assert WRONG not in str(error)
    assert error.retry_after == (0 if fault else None)
    assert len(bench.hub.lines("POST /api/repos/create")) == creations
    assert len(bench.hub.requests) <= 1 or creations


@pytest.mark.usefixtures("here")
async def test_a_commit_whose_reply_got_lost_is_found_and_not_made_twice(bench: Bench) -> None:
    bench.hub.fail("POST .*/commit", no_reply=True)
    made = await bench.publish()
    assert made.model_hash == bench.hash_of()
    assert len(bench.hub.repo(made.repo).commits) == 2


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("status", "retry_after", "finish_by", "pause"),
    [(429, "7", 100.0, 7.0), (503, "3600", 100.0, 50.0), (503, "3600", None, module.MAX_REQUESTED_PAUSE)],
    ids=["as requested", "half of the time that is left", "the most"],
)
async def test_the_pause_that_a_hub_requests_is_kept_within_limits(
    bench: Bench, status: int, retry_after: str, finish_by: float | None, pause: float
) -> None:
    waited: list[float] = []

    async def wait(seconds: float) -> None:
        waited.append(seconds)

    bench.hub.fail("POST /api/repos/create", status=status, headers={"Retry-After": retry_after})
    await bench.publish(bench.publisher(pause=wait, clock=lambda: 0.0), finish_by=finish_by)
    assert waited == [pause]


async def test_a_rate_limit_in_the_middle_of_an_upload_is_shown_while_it_is_waited_for(bench: Bench) -> None:
    bench.hub.fail("PUT /upload", status=429, headers={"Retry-After": "0"})
    await bench.publish()
    assert any("Rate limited. Waiting" in text for text in bench.noted)


@pytest.mark.usefixtures("here")
async def test_somebody_who_writes_at_the_same_time_is_seen_and_overruled(bench: Bench) -> None:
    bench.hub.fail("POST .*/commit", status=412, body=b'{"error": "A commit has happened since."}')
    assert (await bench.publish()).model_hash == bench.hash_of()
    assert len(bench.hub.lines("POST .*/commit")) == 2


class DamagingHub(Hub):
    """Keeps something else than what it was sent."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def answer(self, request: Request) -> Reply:
        reply = super().answer(request)
        if request.line.endswith("/commit/main") and reply.status == 200 and self.times:
            self.times -= 1
            repo = self.repo(request.path.split("/models/")[1].removesuffix("/commit/main"))
            head, name = repo.head, "adapter_model.safetensors"
            files = {**head.files, name: Blob(b"x" * head.files[name].size, large=True)}
            repo.commits[-1] = Commit(head.sha, head.title, head.at, files)
        return reply


@pytest.mark.usefixtures("here")
async def test_damage_on_the_hubs_side_is_repaired_or_reported_with_the_file(tmp_path: Path) -> None:
    with DamagingHub(times=1) as hub:
        bench = Bench(hub, tmp_path)
        assert (await bench.publish()).model_hash == bench.hash_of()
        assert len(hub.lines("POST .*/commit")) == 2
        hub.times = 99
        error = await failed(bench, bench.publisher(tries=2), repo_name="damaged")
        assert error.reason is EndReason.NETWORK
        assert "differs from what was sent: adapter_model.safetensors" in str(error)


@pytest.mark.usefixtures("here")
async def test_a_repository_that_strangers_cannot_see_is_no_success(bench: Bench) -> None:
    bench.hub.fail(f"GET /api/models/tester/{REPO}$", skip=2, times=None, status=401)
    error = await failed(bench, bench.publisher(tries=1))
    assert "is not visible without a token" in str(error)


async def test_an_upload_that_will_be_late_is_reported(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miner.publish.publisher.MIN_MEASURED_SECONDS", 0.3)
    bench.hub.fail("PUT /upload", request_rate=PART, times=None)

    def clock() -> float:
        """Once the upload has begun there are seconds left of the minutes."""
        return time.time() + (595 if any(what == "upload" for what, _, _ in bench.reported) else 0)

    publishing = asyncio.create_task(
        bench.publish(bench.publisher(clock=clock), folder=large(bench), finish_by=time.time() + 600)
    )
    late = "will not be done in time"
    assert await asyncio.to_thread(until, lambda: any(late in text for text in bench.noted))
    await cancelled(publishing)


async def test_an_upload_is_ended_at_its_time(bench: Bench) -> None:
    bench.hub.fail("PUT /upload", request_rate=PART / 100, times=None)
    error = await failed(bench, folder=large(bench), finish_by=time.time() + 3)
    assert error.reason is EndReason.DEADLINE
    assert workers() == []


async def cancelled(publishing: asyncio.Task[MinerSubmission]) -> None:
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    assert workers() == []


async def test_a_time_that_is_over_is_not_begun_with(bench: Bench) -> None:
    assert (await failed(bench, finish_by=time.time() - 1)).reason is EndReason.DEADLINE
    assert bench.hub.requests == []


async def test_an_upload_can_be_cancelled_at_any_moment(bench: Bench) -> None:
    folder = large(bench)
    bench.hub.fail("PUT /upload", request_rate=50_000, times=None)
    publishing = asyncio.create_task(bench.publish(folder=folder))
    assert await asyncio.to_thread(until, lambda: bench.hub.bytes_taken("PUT /upload") > 1000)
    await cancelled(publishing)
    assert not bench.hub.lines("POST /complete"), "it was ended, and not waited for"


async def test_a_process_that_falls_silent_is_ended_and_tried_again(bench: Bench) -> None:
    """As when the client waits for a hub without end."""
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    deaf = (sys.executable, "-S", "-c", "import time; time.sleep(600)")
    error = await failed(bench, bench.publisher(worker=deaf, silence=0.3, tries=3, pause=pause))
    assert error.reason is EndReason.NETWORK
    assert "silent for 0.3 s" in str(error)
    assert len(pauses) == 2
    assert workers() == []


async def test_the_token_is_in_no_argument_environment_or_file(bench: Bench) -> None:
    folder = large(bench)
    bench.hub.fail("PUT /upload", request_rate=200_000, times=None)
    publishing = asyncio.create_task(bench.publish(folder=folder))
    assert await asyncio.to_thread(until, lambda: bench.hub.bytes_taken("PUT /upload") > 1000)
    (pid,) = workers()
    token = bench.hub.token.encode()
    for name in ("cmdline", "environ"):
        assert token not in Path(f"/proc/{pid}/{name}").read_bytes()
    await publishing
    files = [path for path in (bench.folder / "state").rglob("*") if path.is_file()]
    assert all(token not in path.read_bytes() for path in files)


_DAEMON = """
import asyncio, sys, time
from pathlib import Path
from pydantic import SecretStr
from core.domain.tasks import TaskType
from miner.publish import HubPublisher, PublishTarget
from miner.publish.publisher import PublishRequest
url, token, folder, base, state = sys.argv[1:]
to = PublishTarget("huggingface", url, SecretStr(token), "tester", Path(state))
out = PublishRequest(1, TaskType.INSTRUCT, "tester/Base-1B", Path(base), Path(folder), "name")
asyncio.run(HubPublisher(to).publish(out, lambda *_: None))
"""


def test_when_the_daemon_is_killed_its_upload_ends_and_the_next_one_goes_on(bench: Bench) -> None:
    folder = large(bench, files=2)
    slow = bench.hub.fail("PUT /upload/[0-9a-f]+/10", skip=1, request_rate=10_000, times=None)
    command = [sys.executable, "-c", _DAEMON, bench.hub.url, bench.hub.token]
    command += [str(folder), str(bench.base), str(bench.folder / "state")]
    with subprocess.Popen(command) as daemon:
        assert until(lambda: bench.hub.lines("POST /complete"))
        (worker,) = workers(daemon.pid)
        daemon.kill()
    assert until(lambda: not Path(f"/proc/{worker}").exists())
    slow.times = 0
    before = bench.hub.bytes_taken("PUT /upload")
    made = asyncio.run(bench.publish(folder=folder, repo_name="name"))
    assert made == MinerSubmission(repo="tester/name", model_hash=bench.hash_of("name"))
    assert bench.hub.bytes_taken("PUT /upload") - before < 1.2 * 10 * PART
