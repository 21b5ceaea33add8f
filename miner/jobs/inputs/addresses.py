"""Which addresses a URL from outside may lead to: those of the internet, and no others.

A URL in a request can name anything that this host can reach and strangers can not: its own services, the
cloud's metadata with the host's credentials, the neighbours' machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

#: Not private by any table, but never what a dataset is behind.
_NEVER: dict[Network, str] = {
    ip_network("168.63.129.16/32"): "Azure's host agent",
    ip_network("100.100.100.200/32"): "Alibaba's metadata",
    ip_network("169.254.0.0/16"): "link-local, as cloud metadata is",
    ip_network("fd00:ec2::254/128"): "Amazon's metadata",
    ip_network("fec0::/10"): "site-local",
    # Python's tables know these in some versions only.
    ip_network("192.0.0.0/24"): "for protocols, as Oracle's metadata is",
    ip_network("64:ff9b:1::/48"): "a network's own way to IPv4",
    ip_network("100::/64"): "discarded by routers",
    ip_network("192.88.99.0/24"): "a way to IPv6 of long ago",
    ip_network("3fff::/20"): "for documentation",
    ip_network("::/96"): "an IPv4 address in IPv6 clothes of long ago",
}
#: IPv6 addresses that are a way to the IPv4 address in their last 32 bits.
_NAT64 = IPv6Network("64:ff9b::/96")


@dataclass(frozen=True)
class Guard:
    """`allowed` are networks that an operator opened on purpose."""

    allowed: Sequence[Network] = ()

    def refusal(self, text: str) -> str | None:
        """Why an address must not be connected to; None when it may."""
        try:
            address = ip_address(text.split("%")[0])
        except ValueError:
            return "no address"
        for one in _meant(address):
            if not self._is_allowed(one) and (why := _why_not(one)):
                return why
        return None

    def _is_allowed(self, address: Address) -> bool:
        return any(address.version == network.version and address in network for network in self.allowed)


def _meant(address: Address) -> Iterator[Address]:
    """Every address that a packet to this one may end at. IPv4 in IPv6 is judged as what it is."""
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
    for network, why in _NEVER.items():
        if address.version == network.version and address in network:
            return why
    if address.is_private:
        return "private"
    # Also shared address space (100.64.0.0/10) and what was never given out.
    return None if address.is_global and not address.is_reserved else "not of the internet"
