"""Asks the daemon of a data folder, from another process."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from core.errors import GodMinerError
from core.files import write_atomically
from miner.settings import Settings

if TYPE_CHECKING:
    import httpx

#: Where a running daemon tells other commands its ports.
RUN_FILE = "daemon.json"
#: The token that the daemon made for itself, where OPERATOR_TOKEN is not set.
TOKEN_FILE = "operator-token"  # noqa: S105 - the name of a file
_SECONDS = 5.0
#: An operator's port that says nothing for this long, heartbeats included, is gone.
_SILENCE_SECONDS = 60.0


class NoDaemon(GodMinerError):
    """No daemon answers for this data folder."""

    code = "no_daemon"


class Refused(GodMinerError):
    """The daemon answered, and will not do it."""

    code = "refused_by_daemon"


def made_token(settings: Settings) -> SecretStr:
    """Return OPERATOR_TOKEN, or the token of the data folder, which the first start makes: whoever can read
    it is the operator. `OSError`."""
    if settings.operator_token is not None:
        return settings.operator_token
    path = settings.data_dir / TOKEN_FILE
    if not (token := kept_token(settings.data_dir)):
        token = secrets.token_hex(24)
        write_atomically(path, token.encode() + b"\n")
    return SecretStr(token)


def kept_token(data_dir: Path) -> str:
    """The data folder's token; empty where there is none that this user may read."""
    try:
        return (data_dir / TOKEN_FILE).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def ask(settings: Settings, path: str) -> dict[str, Any]:
    """A page of the operator's port."""
    return _answer(settings, "GET", path)


def tell(settings: Settings, path: str, payload: Any = None) -> dict[str, Any]:
    """Have the daemon do something. `Refused` with its own words when it will not."""
    return _answer(settings, "POST", path, payload)


@contextmanager
def follow(settings: Settings, path: str) -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
    """The server-sent events of a page, as (kind, data), for as long as the daemon sends some."""
    import httpx

    with _client(settings, _SILENCE_SECONDS) as client:
        try:
            with client.stream("GET", path) as reply:
                _checked(reply)
                yield _events(reply)
        except httpx.HTTPError as error:
            raise NoDaemon(f"the daemon at {client.base_url} does not answer any more: {error}") from None


def _events(reply: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    kind = ""
    for line in reply.iter_lines():
        name, _, value = line.partition(":")
        if name == "event":
            kind = value.strip()
        elif name == "data":
            yield kind, json.loads(value)


def _answer(settings: Settings, method: str, path: str, payload: Any = None) -> dict[str, Any]:
    import httpx

    with _client(settings, _SECONDS) as client:
        try:
            reply = _checked(client.request(method, path, json=payload))
            found: dict[str, Any] = reply.json()
        except (httpx.HTTPError, ValueError) as error:
            raise NoDaemon(f"the daemon at {client.base_url} does not answer: {error}") from None
    return found


def _client(settings: Settings, seconds: float) -> httpx.Client:
    import httpx

    base = f"http://{_host(settings)}:{_port(settings)}"
    own = settings.operator_token
    token = own.get_secret_value() if own else kept_token(settings.data_dir)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    # No proxy of the environment's: this is our own port, and it carries our own token.
    return httpx.Client(base_url=base, headers=headers, timeout=seconds, trust_env=False)


def _checked(reply: httpx.Response) -> httpx.Response:
    if reply.is_success:
        return reply
    try:
        reply.read()
        told = reply.json()["message"]
    except (ValueError, KeyError, TypeError):
        told = f"it answered {reply.status_code}"
    raise Refused(f"the daemon says: {told}")


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
