"""Addresses: public keys as ss58 text, and the network that a client comes from."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache

from bittensor_core import ss58_decode, ss58_encode


@lru_cache(maxsize=4096)
def client_network(address: str) -> str:
    """Return the network of one caller: an IPv4 address, or the /64 that one IPv6 customer owns."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return address


#: The network's own address prefix: one key is stored and shown in one spelling.
SS58_PREFIX = 42


@lru_cache(maxsize=1024)
def ss58_address(key: bytes) -> str:
    return str(ss58_encode(key, SS58_PREFIX))


MAX_ADDRESS_LENGTH = 64


def public_key(ss58: str) -> bytes | None:
    """The 32 bytes behind an address. Addresses are compared by key: one key has an address per network."""
    return _public_key(ss58) if len(ss58) <= MAX_ADDRESS_LENGTH else None


def public_keys(addresses: Iterable[str]) -> frozenset[bytes]:
    """The keys of the valid addresses."""
    return frozenset(key for address in addresses if (key := public_key(address)) is not None)


@lru_cache(maxsize=4096)
def _public_key(ss58: str) -> bytes | None:
    try:
        key: bytes = ss58_decode(ss58)
    except ValueError:
        return None
    return key if len(key) == 32 else None
