"""A real daemon in a process of its own, and what a test wants to know about it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from core.domain.tasks import TaskType
from miner.chain.fiber import sign_headers
from miner.dev.samples import SampleTask, sample_task
from miner.dev.stack import ChildProcess, DevStack, daemon_process, prepare_stack
from miner.store.database import FILE_NAME
from tests.doubles.http_bytes import Reply, request
from tests.miner.http.raw_connection import RawConnection
from tests.miner.http.stored import stored_counts, stored_rows

MANY_FAILURES = {"miner.chain.auth.FAILURES_PER_SECOND": "1e9", "miner.chain.auth.FAILURE_BURST": "1e9"}
#: Time enough for a busy machine, and no limit on how much one address may get wrong: all tests come from the
#: same one.
PATIENT = {
    **MANY_FAILURES,
    "miner.server.HEADER_SECONDS": "300",
    "miner.server.BODY_SECONDS": "300",
    "miner.http.apps.MAX_CONCURRENT_REQUESTS": "8",
    "MAX_CONNECTIONS": "40",
    "MAX_JOBS": "10000",
}
HASTY = {**PATIENT, "miner.server.HEADER_SECONDS": "2.0", "miner.server.BODY_SECONDS": "2.0"}


@dataclass
class DaemonProcess:
    stack: DevStack
    child: ChildProcess

    @property
    def port(self) -> int:
        return self.stack.public_port

    def connect(self) -> RawConnection:
        return RawConnection(self.port)

    def headers(self, body: bytes | None, nonce: str | None = None) -> dict[str, str]:
        keys = self.stack.keys
        return sign_headers(keys.validator, keys.miner.ss58_address, body, nonce)

    def post(self, path: str, body: bytes, **more: str) -> bytes:
        """A signed request, as bytes."""
        return request(path, {**self.headers(body), **more}, body, method="POST")

    def get(self, path: str) -> bytes:
        return request(path, self.headers(None))

    def offer(self, seed: int | str) -> tuple[SampleTask, bytes]:
        task = sample_task(TaskType.INSTRUCT, Random(seed))
        return task, self.post(task.offer_path, json.dumps(task.offer()).encode())

    def ask(self, *parts: bytes | str) -> Reply:
        """One request on a connection of its own."""
        with self.connect() as raw:
            return raw.send(*parts).reply()

    def is_alive(self) -> bool:
        """The same process, and it answers."""
        assert self.child.process is not None
        return self.child.process.poll() is None and self.ask(request("/healthz")).status == 200

    def rows(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        return stored_rows(self.stack.data_dir / FILE_NAME, sql, *values)

    def counts(self) -> dict[str, int]:
        return stored_counts(self.stack.data_dir / FILE_NAME)

    def memory_mb(self) -> float:
        text = Path(f"/proc/{self.child.pid}/status").read_text()
        return int(text.partition("VmRSS:")[2].split()[0]) / 1024

    def logged(self, *levels: str) -> list[dict[str, Any]]:
        """Without what depends on this host: whether there is a backend."""
        lines = map(json.loads, self.stack.log_file.read_text().splitlines())
        return [line for line in lines if line["level"] in levels and "no_backend" not in line["msg"]]


@contextmanager
def run_daemon_process(folder: Path, settings: Mapping[str, str]) -> Iterator[DaemonProcess]:
    stack = prepare_stack(folder)
    with daemon_process(stack, settings) as child:
        yield DaemonProcess(stack, child)
