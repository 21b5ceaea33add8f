"""Call Docker's API off the event loop, each call with an end: an answer, a refusal, or no answer.

A refusal becomes the backend's error it means, with the way out where operators meet it. The library is
imported at the first call, in a thread: it is the daemon's heaviest, and process-backend users should not
wait for it.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from core.domain.errors import GodMinerError
from miner.backends.base import BackendDiskFull, BackendRejected, BackendUnreachable
from miner.backends.docker.settings import DockerSection
from miner.settings import Settings
from miner.support.background import run_in_thread

if TYPE_CHECKING:
    import docker


T = TypeVar("T")

#: Time limits: to look something up, and to create or start something (device hooks, large images).
QUERY_S, CREATE_S = 10.0, 120.0


class DockerRefused(GodMinerError):
    """Docker answered, and not as hoped; `status` is its HTTP status."""

    code = "docker_refused"

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class DockerClient:
    def __init__(
        self, host: str, query_timeout_s: float = QUERY_S, create_timeout_s: float = CREATE_S
    ) -> None:
        self.host = host
        self.query_timeout_s = query_timeout_s
        self.create_timeout_s = create_timeout_s
        #: One per timeout: the library keeps it with the client, and threads share that.
        self._apis: dict[float, docker.APIClient] = {}
        self._lock = threading.Lock()

    async def query(self, what: str, call: Callable[[docker.APIClient], T]) -> T:
        """Call what answers at once. `DockerRefused` or `BackendUnreachable`."""
        return await self._call(what, call, self.query_timeout_s)

    async def create(self, what: str, call: Callable[[docker.APIClient], T]) -> T:
        """Call what takes its time, such as creating a container."""
        return await self._call(what, call, self.create_timeout_s)

    async def _call(self, what: str, call: Callable[[docker.APIClient], T], timeout_s: float) -> T:
        try:
            return await run_in_thread(
                lambda: self.call_blocking(call, timeout_s), timeout_s + 1, f"docker {what}"
            )
        except TimeoutError as error:
            raise BackendUnreachable(f"Docker at {self.host} does not answer: {error}") from None

    def call_blocking(self, call: Callable[[docker.APIClient], T], timeout_s: float) -> T:
        """Call in the caller's own thread."""
        import docker
        import requests

        self._require_listening()
        try:
            return call(self._connected(timeout_s))
        except docker.errors.APIError as error:
            raise DockerRefused(_status(error), str(error.explanation or error)) from None
        except (docker.errors.DockerException, requests.RequestException, OSError) as error:
            raise BackendUnreachable(
                f"Docker at {self.host} cannot be used: {_innermost_text(error)}"
            ) from None

    def _require_listening(self) -> None:
        """Try to connect first, for a plain message: the library wraps the error four deep, and leaves the
        socket of a failed connection open."""
        with socket.socket(socket.AF_UNIX) as attempt:
            attempt.settimeout(self.query_timeout_s)
            try:
                attempt.connect(self.host.removeprefix("unix://"))
            except PermissionError:
                raise BackendUnreachable(
                    f"Docker at {self.host} is not open to this user: sudo usermod -aG docker $USER, "
                    "then log in again"
                ) from None
            except OSError as error:
                raise BackendUnreachable(
                    f"Docker at {self.host} does not run: {error.strerror or error}; start it, or name "
                    "another by DOCKER_HOST"
                ) from None

    def close(self) -> None:
        with self._lock:
            for api in self._apis.values():
                api.close()
            self._apis.clear()

    def _connected(self, timeout_s: float) -> docker.APIClient:
        """A client of the library; making one reads Docker's version, so it fails while Docker is
        down."""
        import docker

        with self._lock:
            if timeout_s not in self._apis:
                self._apis[timeout_s] = docker.APIClient(self.host, version="auto", timeout=timeout_s)
            return self._apis[timeout_s]


def docker_client(settings: Settings) -> DockerClient:
    return DockerClient(settings.section(DockerSection).docker_host)


def _status(error: Any) -> int:
    response = getattr(error, "response", None)
    return int(response.status_code) if response is not None else 500


def _innermost_text(error: BaseException) -> str:
    """The message of the innermost error: the libraries wrap one in another, four deep."""
    text = str(error)
    for _ in range(6):
        causes = (*error.args, error.__cause__)
        inner = next((cause for cause in causes if isinstance(cause, BaseException)), None)
        if inner is None:
            break
        error, text = inner, str(inner) or text
    return text[:300] or type(error).__name__


#: Docker has one status for all that goes wrong in it. These say that this container cannot be started; with
#: any other, Docker itself has a problem now: it stops, has lost containerd, or stumbles over what it had
#: begun before it was killed ("task … already exists", "id already in use").
_FINAL_REFUSALS = re.compile(
    r"could not select device driver|nvidia-container|unknown device|runtime create failed|runc create failed"
    r"|invalid|not supported|cannot set both",
    re.IGNORECASE,
)
#: A program of Docker's was killed while it started the container, for example for lack of memory.
_KILLED = re.compile(r"signal: killed", re.IGNORECASE)
_LEFTOVER_CONFLICT = re.compile(r"already (exists|in use)")

_WAYS_OUT = (
    (
        "could not select device driver",
        "install the NVIDIA container toolkit, then restart Docker; or set BACKEND=process",
    ),
    ("unknown device", "the GPU is gone: see nvidia-smi -L"),
    ("setting rlimit", "Docker may not raise that limit here: lower it in TRAINER_ULIMITS"),
    ("No such image", "god-miner images build"),
    ("cpus are not available", "the plan names cores that Docker does not have: see `docker info`"),
    ("bind source path does not exist", "Docker must run on this machine and see the same files"),
)


def error_for_refusal(refused: DockerRefused, doing: str) -> BackendRejected | BackendUnreachable:
    text = str(refused).strip()
    if "no space left on device" in text.lower():
        return BackendDiskFull(f"Docker's disk is full ({doing}): docker system df; god-miner images prune")
    if refused.status >= 500 and (_KILLED.search(text) or not _FINAL_REFUSALS.search(text)):
        return BackendUnreachable(f"Docker has a problem ({doing}): {text[:500]}")
    way_out = next((f"; {way}" for sign, way in _WAYS_OUT if sign.lower() in text.lower()), "")
    return BackendRejected(f"Docker refuses ({doing}): {text[:500]}{way_out}")


def is_leftover_conflict(refused: DockerRefused) -> bool:
    """Return True if a leftover of an earlier start blocks this one, which only a new container avoids."""
    return bool(_LEFTOVER_CONFLICT.search(str(refused)))
