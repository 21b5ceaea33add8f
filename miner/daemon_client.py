"""The client of the operator's port, for other processes: the daemon's port and token files, pages, commands,
server-sent events.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, SecretStr, ValidationError

from core.domain.errors import GodMinerError
from core.system.files import write_atomically
from miner.settings import Settings

if TYPE_CHECKING:
    import httpx

#: The file in which a running daemon writes its ports for other commands.
RUN_FILE = "daemon.json"
#: The file of the token that the daemon created because OPERATOR_TOKEN is not set.
TOKEN_FILE = "operator-token"  # noqa: S105 - the name of a file
_TIMEOUT_SECONDS = 5.0
#: A stream without an event or a heartbeat for this long is dead.
_STREAM_TIMEOUT_SECONDS = 60.0


AnswerT = TypeVar("AnswerT", bound=BaseModel)


class NoDaemon(GodMinerError):
    """No daemon answers for this data directory."""

    code = "no_daemon"


class DaemonRefused(GodMinerError):
    """The daemon refused the request."""

    code = "refused_by_daemon"


def ensure_operator_token(settings: Settings) -> SecretStr:
    """Return OPERATOR_TOKEN, or the token of the data directory, which the first start creates: whoever can
    read it is the operator. `OSError`."""
    if settings.operator_token is not None:
        return settings.operator_token
    path = settings.data_dir / TOKEN_FILE
    if not (token := stored_operator_token(settings.data_dir)):
        token = secrets.token_hex(24)
        write_atomically(path, token.encode() + b"\n")
    return SecretStr(token)


def stored_operator_token(data_dir: Path) -> str:
    """The data directory's token; empty if there is none that this user may read."""
    try:
        return (data_dir / TOKEN_FILE).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def get(settings: Settings, path: str, answer: type[AnswerT]) -> AnswerT:
    """GET a record from the operator's port. `NoDaemon`, `DaemonRefused`."""
    return _read(answer, _request(settings, "GET", path))


def post(
    settings: Settings,
    path: str,
    answer: type[AnswerT],
    payload: BaseModel | None = None,
    *,
    seconds: float = _TIMEOUT_SECONDS,
) -> AnswerT:
    """POST to the operator's port. `DaemonRefused` with the daemon's message if it refuses."""
    content = None if payload is None else payload.model_dump(mode="json")
    return _read(answer, _request(settings, "POST", path, content, seconds))


def delete(settings: Settings, path: str, answer: type[AnswerT]) -> AnswerT:
    """DELETE on the operator's port."""
    return _read(answer, _request(settings, "DELETE", path))


def _read(answer: type[AnswerT], content: dict[str, object]) -> AnswerT:
    try:
        return answer.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        text = f"the daemon's answer cannot be read ({where}: {first['msg']}); is it of this version?"
        raise DaemonRefused(text) from None


@contextmanager
def follow_page_events(settings: Settings, path: str) -> Iterator[Iterator[tuple[str, dict[str, object]]]]:
    """Follow the server-sent events of a page, as (kind, data), until the daemon ends them."""
    import httpx

    with _client(settings, _STREAM_TIMEOUT_SECONDS) as client:
        try:
            with client.stream("GET", path) as reply:
                _raise_if_refused(reply)
                yield _parse_events(reply)
        except httpx.HTTPError as error:
            raise NoDaemon(f"the daemon at {client.base_url} does not answer any more: {error}") from None


def _parse_events(reply: httpx.Response) -> Iterator[tuple[str, dict[str, object]]]:
    kind = ""
    for line in reply.iter_lines():
        name, _, value = line.partition(":")
        if name == "event":
            kind = value.strip()
        elif name == "data":
            yield kind, json.loads(value)


def _request(
    settings: Settings, method: str, path: str, payload: Any = None, seconds: float = _TIMEOUT_SECONDS
) -> dict[str, object]:
    import httpx

    with _client(settings, seconds) as client:
        try:
            reply = _raise_if_refused(client.request(method, path, json=payload))
            content: dict[str, object] = reply.json()
        except (httpx.HTTPError, ValueError) as error:
            raise NoDaemon(f"the daemon at {client.base_url} does not answer: {error}") from None
    return content


def _client(settings: Settings, seconds: float) -> httpx.Client:
    import httpx

    base = operator_url(settings)
    own = settings.operator_token
    token = own.get_secret_value() if own else stored_operator_token(settings.data_dir)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    # Without the environment's proxies: this is our own port, and the request carries our token.
    return httpx.Client(base_url=base, headers=headers, timeout=seconds, trust_env=False)


def _raise_if_refused(reply: httpx.Response) -> httpx.Response:
    if reply.is_success:
        return reply
    try:
        reply.read()
        message = reply.json()["message"]
    except (ValueError, KeyError, TypeError):
        message = f"it answered {reply.status_code}"
    raise DaemonRefused(f"the daemon says: {message}")


def read_run_file(data_dir: Path) -> dict[str, int] | None:
    """The process id and the ports that the daemon wrote; None without a valid file."""
    try:
        content = json.loads((data_dir / RUN_FILE).read_bytes())
        return {name: int(content[name]) for name in ("pid", "public_port", "operator_port")}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def operator_url(settings: Settings) -> str:
    """The address of the running daemon's operator port. `NoDaemon`."""
    return f"http://{_host(settings)}:{_port(settings)}"


def _port(settings: Settings) -> int:
    """The port in the daemon's file: OPERATOR_PORT may be 0, or have been edited since."""
    if (running := read_run_file(settings.data_dir)) is None:
        raise NoDaemon(f"no daemon runs on {settings.data_dir}; god-miner run starts one")
    return running["operator_port"]


def _host(settings: Settings) -> str:
    """The address at which this machine reaches it."""
    host = settings.operator_host
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not listened on
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
