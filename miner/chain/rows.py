"""Nodes as JSON: the shape that the nodes file and the metagraph cache share, checked field by field."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from core.errors import Problem
from miner.chain.base import Node
from miner.fiber import public_key

#: How much of an offending value an error shows.
SHOWN_CHARS = 60


def _hotkey(value: str) -> str:
    if public_key(value) is None:
        raise ValueError("not an ss58 address of 32 bytes (a hotkey looks like 5F3sa2TJAWMqDhXG6jhV4N8ko9…)")
    return value


def _ip(value: str) -> str:
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        raise ValueError("not an IPv4 or IPv6 address") from None


Fraction = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
Amount = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


class NodeRow(BaseModel):
    """One node. Only the hotkey has to be given; a node without a uid gets its place in the list."""

    model_config = ConfigDict(extra="forbid")

    hotkey: Annotated[str, AfterValidator(_hotkey)]
    uid: Annotated[int, Field(strict=True, ge=0, le=65535)] | None = None
    coldkey: str = ""
    stake: Amount = 0.0
    validator_permit: Annotated[bool, Field(strict=True)] = False
    ip: Annotated[str, AfterValidator(_ip)] | None = None
    port: Annotated[int, Field(strict=True, ge=1, le=65535)] | None = None
    incentive: Fraction = 0.0
    last_update: Annotated[int, Field(strict=True, ge=0)] = 0
    emission: Amount = 0.0

    def node(self, place: int) -> Node:
        values = self.model_dump()
        return Node(**values | {"uid": place if self.uid is None else self.uid})


def nodes_of(rows: Iterable[NodeRow]) -> tuple[Node, ...]:
    """The nodes behind rows; ValueError when two of them are the same one."""
    nodes = tuple(row.node(place) for place, row in enumerate(rows))
    seen: dict[int, Node] = {}
    for node in nodes:
        if node.uid in seen:
            raise ValueError(f"uid {node.uid} is given to both {seen[node.uid].hotkey} and {node.hotkey}")
        seen[node.uid] = node
    return nodes


def problems(error: ValidationError) -> list[Problem]:
    """A validation error in terms of the file: `nodes[3].stake has value 'much': …`."""
    return [
        Problem(
            where=_path(found["loc"]) or "the file",
            value=_shown(found),
            rule=found["msg"].removeprefix("Value error, "),
        )
        for found in error.errors(include_url=False, include_context=False)
    ]


def _path(loc: tuple[int | str, ...]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")


def _shown(found: Any) -> str:
    if found["type"] in ("missing", "json_invalid"):
        return ""
    text = repr(found["input"])
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 1] + "…"
