"""Docker's API, each call off the event loop and with an end: an answer, a refusal, or no answer.

The library is imported at the first call, in a thread: it is the heaviest that the daemon knows, and nobody
should wait for it who uses local processes.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from core.errors import GodMinerError
from miner.engines.aside import aside
from miner.engines.base import Unreachable

if TYPE_CHECKING:
    import docker

T = TypeVar("T")

#: To look something up, and to make or start something (device hooks and large images take their time).
LOOK_S, MAKE_S = 10.0, 120.0


class Refused(GodMinerError):
    """The engine answered, and not as hoped; `status` is its HTTP status."""

    code = "docker_refused"

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Client:
    def __init__(self, host: str, look_s: float = LOOK_S, make_s: float = MAKE_S) -> None:
        self.host = host
        self.look_s = look_s
        self.make_s = make_s
        #: One per time limit: the library keeps it with the client, and threads share that.
        self._apis: dict[float, docker.APIClient] = {}
        self._lock = threading.Lock()

    async def ask(self, what: str, call: Callable[[docker.APIClient], T]) -> T:
        """`Refused` or `Unreachable`, or the call's result. For what is there at once."""
        return await self._ask(what, call, self.look_s)

    async def make(self, what: str, call: Callable[[docker.APIClient], T]) -> T:
        """The same, for what takes its time."""
        return await self._ask(what, call, self.make_s)

    async def _ask(self, what: str, call: Callable[[docker.APIClient], T], limit_s: float) -> T:
        try:
            return await aside(lambda: self.ask_here(call, limit_s), limit_s + 1, f"docker {what}")
        except TimeoutError as error:
            raise Unreachable(f"Docker at {self.host} does not answer: {error}") from None

    def ask_here(self, call: Callable[[docker.APIClient], T], limit_s: float) -> T:
        """In the caller's own thread."""
        import docker
        import requests

        self._must_listen()
        try:
            return call(self._connected(limit_s))
        except docker.errors.APIError as error:
            raise Refused(_status(error), str(error.explanation or error)) from None
        except (docker.errors.DockerException, requests.RequestException, OSError) as error:
            raise Unreachable(f"Docker at {self.host} can not be asked: {_short(error)}") from None

    def _must_listen(self) -> None:
        """The cheap half of the answer first, in plain words; the library wraps it four errors deep, and
        leaves the socket of a failed connection lying about."""
        with socket.socket(socket.AF_UNIX) as attempt:
            attempt.settimeout(self.look_s)
            try:
                attempt.connect(self.host.removeprefix("unix://"))
            except PermissionError:
                raise Unreachable(
                    f"Docker at {self.host} is not open to this user: sudo usermod -aG docker $USER, "
                    "then log in anew"
                ) from None
            except OSError as error:
                raise Unreachable(f"Docker at {self.host} does not run: {error.strerror or error}") from None

    def close(self) -> None:
        with self._lock:
            for api in self._apis.values():
                api.close()
            self._apis.clear()

    def _connected(self, limit_s: float) -> docker.APIClient:
        """Making one asks the engine for its version, so it fails while the engine is down."""
        import docker

        with self._lock:
            if limit_s not in self._apis:
                self._apis[limit_s] = docker.APIClient(self.host, version="auto", timeout=limit_s)
            return self._apis[limit_s]


def _status(error: Any) -> int:
    response = getattr(error, "response", None)
    return int(response.status_code) if response is not None else 500


def _short(error: BaseException) -> str:
    """The libraries wrap one error in another, four deep; the innermost says what it is."""
    text = str(error)
    for _ in range(6):
        inner = next((one for one in (*error.args, error.__cause__) if isinstance(one, BaseException)), None)
        if inner is None:
            break
        error, text = inner, str(inner) or text
    return text[:300] or type(error).__name__
