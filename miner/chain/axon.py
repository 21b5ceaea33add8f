"""Which addresses may be published, and what to do when the chain already has one."""

from __future__ import annotations

import ipaddress

from miner.chain.base import Metagraph, Node, PublishOutcome, PublishResult, endpoint
from miner.chain.errors import AxonAddressError


def checked_address(ip: str, port: int, *, allow_private: bool) -> str:
    """The address in its plain form, or an error that says why validators could not use it.

    The chain itself takes private ranges without a word; the miner would then wait for offers for ever.
    """
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:
        raise AxonAddressError(
            f"{ip!r} is not an IP address: give the public IPv4 address of this machine, not a host name"
        ) from None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if not 1 <= port <= 65535:
        raise AxonAddressError(f"port {port} is not a TCP port: give one from 1 to 65535")
    if address.is_unspecified or address.is_multicast:
        raise AxonAddressError(f"{address} is no address of one machine: give its public IPv4 address")
    if not address.is_global and not allow_private:
        raise AxonAddressError(
            f"{address} is {_kind(address)}: validators can't reach it. Give the public address, "
            "or set ALLOW_PRIVATE_AXON=true for a test network"
        )
    return str(address)


def unreachable_for_fiber(ip: str) -> bool:
    """fiber builds `http://ip:port` without brackets, so its validators can not call an IPv6 axon."""
    return ipaddress.ip_address(ip).version == 6


def settled(graph: Metagraph, key: bytes, ip: str, port: int) -> PublishResult | None:
    """The result when nothing has to be submitted: the address is there already, or never can be."""
    node = graph.find(key)
    if node is None:
        return not_registered(graph.netuid)
    if shows(node, ip, port):
        return PublishResult(PublishOutcome.UNCHANGED, f"{endpoint(ip, port)} is published already")
    return None


def not_registered(netuid: int) -> PublishResult:
    return PublishResult(
        PublishOutcome.REFUSED,
        f"the hotkey is not registered on subnet {netuid}: register it with "
        f"`btcli subnets register --netuid {netuid}`, then publish again",
    )


def shows(node: Node | None, ip: str, port: int) -> bool:
    return node is not None and (node.ip, node.port) == (ip, port)


def _kind(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    if address.is_loopback:
        return "this machine's own loopback address"
    if address.is_link_local:
        return "a link-local address"
    if address.is_private:
        return "a private or reserved address"
    return "not a public address"
