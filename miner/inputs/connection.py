"""Connections to URLs from outside, made only to checked addresses of the internet.

The name is resolved once, every address is checked, and the socket connects to a checked address: DNS
rebinding gains nothing. TLS and the Host header keep the name. No proxy is used: it would resolve the name
itself. A URL could otherwise reach this host's own services, cloud metadata or its neighbours.
"""

from __future__ import annotations

import functools
import http.client
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import SplitResult, urljoin, urlsplit

import certifi

from core.domain.job_states import EndReason, StepFailed

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

#: Not private by any table, but never the address of a dataset.
_FORBIDDEN_NETWORKS: dict[Network, str] = {
    ip_network("168.63.129.16/32"): "Azure's host agent",
    ip_network("100.100.100.200/32"): "Alibaba's metadata",
    ip_network("169.254.0.0/16"): "link-local, as cloud metadata is",
    ip_network("fd00:ec2::254/128"): "Amazon's metadata",
    ip_network("fec0::/10"): "site-local",
    # Python's tables know these in some versions only.
    ip_network("192.0.0.0/24"): "for protocols, as Oracle's metadata is",
    ip_network("64:ff9b:1::/48"): "a network's own way to IPv4",
    ip_network("100::/64"): "discarded by routers",
    ip_network("192.88.99.0/24"): "an obsolete way to IPv6",
    ip_network("3fff::/20"): "for documentation",
    ip_network("::/96"): "an obsolete form of IPv4 in IPv6",
}
#: IPv6 addresses that lead to the IPv4 address in their last 32 bits.
_NAT64 = IPv6Network("64:ff9b::/96")


@dataclass(frozen=True)
class AddressGuard:
    """Judges addresses; `allowed` are networks that an operator opened on purpose."""

    allowed: Sequence[Network] = ()

    def refusal(self, text: str) -> str | None:
        """Why an address must not be connected to, or None."""
        try:
            address = ip_address(text.split("%")[0])
        except ValueError:
            return "not an address"
        for reached in _reached_addresses(address):
            if not self._is_allowed(reached) and (why := _why_not(reached)):
                return why
        return None

    def _is_allowed(self, address: Address) -> bool:
        return any(address.version == network.version and address in network for network in self.allowed)


def _reached_addresses(address: Address) -> Iterator[Address]:
    """Every address that a packet to this one may reach: IPv4 in IPv6 is judged as IPv4."""
    if isinstance(address, IPv4Address):
        yield address
    elif address.ipv4_mapped:
        yield address.ipv4_mapped
    elif address.sixtofour:
        yield address.sixtofour
    elif address.teredo:
        yield from address.teredo
    elif address in _NAT64:
        yield IPv4Address(int(address) & 0xFFFFFFFF)
    else:
        yield address


def _why_not(address: Address) -> str | None:
    if address.is_loopback:
        return "loopback"
    if address.is_multicast:
        return "multicast"
    for network, why in _FORBIDDEN_NETWORKS.items():
        if address.version == network.version and address in network:
            return why
    if address.is_private:
        return "private"
    # Also shared address space (100.64.0.0/10) and what was never given out.
    return None if address.is_global and not address.is_reserved else "not of the internet"


MAX_REDIRECTS = 5
MAX_URL = 8192
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PORTS = {"http": 80, "https": 443}

#: Returns the addresses of a host and port, as text.
HostResolver = Callable[[str, int], Sequence[str]]


