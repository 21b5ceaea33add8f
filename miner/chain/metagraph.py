"""The subnet as the miner sees it: nodes, the metagraph, where they come from, and what can go wrong.

Also the JSON form of a node, which the nodes file, the cached metagraph and the SDK worker's response
share, and the rules for axon addresses: which may be published, and when nothing has to be submitted.
"""

from __future__ import annotations

import copy
import ipaddress
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, Protocol

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from core.domain.errors import ConfigError, GodMinerError, Problem
from miner.support.addresses import public_key


@dataclass(frozen=True, slots=True)
class Node:
    """One registered hotkey.

    `stake` is the chain's total stake, alpha plus weighted TAO. The reference miner's fiber reads alpha only;
    the total is never smaller, and turning a validator away costs more than answering one.
    """

    uid: int
    hotkey: str
    coldkey: str
    stake: float
    validator_permit: bool
    ip: str | None
    port: int | None
    incentive: float = 0.0
    last_update: int = 0
    emission: float = 0.0

    @property
    def address(self) -> str | None:
        """`ip:port` as published, None when nothing is."""
        return None if self.ip is None or self.port is None else host_and_port(self.ip, self.port)


@dataclass(frozen=True)
class Metagraph:
    """Every node of one subnet at one moment. Immutable: readers need no lock, a refresh replaces it."""

    netuid: int
    block: int | None
    fetched_at: float
    source: str
    nodes: tuple[Node, ...]
    genesis: str | None = None
    #: TAO in a day for an alpha of emission at the subnet's price, or None if the source has no price.
    tao_per_day: float | None = None
    #: By public key of 32 bytes and not by address: one key has an address per network.
    nodes_by_key: Mapping[bytes, Node] = field(init=False, repr=False, compare=False)
    _incentives: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        keyed: dict[bytes, Node] = {}
        for node in self.nodes:
            key = public_key(node.hotkey)
            if key is None:
                raise ValueError(f"uid {node.uid}: hotkey {node.hotkey!r} is not an ss58 address")
            if key in keyed:
                raise ValueError(f"uids {keyed[key].uid} and {node.uid} have the same hotkey {node.hotkey}")
            keyed[key] = node
        object.__setattr__(self, "nodes_by_key", MappingProxyType(keyed))
        object.__setattr__(self, "_incentives", tuple(sorted(node.incentive for node in self.nodes)))

    def rank(self, key: bytes) -> int | None:
        """Place in the order of incentive, 1 is best, equals share a place; None for an unknown key.

        The chain's own `rank` is no longer computed and reads 0.0 for everyone.
        """
        node = self.nodes_by_key.get(key)
        if node is None:
            return None
        return 1 + len(self._incentives) - bisect_right(self._incentives, node.incentive)

    def with_fetched_at(self, at: float) -> Metagraph:
        """The same nodes, read again later and unchanged."""
        copied = copy.copy(self)
        object.__setattr__(copied, "fetched_at", at)
        return copied


class PublishOutcome(StrEnum):
    """The outcome of a request to publish the axon."""

    PUBLISHED = "published"
    UNCHANGED = "unchanged"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class PublishResult:
    outcome: PublishOutcome
    message: str
    block_hash: str | None = None

    @property
    def ok(self) -> bool:
        return self.outcome in (PublishOutcome.PUBLISHED, PublishOutcome.UNCHANGED)


class ChainSource(Protocol):
    """Source of a subnet's nodes. Every call returns or raises in bounded time."""

    @property
    def name(self) -> str:
        """The source in a form that may be shown: no tokens in it."""
        ...

    @property
    def netuid(self) -> int: ...

    @property
    def genesis(self) -> str | None:
        """The chain's genesis hash: known beforehand or read from the node; None until then."""
        ...

    @property
    def poll_seconds(self) -> float | None:
        """Shortest interval between reads of this source, or None to leave it to the operator's setting."""
        ...

    async def metagraph(self) -> Metagraph: ...

    async def publish_axon(self, ip: str, port: int) -> PublishResult: ...


def host_and_port(ip: str, port: int) -> str:
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


#: The code of an address that validators could not reach and that must not be published.
BAD_ADDRESS = "bad_axon_address"


class ChainError(GodMinerError):
    """The chain refused or sent something unexpected, or was asked for something impossible."""

    code = "chain"


class ChainUnavailable(ChainError):
    """The node cannot be reached, does not answer, or answers nonsense. A later try may help."""

    code = "chain_unavailable"


class WrongChain(ChainError):
    """The node serves another chain than the one that was asked for."""

    code = "wrong_chain"


class NodesFileError(ConfigError):
    code = "bad_nodes_file"


#: Characters of an offending value that an error shows.
MAX_VALUE_CHARS_SHOWN = 60


