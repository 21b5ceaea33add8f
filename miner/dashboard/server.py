"""The process of the page: its socket, its application, its end."""

from __future__ import annotations

import errno
import logging
import socket
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from core.domain.errors import GodMinerError
from miner.dashboard.guard import HEALTH_PATH, Guard, is_exposed
from miner.settings import Settings

log = logging.getLogger(__name__)

#: Time that a page without a connection is kept: for a browser that has just loaded it, and for a laptop that
#: slept.
RECONNECT_SECONDS = 20.0


class DashboardPortTaken(GodMinerError):
    code = "port_in_use"


def serve_dashboard(settings: Settings) -> None:
    """Serve the page until a signal ends it."""
    listening = _listen(settings.dashboard_host, settings.dashboard_port)
    app = build_app(settings)
    port = listening.getsockname()[1]
    log.info("open http://%s:%d", _shown_host(settings.dashboard_host), port)
    if is_exposed(settings.dashboard_host):
        log.warning(
            "the page is not encrypted: password and operator token travel in the open. Put a proxy with TLS "
            "before it (DASHBOARD_NAMES), or listen on 127.0.0.1 and use `ssh -L %d:127.0.0.1:%d`",
            port,
            port,
        )
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=2,
        ws_max_size=1 << 20,
    )
    uvicorn.Server(config).run(sockets=[listening])


def build_app(settings: Settings) -> Guard:
    """The page and its pollers, behind the guard."""
    from nicegui import Client, ui
    from nicegui import app as pages_app

    from miner.dashboard import layout
    from miner.dashboard.daemons import build_links
    from miner.dashboard.pages import load_pages

    links = build_links(settings)
    layout.install(links, needs_login=settings.dashboard_password is not None)
    load_pages()
    pages_app.add_static_files("/static", Path(__file__).parent / "static", max_cache_age=3600)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    @app.get(HEALTH_PATH)
    async def healthz() -> dict[str, str]:
        """Answer as long as the page's process does."""
        return {"status": "ok"}

    async def close_links() -> None:
        for link in links:
            await link.close()

    pages_app.on_shutdown(close_links)
    pages_app.timer(5.0, lambda: Client.prune_instances(client_age_threshold=RECONNECT_SECONDS))
    ui.run_with(
        app,
        title="god-miner",
        favicon=Path(__file__).parent / "static" / "icon.svg",
        dark=None,
        language="en-US",
        tailwind=False,
        reconnect_timeout=RECONNECT_SECONDS,
        message_history_length=200,
        binding_refresh_interval=None,
        show_welcome_message=False,
    )
    return Guard(app, settings.dashboard_host, settings.dashboard_names, settings.dashboard_password)


def _shown_host(host: str) -> str:
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not listened on
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        way_out = (
            "free the port, or set DASHBOARD_PORT to another one"
            if error.errno == errno.EADDRINUSE
            else "set DASHBOARD_HOST and DASHBOARD_PORT to what this machine can listen on"
        )
        raise DashboardPortTaken(
            f"{host}:{port} cannot be listened on ({error.strerror}); {way_out}"
        ) from None
    return listening