def resolve_host(host: str, port: int) -> list[str]:
    """The system's answer, best address first, without duplicates."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in infos))


@dataclass(frozen=True)
class UrlOpener:
    """Opens URLs from outside."""

    guard: AddressGuard
    #: For one connect or one read, not for the whole response.
    timeout: float = 30.0
    resolve: HostResolver = resolve_host

    def open(self, url: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        """Send a GET, follow redirects and check each of them; return the response.

        `StepFailed` with URL_REFUSED or NETWORK; its text contains no more of the URL than the host.
        """
        parts = checked_url(url)
        for _ in range(MAX_REDIRECTS + 1):
            response = self._get(parts, headers)
            target = response.getheader("Location")
            if response.status not in _REDIRECTS or target is None:
                return response
            response.close()
            was_https = parts.scheme == "https"
            parts = checked_url(urljoin(parts.geturl(), target))
            if was_https and parts.scheme != "https":
                raise _refused(parts, "is a redirect from https to http")
        raise StepFailed(EndReason.NETWORK, f"{_url_origin(parts)} redirects more than {MAX_REDIRECTS} times")

    def _get(self, parts: SplitResult, headers: dict[str, str]) -> http.client.HTTPResponse:
        host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        connection = self._connection(parts, host, port)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        try:
            connection.request("GET", target, headers={**headers, "Connection": "close"})
            response = connection.getresponse()
            # From here on the response alone has the socket, and closes it.
            if connection.sock is not None:
                connection.sock.close()
                connection.sock = None
            return response
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise StepFailed(
                EndReason.NETWORK, f"{_url_origin(parts)} cannot be read: {_network_error_text(error)}"
            ) from None

    def _connection(self, parts: SplitResult, host: str, port: int) -> http.client.HTTPConnection:
        last: Exception | None = None
        for address in self._checked(parts, host, port):
            try:
                plain = socket.create_connection((address, port), self.timeout)
                return self._connection_around(parts.scheme, plain, host, port)
            except OSError as error:
                last = error
        raise StepFailed(
            EndReason.NETWORK, f"{_url_origin(parts)} cannot be reached: {_network_error_text(last)}"
        )

    def _checked(self, parts: SplitResult, host: str, port: int) -> list[str]:
        """Return the addresses to try. One forbidden address refuses the name: such a mix is an attack."""
        try:
            addresses = list(self.resolve(host, port))
        except (OSError, UnicodeError) as error:
            raise StepFailed(
                EndReason.NETWORK, f"{_url_origin(parts)} has no address: {_network_error_text(error)}"
            ) from None
        for address in addresses:
            if why := self.guard.refusal(address):
                raise _refused(parts, f"is at {address}, which is {why}")
        return addresses

    def _connection_around(
        self, scheme: str, plain: socket.socket, host: str, port: int
    ) -> http.client.HTTPConnection:
        """A connection object around a socket that is already connected."""
        connection: http.client.HTTPConnection
        if scheme == "http":
            connection = http.client.HTTPConnection(host, port, timeout=self.timeout)
            connection.sock = plain
        else:
            connection = http.client.HTTPSConnection(host, port, timeout=self.timeout, context=_context())
            try:
                connection.sock = _context().wrap_socket(plain, server_hostname=host)
            except BaseException:
                plain.close()
                raise
        # It must never connect by itself: that would resolve the name again, without checks.
        connection.auto_open = 0
        return connection


def checked_url(url: str) -> SplitResult:
    """Split a URL; `StepFailed` (URL_REFUSED) if it must not be opened."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise StepFailed(EndReason.URL_REFUSED, "the dataset's address is not a URL") from None
    if not parts.hostname and parts.scheme in _PORTS:
        raise StepFailed(EndReason.URL_REFUSED, "the dataset's address names no host")
    if parts.scheme not in _PORTS:
        raise StepFailed(
            EndReason.URL_REFUSED, f"the dataset's address is of the kind {parts.scheme[:20]!r}, not http(s)"
        )
    if len(url) > MAX_URL or any(ord(letter) <= 32 or ord(letter) >= 127 for letter in url):
        raise _refused(parts, "has a URL that is too long or has invalid characters")
    if parts.username is not None or parts.password is not None:
        raise _refused(parts, "has a user name in its URL")
    if port == 0:
        raise _refused(parts, "has the port 0")
    return parts._replace(fragment="")


@functools.cache
def _context() -> ssl.SSLContext:
    """The system's authorities (SSL_CERT_FILE adds to them) and Mozilla's, as some systems have none."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


def _url_origin(parts: SplitResult) -> str:
    """The part of a URL that may be shown: in a signed one the rest is a key."""
    return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")


def _refused(parts: SplitResult, why: str) -> StepFailed:
    way_out = "; ALLOW_PRIVATE_NETWORKS opens networks" if "which is" in why else ""
    return StepFailed(EndReason.URL_REFUSED, f"{_url_origin(parts)} {why}{way_out}")


def _network_error_text(error: Exception | None) -> str:
    """The error's own text, which contains no URL."""
    return str(error).strip()[:200] or type(error).__name__