def _valid_hotkey(value: str) -> str:
    if public_key(value) is None:
        raise ValueError("not an ss58 address of 32 bytes (a hotkey looks like 5F3sa2TJAWMqDhXG6jhV4N8ko9…)")
    return value


def _valid_ip(value: str) -> str:
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        raise ValueError("not an IPv4 or IPv6 address") from None


Fraction = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
Amount = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


class NodeRow(BaseModel):
    """One node. Only the hotkey has to be given; a node without a uid gets its place in the list."""

    model_config = ConfigDict(extra="forbid")

    hotkey: Annotated[str, AfterValidator(_valid_hotkey)]
    uid: Annotated[int, Field(strict=True, ge=0, le=65535)] | None = None
    coldkey: str = ""
    stake: Amount = 0.0
    validator_permit: Annotated[bool, Field(strict=True)] = False
    ip: Annotated[str, AfterValidator(_valid_ip)] | None = None
    port: Annotated[int, Field(strict=True, ge=1, le=65535)] | None = None
    incentive: Fraction = 0.0
    last_update: Annotated[int, Field(strict=True, ge=0)] = 0
    emission: Amount = 0.0

    def node(self, place: int) -> Node:
        values = self.model_dump()
        return Node(**values | {"uid": place if self.uid is None else self.uid})


def nodes_from_rows(rows: Iterable[NodeRow]) -> tuple[Node, ...]:
    """The nodes behind rows; ValueError when two of them are the same one."""
    nodes = tuple(row.node(place) for place, row in enumerate(rows))
    seen: dict[int, Node] = {}
    for node in nodes:
        if node.uid in seen:
            raise ValueError(f"uid {node.uid} is given to both {seen[node.uid].hotkey} and {node.hotkey}")
        seen[node.uid] = node
    return nodes


def node_problems(error: ValidationError) -> list[Problem]:
    """A validation error in terms of the file: `nodes[3].stake has value 'much': …`."""
    return [
        Problem(
            where=_field_path(problem["loc"]) or "the file",
            value=_shown_value(problem),
            rule=problem["msg"].removeprefix("Value error, "),
        )
        for problem in error.errors(include_url=False, include_context=False)
    ]


def _field_path(loc: tuple[int | str, ...]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")


def _shown_value(problem: Any) -> str:
    if problem["type"] in ("missing", "json_invalid"):
        return ""
    text = repr(problem["input"])
    return text if len(text) <= MAX_VALUE_CHARS_SHOWN else text[: MAX_VALUE_CHARS_SHOWN - 1] + "…"


def checked_axon_address(ip: str, port: int, *, allow_private: bool) -> str:
    """The address in its plain form, or an error that says why validators could not use it.

    The chain itself accepts private ranges silently; the miner would then wait for offers for ever.
    """
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:
        raise ChainError(
            f"{ip!r} is not an IP address: give the public IPv4 address of this machine, not a host name",
            code=BAD_ADDRESS,
        ) from None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if not 1 <= port <= 65535:
        raise ChainError(f"port {port} is not a TCP port: give one from 1 to 65535", code=BAD_ADDRESS)
    if address.is_unspecified or address.is_multicast:
        raise ChainError(
            f"{address} is not the address of one machine: give its public IPv4 address", code=BAD_ADDRESS
        )
    if not address.is_global and not allow_private:
        raise ChainError(
            f"{address} is {_address_kind(address)}: validators cannot reach it. Give the public address, "
            "or set ALLOW_PRIVATE_AXON=true for a test network",
            code=BAD_ADDRESS,
        )
    return str(address)


def is_unreachable_for_fiber(ip: str) -> bool:
    """fiber builds `http://ip:port` without brackets, so its validators cannot call an IPv6 axon."""
    return ipaddress.ip_address(ip).version == 6


def result_without_submitting(graph: Metagraph, key: bytes, ip: str, port: int) -> PublishResult | None:
    """The result when nothing has to be submitted: the address is there already, or never can be."""
    node = graph.nodes_by_key.get(key)
    if node is None:
        return not_registered(graph.netuid)
    if shows_address(node, ip, port):
        return PublishResult(PublishOutcome.UNCHANGED, f"{host_and_port(ip, port)} is published already")
    return None


def not_registered(netuid: int) -> PublishResult:
    return PublishResult(
        PublishOutcome.REFUSED,
        f"the hotkey is not registered on subnet {netuid}: register it with "
        f"`btcli subnets register --netuid {netuid}`, then publish again",
    )


def shows_address(node: Node | None, ip: str, port: int) -> bool:
    return node is not None and (node.ip, node.port) == (ip, port)


def _address_kind(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    if address.is_loopback:
        return "this machine's own loopback address"
    if address.is_link_local:
        return "a link-local address"
    if address.is_private:
        return "a private or reserved address"
    return "not a public address"
