"""`god-miner dashboard`: the operator's page."""

from __future__ import annotations

from miner.cli.options import load_settings


def dashboard() -> None:
    """Serve the operator's page until a signal ends it: on http://127.0.0.1:7997, for the daemon of this
    machine or those of DASHBOARD_DAEMONS. It is a process of its own and needs no daemon to start."""
    from miner.observe import logs

    settings = load_settings()
    logs.configure(settings)
    from miner.dashboard.server import serve_dashboard

    serve_dashboard(settings)
