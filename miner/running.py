"""Asks the daemon of a data folder, from another process."""

from __future__ import annotations

import json
from typing import Any

from core.errors import GodMinerError
from miner.settings import Settings

#: Where a running daemon tells other commands its ports.
RUN_FILE = "daemon.json"
_SECONDS = 5.0


class NoDaemon(GodMinerError):
    """No daemon answers for this data folder."""

    code = "no_daemon"


def ask(settings: Settings, path: str) -> dict[str, Any]:
    """A page of the operator's port."""
    import httpx

    base = f"http://{_host(settings)}:{_port(settings)}"
    token = settings.operator_token
    headers = {"authorization": f"Bearer {token.get_secret_value()}"} if token else {}
    try:
        # No proxy of the environment's: this is our own port, and it carries our own token.
        reply = httpx.get(f"{base}{path}", headers=headers, timeout=_SECONDS, trust_env=False)
        reply.raise_for_status()
        found: dict[str, Any] = reply.json()
    except (httpx.HTTPError, ValueError) as error:
        raise NoDaemon(f"the daemon at {base} does not answer: {error}") from None
    return found


def _port(settings: Settings) -> int:
    """As the daemon has told it: OPERATOR_PORT may be 0, or have been edited since."""
    try:
        told = json.loads((settings.data_dir / RUN_FILE).read_text(encoding="utf-8"))
        return int(told["operator_port"])
    except (OSError, ValueError, KeyError, TypeError):
        raise NoDaemon(f"no daemon runs on {settings.data_dir}; god-miner run starts one") from None


def _host(settings: Settings) -> str:
    """Where it can be reached from this machine."""
    host = settings.operator_host
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not listened on
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
