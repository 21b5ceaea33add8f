"""The operator's port with jobs, without a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from fastapi import FastAPI
from pydantic import SecretStr

from miner.fleet.fleet_file import Prices
from miner.http import errors, jobs
from miner.support.rate_limits import RateLimit, TokenBuckets
from tests.miner.jobs.harness import JobsHarness, open_harness

TOKEN = "operator-token-0123456789"


@dataclass
class Port:
    harness: JobsHarness
    client: httpx.AsyncClient
    app: FastAPI

    async def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        return await self.client.request(method, path, **more)


@asynccontextmanager
async def open_port(folder: Path) -> AsyncIterator[Port]:
    async with open_harness(folder) as harness:
        app = FastAPI()
        errors.install_error_handlers(app)
        app.include_router(jobs.router)
        app.state.operator_token = SecretStr(TOKEN)
        app.state.operator_failures = TokenBuckets(RateLimit(1, 100))
        app.state.daemon = SimpleNamespace(
            running_jobs=harness.jobs,
            live=harness.jobs.live,
            figures=harness.jobs.figures,
            cancel_job=harness.jobs.cancel,
            prices=Prices,
            store=harness.store,
            settings=SimpleNamespace(data_dir=harness.services.data_dir),
        )
        transport = httpx.ASGITransport(app)
        headers = {"authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", headers=headers
        ) as client:
            yield Port(harness, client, app)
