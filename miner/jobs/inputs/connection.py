"""Connections to where a URL from outside leads, made only to addresses that were checked.

The name is resolved once, every address it has is checked, and the socket goes to a checked address: a name
that resolves to something else a moment later (DNS rebinding) gains nothing. TLS and the Host header keep the
name. No proxy is used: it would resolve the name itself.
"""

from __future__ import annotations

import functools
import http.client
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit

import certifi

from miner.jobs.inputs.addresses import Guard
from miner.jobs.ports import StepFailed
from miner.jobs.states import EndReason

MAX_REDIRECTS = 5
MAX_URL = 8192
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PORTS = {"http": 80, "https": 443}

#: Host and port → addresses, as text.
Resolve = Callable[[str, int], Sequence[str]]


def resolve(host: str, port: int) -> list[str]:
    """What the system says, best first, each once."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[4][0]) for address in found))


@dataclass(frozen=True)
class Opener:
    """Opens URLs from outside."""

    guard: Guard
    #: For one connect or one read; not for all of it.
    timeout: float = 30.0
    resolve: Resolve = resolve

    def open(self, url: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        """The reply to a GET, redirects followed and each of them checked.

        `StepFailed` with URL_REFUSED, or NETWORK; nothing in its text says more of the URL than the host.
        """
        parts = split(url)
        for _ in range(MAX_REDIRECTS + 1):
            response = self._get(parts, headers)
            target = response.getheader("Location")
            if response.status not in _REDIRECTS or target is None:
                return response
            response.close()
            was_covered = parts.scheme == "https"
            parts = split(urljoin(parts.geturl(), target))
            if was_covered and parts.scheme != "https":
                raise _refused(parts, "is where https is left for http")
        raise StepFailed(EndReason.NETWORK, f"{_site(parts)} redirects more than {MAX_REDIRECTS} times")

    def _get(self, parts: SplitResult, headers: dict[str, str]) -> http.client.HTTPResponse:
        host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        connection = self._connection(parts, host, port)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        try:
            connection.request("GET", target, headers={**headers, "Connection": "close"})
            response = connection.getresponse()
            # From here on the socket is the response's alone, and closed with it.
            if connection.sock is not None:
                connection.sock.close()
                connection.sock = None
            return response
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise StepFailed(EndReason.NETWORK, f"{_site(parts)} can't be asked: {_said(error)}") from None

    def _connection(self, parts: SplitResult, host: str, port: int) -> http.client.HTTPConnection:
        last: Exception | None = None
        for address in self._checked(parts, host, port):
            try:
                plain = socket.create_connection((address, port), self.timeout)
                return self._dressed(parts.scheme, plain, host, port)
            except OSError as error:
                last = error
        raise StepFailed(EndReason.NETWORK, f"{_site(parts)} can't be reached: {_said(last)}")

    def _checked(self, parts: SplitResult, host: str, port: int) -> list[str]:
        """The addresses to try. One bad address spoils the name: a set that mixes both is made to deceive."""
        try:
            found = list(self.resolve(host, port))
        except (OSError, UnicodeError) as error:
            raise StepFailed(EndReason.NETWORK, f"{_site(parts)} has no address: {_said(error)}") from None
        for address in found:
            if why := self.guard.refusal(address):
                raise _refused(parts, f"is at {address}, which is {why}")
        return found

    def _dressed(self, scheme: str, plain: socket.socket, host: str, port: int) -> http.client.HTTPConnection:
        """A connection object around a socket that is already where it should be."""
        made: http.client.HTTPConnection
        if scheme == "http":
            made = http.client.HTTPConnection(host, port, timeout=self.timeout)
            made.sock = plain
        else:
            made = http.client.HTTPSConnection(host, port, timeout=self.timeout, context=_context())
            try:
                made.sock = _context().wrap_socket(plain, server_hostname=host)
            except BaseException:
                plain.close()
                raise
        # It must never connect by itself: that would resolve the name again, and check nothing.
        made.auto_open = 0
        return made


def split(url: str) -> SplitResult:
    """A URL's parts, if it is one that may be asked."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise StepFailed(EndReason.URL_REFUSED, "the dataset's address is no URL") from None
    if not parts.hostname and parts.scheme in _PORTS:
        raise StepFailed(EndReason.URL_REFUSED, "the dataset's address names no host")
    if parts.scheme not in _PORTS:
        raise StepFailed(
            EndReason.URL_REFUSED, f"the dataset's address is of the kind {parts.scheme[:20]!r}, not http(s)"
        )
    if len(url) > MAX_URL or any(ord(letter) <= 32 or ord(letter) >= 127 for letter in url):
        raise _refused(parts, "comes in a URL that is too long, or with odd characters")
    if parts.username is not None or parts.password is not None:
        raise _refused(parts, "is asked for with a user's name in the URL")
    if port == 0:
        raise _refused(parts, "has the port 0")
    return parts._replace(fragment="")


@functools.cache
def _context() -> ssl.SSLContext:
    """The system's authorities (SSL_CERT_FILE adds to them), and Mozilla's where a system has none."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


def _site(parts: SplitResult) -> str:
    """As much of a URL as may be told: in a signed one the rest is a key."""
    return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")


def _refused(parts: SplitResult, why: str) -> StepFailed:
    way_out = "; ALLOW_PRIVATE_NETWORKS opens networks" if "which is" in why else ""
    return StepFailed(EndReason.URL_REFUSED, f"{_site(parts)} {why}{way_out}")


def _said(error: Exception | None) -> str:
    """An error of the network in its own words, which hold no URL."""
    return str(error).strip()[:200] or type(error).__name__
