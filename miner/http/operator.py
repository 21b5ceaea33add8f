"""The guard of the operator's port, and the daemon as its routes see it."""

from __future__ import annotations

import hmac
import math
from collections.abc import Iterable
from http import HTTPStatus
from typing import Annotated, Protocol

from fastapi import Depends, HTTPException, Request
from pydantic import SecretStr

from miner.alerts.service import AlertService
from miner.api.jobs import LiveJob
from miner.chain.auth import Authenticator
from miner.chain.metagraph_refresh import MetagraphRefresher
from miner.chain.nonces import NonceLedger
from miner.fleet.fleet import Fleet
from miner.fleet.fleet_file import Prices
from miner.fleet.inventory import GpuInventory
from miner.fleet.sampler import GpuSampler, SampleHistory
from miner.http.prometheus import DaemonCollector
from miner.jobs.figures import RunFigures
from miner.jobs.manager import JobManager
from miner.notify.notifier import Notifier
from miner.observe.metrics import Metrics
from miner.offers.policy_runtime import PolicyRuntime
from miner.offers.service import OfferService
from miner.publish.reachable import HubReachability
from miner.reports.current import CurrentFigures
from miner.settings import Settings
from miner.settings.values import is_loopback
from miner.store.jobs import JobRow
from miner.store.store import Store
from miner.support.addresses import client_network
from miner.support.clock import SteadyClock
from miner.support.rate_limits import TokenBuckets


def shows_token(headers: Iterable[tuple[bytes, bytes]], token: SecretStr) -> bool:
    wanted = f"Bearer {token.get_secret_value()}".encode()
    return any(name == b"authorization" and hmac.compare_digest(value, wanted) for name, value in headers)


async def operator_only(request: Request) -> None:
    """Let in whoever has the token. Without one, every user of this machine, and every web page that the
    operator opens on it, could start and cancel jobs."""
    token: SecretStr = request.app.state.operator_token
    failures: TokenBuckets = request.app.state.operator_failures
    caller = caller_address(request)
    network = client_network(caller)
    is_right = shows_token(request.headers.raw, token)
    too_many = failures.is_empty(network)
    # Another user of this machine has the operator's address, and must not shut the operator out.
    if is_right and (not too_many or is_loopback(caller) or is_loopback(network)):
        return
    if too_many:
        wait = math.ceil(failures.seconds_until_next(network))
        raise HTTPException(
            HTTPStatus.TOO_MANY_REQUESTS,
            "too many wrong tokens from this address",
            headers={"retry-after": str(wait)},
        )
    failures.take(network)
    raise HTTPException(
        HTTPStatus.UNAUTHORIZED,
        "send the header 'Authorization: Bearer …' with OPERATOR_TOKEN, "
        "or with what the file operator-token in DATA_DIR holds",
        headers={"www-authenticate": "Bearer"},
    )


def caller_address(request: Request) -> str:
    return request.client.host if request.client else ""


#: The largest number of a row in the store.
MAX_ROW = 2**63 - 1


class OperatorDaemon(Protocol):
    """The parts of the daemon that the operator's routes read and change."""

    settings: Settings
    hotkey: str
    started_at: float
    clock: SteadyClock
    store: Store
    metrics: Metrics
    collector: DaemonCollector
    fleet: Fleet
    inventory: GpuInventory
    samples: SampleHistory
    sampler: GpuSampler
    metagraphs: MetagraphRefresher
    authenticator: Authenticator
    nonces: NonceLedger
    policy_runtime: PolicyRuntime
    offer_service: OfferService
    current: CurrentFigures
    alert_service: AlertService
    notifier: Notifier
    hub: HubReachability
    jobs: JobManager | None

    @property
    def running_jobs(self) -> JobManager: ...

    def prices(self) -> Prices: ...

    def live(self, job_id: int) -> LiveJob | None: ...

    def figures(self, job_id: int) -> RunFigures | None: ...

    async def cancel_job(self, job_id: int) -> JobRow: ...

    async def reload_files(self) -> None: ...


def operator_daemon(request: Request) -> OperatorDaemon:
    daemon: OperatorDaemon = request.app.state.daemon
    return daemon


Daemon = Annotated[OperatorDaemon, Depends(operator_daemon)]
