"""The operator's own port: metrics and status, for whoever has the token. Loopback by default."""

from __future__ import annotations

import hmac
import math
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import SecretStr

from miner.fleet.show import fleet_page
from miner.limits import Buckets, network_of
from miner.settings.values import is_loopback


async def operator_only(request: Request) -> None:
    """Let in who has the token. Without one every user of this machine, and every web page that the operator
    opens on it, could start and cancel jobs."""
    token: SecretStr = request.app.state.operator_token
    failures: Buckets = request.app.state.operator_failures
    caller = caller_of(request)
    network = network_of(caller)
    given = request.headers.get("authorization", "")
    right = hmac.compare_digest(given.encode(), f"Bearer {token.get_secret_value()}".encode())
    too_many = failures.is_empty(network)
    # Another user of this machine has the operator's address, and must not shut the operator out.
    if right and (not too_many or is_loopback(caller) or is_loopback(network)):
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


def caller_of(request: Request) -> str:
    """The address that the request came from."""
    return request.client.host if request.client else ""


def build_router() -> APIRouter:
    router = APIRouter(dependencies=[Depends(operator_only)])

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Prometheus."""
        return Response(request.app.state.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/status")
    async def status(request: Request) -> dict[str, Any]:
        """What the daemon knows of itself."""
        return await request.app.state.daemon.status()  # type: ignore[no-any-return]

    @router.get("/fleet")
    async def fleet(request: Request) -> dict[str, Any]:
        """The cards, who has them until when, and who waits."""
        daemon = request.app.state.daemon
        return fleet_page(daemon.fleet, daemon.inventory, daemon.clock())

    return router
