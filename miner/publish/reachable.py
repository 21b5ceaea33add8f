"""Check that the hub can be reached, so that an idle miner notices before a job needs it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from miner.api.status import HubStatus
from miner.support.background import run_in_thread

#: For one connection; and for all of a check, since the resolver has limits of its own.
CONNECT_SECONDS, CHECK_SECONDS = 5.0, 20.0
NO_ADDRESS = "its address, or that of the proxy for it (HTTPS_PROXY, ALL_PROXY), has no valid host and port"


class HubReachability:
    """The result of the last check, which only opens a connection, to the proxy where there is one. It needs
    no token, and counts against no limit of the hub."""

    def __init__(self, endpoint: str, clock: Callable[[], float] = time.time) -> None:
        self.endpoint = endpoint
        self.checked_at: float | None = None
        self.problem: str | None = None
        self._clock = clock

    async def check(self) -> None:
        problem = None
        try:
            host, port = _address(self.endpoint)
        except ValueError:  # whose text may hold a part of the proxy's password
            self.problem, self.checked_at = NO_ADDRESS, self._clock()
            return
        try:
            await run_in_thread(lambda: _connect(host, port), CHECK_SECONDS, "the connection to the hub")
        except (OSError, UnicodeError) as error:  # also a `TimeoutError`; a name that cannot be looked up
            why = error.strerror if isinstance(error, OSError) else None
            problem = f"{host}:{port} cannot be reached: {why or error}"
        self.problem, self.checked_at = problem, self._clock()

    def status(self) -> HubStatus:
        return HubStatus(endpoint=self.endpoint, checked_at=self.checked_at, problem=self.problem)


def _address(endpoint: str) -> tuple[str, int]:
    """The host and port to connect to."""
    url = urlsplit(endpoint)
    proxies = {} if proxy_bypass(url.netloc) else getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if proxy:
        url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if not url.hostname:
        raise ValueError("no host")
    return url.hostname, url.port or (443 if url.scheme == "https" else 80)


def _connect(host: str, port: int) -> None:
    socket.create_connection((host, port), CONNECT_SECONDS).close()
