"""A hub on loopback, submissions, and a publisher between them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from core.domain.tasks import TaskType
from core.domain.wire import MinerSubmission
from miner.publish import HubPublisher, PublishTarget, publisher, worker
from miner.publish.publisher import PublishRequest, publish_environment
from tests.core.submission import folders
from tests.core.submission.folders import BASE_ID, validators_hash
from tests.doubles.hub import Hub
from tests.doubles.hub_repos import Blob
from tests.doubles.hub_upload import Unseen
from tests.doubles.own_child import answered_by

REPO = "3f0c6a52-0000-4000-8000-123456789abc"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as running:
        yield running


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Publish without children: what they are for is tried by the tests that have them."""
    for name, value in publish_environment(tmp_path / "client", deduplicate=False).items():
        if name.startswith("HF_"):
            monkeypatch.setenv(name, value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    for name in worker._FORWARDED_LOGGERS:  # a child's handlers end with it
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    monkeypatch.setattr(publisher, "run_order", answered_by(worker))


@dataclass
class Bench:
    """What a test of publishing needs at hand."""

    hub: Hub
    folder: Path
    reported: list[tuple[str, int, int | None]] = field(default_factory=list)
    noted: list[str] = field(default_factory=list)
    submission: Path = Path()

    def __post_init__(self) -> None:
        self.base = folders.base(self.folder / "base")
        self.submission = folders.adapter(self.folder / "submission")

    def publisher(self, **more: Any) -> HubPublisher:
        about: dict[str, Any] = {
            "hub": "huggingface",
            "endpoint": self.hub.url,
            "token": SecretStr(self.hub.token),
            "user": "tester",
            "folder": self.folder / "state",
        }
        about |= {name: more.pop(name) for name in list(more) if name in about}
        return HubPublisher(
            PublishTarget(**about), first_pause=0.01, on_note=lambda _, text: self.noted.append(text), **more
        )

    def outgoing(self, **changes: Any) -> PublishRequest:
        about: dict[str, Any] = {
            "job_id": 1,
            "task_type": TaskType.INSTRUCT,
            "model": BASE_ID,
            "model_path": self.base,
            "folder": self.submission,
            "repo_name": REPO,
            "finish_by": time.time() + 600,
        }
        return PublishRequest(**about | changes)

    async def publish(self, publisher: HubPublisher | None = None, **changes: Any) -> MinerSubmission:
        publisher = publisher or self.publisher()
        return await publisher.publish(self.outgoing(**changes), lambda *what: self.reported.append(what))

    def there(self, name: str = REPO, owner: str = "tester") -> dict[str, Blob]:
        files = dict(self.hub.repo(f"{owner}/{name}").head.files)
        files.pop(".gitattributes")
        return files

    def hash_of(self, name: str = REPO, owner: str = "tester") -> str | None:
        """Taken as a validator does: of a snapshot of what the hub holds."""
        folder = self.folder / f"snapshot-{time.monotonic_ns()}"
        for path, blob in self.hub.repo(f"{owner}/{name}").head.files.items():
            assert not isinstance(blob, Unseen)
            assert isinstance(blob.content, bytes)
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(blob.content)
        return validators_hash(folder)


@pytest.fixture
def bench(hub: Hub, tmp_path: Path) -> Bench:
    return Bench(hub, tmp_path)


def workers(parent: int | None = None) -> list[int]:
    """The publishing processes of this process that are running."""
    pids = []
    for thread in Path(f"/proc/{parent or os.getpid()}/task").iterdir():
        with suppress(OSError):  # the thread, or what it started, has ended
            for pid in (thread / "children").read_text().split():
                with suppress(OSError):
                    if b"miner.publish.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        pids.append(int(pid))
    return pids


def until(happened: Callable[[], object], seconds: float = 300.0) -> bool:
    """Wait for something that other threads or processes do."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if happened():
            return True
        time.sleep(0.01)
    return False
