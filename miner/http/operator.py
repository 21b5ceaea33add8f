"""The operator's port: its token, metrics and fleet. It listens on loopback by default."""

from __future__ import annotations

import hmac
import math
from collections.abc import Iterable
from http import HTTPStatus
from typing import Protocol

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import SecretStr

from miner.api.fleet import FleetStatus
from miner.fleet.fleet import Fleet
from miner.fleet.fleet_view import fleet_view
from miner.fleet.inventory import GpuInventory
from miner.fleet.samples import SampleHistory
from miner.settings.values import is_loopback
from miner.store.offers import task_names
from miner.store.store import Store
from miner.support.addresses import client_network
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


def build_operator_router() -> APIRouter:
    router = APIRouter(dependencies=[Depends(operator_only)])

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Prometheus."""
        await request.app.state.daemon.collector.refresh()
        return Response(request.app.state.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/fleet")
    async def fleet(request: Request, short: bool = False) -> FleetStatus:
        """Show the GPUs, who has them until when, what they measure, and what waits. With `short`, leave out
        a cluster's GPUs without a task of ours."""
        return await fleet_status(request.app.state.daemon, is_short=short)

    return router


class MeasuredFleet(Protocol):
    """The parts of the daemon that its fleet's page shows."""

    fleet: Fleet
    inventory: GpuInventory
    samples: SampleHistory
    store: Store

    def clock(self) -> float: ...


async def fleet_status(daemon: MeasuredFleet, *, is_short: bool = False) -> FleetStatus:
    claimed = [claim.key for claim in daemon.fleet.ledger.claims]
    names = await daemon.store.read(task_names, claimed) if claimed else {}
    now = daemon.clock()
    return fleet_view(daemon.fleet, daemon.inventory, daemon.samples, names, now, is_short=is_short)
