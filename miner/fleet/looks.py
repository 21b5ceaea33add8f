"""One look at the cards of a host, whoever takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from core.errors import GodMinerError
from core.hardware import GpuKind


class CannotLook(GodMinerError):
    """The cards could not be looked at this time. Nothing is known, nothing changes."""

    code = "inventory_unreadable"


class NoDriver(CannotLook):
    """There is no NVIDIA driver on this host at all."""

    code = "no_driver"


@dataclass(frozen=True, slots=True)
class Seen:
    """A card that answered."""

    id: str
    index: int
    kind: GpuKind
    linked: frozenset[str] = frozenset()
    total_bytes: int = 0
    #: None: nobody can tell.
    used_bytes: int | None = None
    #: Processes that compute on it.
    processes: int = 0
    #: Taken out by the operator, and why.
    excluded: str | None = None


@dataclass(frozen=True, slots=True)
class Look:
    cards: tuple[Seen, ...]
    #: Index → what is wrong with a card that is there and does not say which one it is.
    errors: Mapping[int, str] = field(default_factory=dict)
    #: "driver 550.127.05", "GPUS=4xH100".
    source: str = ""


class Source(Protocol):
    async def look(self) -> Look:
        """May take seconds. `CannotLook` when it failed, after a bounded time."""

    async def close(self) -> None: ...
