"""A daemon without sockets: its parts, its two applications, and a client in front of each."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
from bittensor_core import Keypair

from core.domain.tasks import TaskType
from miner.chain.fiber import Signer, sign_headers
from miner.chain.identity import Identity
from miner.daemon import Daemon
from miner.daemon_client import ensure_operator_token
from miner.dev.samples import SampleTask, sample_task
from miner.dev.stack import split_constants, with_constants
from miner.http.apps import operator_app, public_app
from miner.settings import load_settings
from tests.miner.http.stored import stored_counts, stored_rows

MINER, VALIDATOR, SECOND, STRANGER = (
    Identity(Keypair.create_from_seed(bytes([byte]) * 32)) for byte in (0x22, 0x11, 0x44, 0x33)
)
#: Three failures of one address, and none more however slow the machine is.
FEW_FAILURES = {"miner.chain.auth.FAILURE_BURST": "3", "miner.chain.auth.FAILURES_PER_SECOND": "0.00002"}
COMPACT, DEFAULT = (",", ":"), (", ", ": ")


def task(kind: TaskType = TaskType.INSTRUCT, seed: int = 0) -> SampleTask:
    return sample_task(kind, Random(seed))


@dataclass
class DaemonInProcess:
    daemon: Daemon
    public: httpx.AsyncClient
    operator: httpx.AsyncClient

    async def post(
        self,
        path: str,
        payload: Any,
        *,
        signer: Signer = VALIDATOR,
        separators: tuple[str, str] = DEFAULT,
        nonce: str | None = None,
        **headers: str,
    ) -> httpx.Response:
        """A signed request; a payload of bytes is sent as it is."""
        body = payload if isinstance(payload, bytes) else json.dumps(payload, separators=separators).encode()
        signed = sign_headers(signer, MINER.ss58_address, body, nonce)
        return await self.public.post(
            path, content=body, headers={"content-type": "application/json", **signed, **headers}
        )

    async def get(self, path: str, *, signer: Signer = VALIDATOR, **headers: str) -> httpx.Response:
        signed = sign_headers(signer, MINER.ss58_address, None)
        return await self.public.get(path, headers={**signed, **headers})

    async def offer(self, sample: SampleTask, **how: Any) -> httpx.Response:
        return await self.post(sample.offer_path, sample.offer(), **how)

    async def start(self, sample: SampleTask, **how: Any) -> httpx.Response:
        return await self.post(sample.start_path, sample.start(), **how)

    def rows(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        return stored_rows(self.daemon.store.path, sql, *values)

    def counts(self) -> dict[str, int]:
        return stored_counts(self.daemon.store.path)

    def metric(self, line: str) -> float:
        """The value on the line of the metrics page that begins so; 0 where there is none yet."""
        page = self.daemon.metrics.render().decode()
        values = [row.rpartition(" ")[2] for row in page.splitlines() if row.startswith(line + " ")]
        return float(values[0]) if values else 0.0


def write_nodes(path: Path, *nodes: tuple[Identity, float]) -> None:
    rows = [
        {"uid": uid, "hotkey": who.ss58_address, "stake": stake, "validator_permit": True}
        for uid, (who, stake) in enumerate(nodes)
    ]
    path.write_text(json.dumps(rows))


@asynccontextmanager
async def open_daemon(folder: Path, **settings: str) -> AsyncIterator[DaemonInProcess]:
    """A running daemon in `folder`, with two validators on its metagraph. A name with dots is a constant."""
    data_dir, nodes_file = folder / "data", folder / "nodes.json"
    data_dir.mkdir(exist_ok=True)
    if not nodes_file.exists():
        write_nodes(nodes_file, (VALIDATOR, 5000.0), (SECOND, 5000.0), (MINER, 0.0))
    env = {
        "DATA_DIR": str(data_dir),
        "NODES_FILE": str(nodes_file),
        "MAX_JOBS": "100",
        "BACKEND": "none",
        "GPUS": "64xH100",
        "miner.backends.build_fleet.SAMPLE_SECONDS": "0",  # it would start a process
        "POLICY": "everything-feasible",
        "PROFILE": "base",
        **settings,
    }
    env, constants = split_constants(env)
    with with_constants(constants):
        daemon = Daemon(load_settings(env=env, env_file=None), MINER.ss58_address)
        await daemon.start()
        public = httpx.ASGITransport(public_app(daemon))
        operator = httpx.ASGITransport(operator_app(daemon))
        try:
            async with (
                httpx.AsyncClient(transport=public, base_url="http://miner") as outside,
                httpx.AsyncClient(
                    transport=operator,
                    base_url="http://127.0.0.1:7998",
                    headers={
                        "authorization": f"Bearer {ensure_operator_token(daemon.settings).get_secret_value()}"
                    },
                ) as inside,
            ):
                yield DaemonInProcess(daemon, outside, inside)
        finally:
            await daemon.stop()
