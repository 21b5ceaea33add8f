"""The operator's own port: metrics and status. Loopback by default; beyond it only with the token."""

from __future__ import annotations

import hmac
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import SecretStr

from miner.fleet.show import fleet_page

#: Names under which a browser may reach a loopback port. Any other one in the Host header means that a web
#: page resolved its own name to 127.0.0.1 to read this port through the operator's browser.
_LOOPBACK_NAMES = {"127.0.0.1", "localhost", "[::1]"}


async def operator_only(request: Request) -> None:
    _own_page(request)
    token: SecretStr | None = request.app.state.operator_token
    if token is None:
        host = request.headers.get("host", "")
        name = host if host.endswith("]") else host.rsplit(":", 1)[0]
        if name not in _LOOPBACK_NAMES:
            raise HTTPException(
                HTTPStatus.FORBIDDEN,
                f"the operator port answers to localhost, not to {name[:100]!r}; "
                "set OPERATOR_TOKEN to use another name",
            )
        return
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {token.get_secret_value()}".encode()):
        raise HTTPException(
            HTTPStatus.UNAUTHORIZED,
            "send the header 'Authorization: Bearer <OPERATOR_TOKEN>'",
            headers={"www-authenticate": "Bearer"},
        )


def _own_page(request: Request) -> None:
    """A page of another origin may not change anything here through the operator's browser, which sends it to
    loopback as readily as the operator's own."""
    if request.method in ("GET", "HEAD"):
        return
    origin, host = request.headers.get("origin"), request.headers.get("host", "")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        raise HTTPException(
            HTTPStatus.FORBIDDEN, f"pages of {origin[:100]!r} may not change anything on the operator port"
        )


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
