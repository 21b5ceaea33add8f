"""FLEET_FILE: what the operator knows of this host that nobody can see, or knows better than the driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from core.errors import ConfigError
from core.facts import Record
from core.hardware import PCIE_BANDWIDTH, GpuKind, Link, UnknownGpu, parse_gpus
from core.layers.files import FileModel, Kind, Layer
from core.layers.live import Live
from core.layers.nearest import Keys
from core.units import Bytes
from miner.fleet.fixed import FixedSource
from miner.fleet.looks import Look, Seen, Source


class LinkWord(StrEnum):
    ALL = "all"
    NONE = "none"


def _gpus(value: Any) -> Any:
    if value is not None:
        try:
            parse_gpus(str(value))
        except UnknownGpu as error:
            raise ValueError(str(error)) from None
    return value


class Host(Record):
    """What surrounds the cards. Unset: as the system says, rates as the planner's defaults."""

    cpu_cores: int | None = Field(default=None, ge=1, description="Cores for training.")
    memory: Bytes | None = Field(default=None, description="Memory for training.")
    download: Bytes | None = Field(default=None, description="From the hub to this host, per second.")
    upload: Bytes | None = Field(default=None, description="From this host to the hub, per second.")
    disk: Bytes | None = Field(default=None, description="From the disk into GPU memory, per second.")

    def facts(self) -> dict[str, Any]:
        """In `Hardware`'s words."""
        named = {
            "cpu_cores": self.cpu_cores,
            "memory_bytes": self.memory,
            "download_rate": self.download,
            "upload_rate": self.upload,
            "disk_rate": self.disk,
        }
        return {name: value for name, value in named.items() if value is not None}


class FleetTerms(FileModel):
    """One file."""

    gpus: Annotated[str | None, BeforeValidator(_gpus)] = Field(
        default=None, description="The cards, like `4xH100`, where they can't be looked at. Unset: by GPUS."
    )
    ids: list[str] = Field(
        default_factory=list,
        description="With `gpus`: what engines call the cards, in their order. Unset: 0, 1, 2…",
    )
    links: LinkWord | list[list[int]] | None = Field(
        default=None,
        description="Fast links: `all`, `none`, or groups of indices, like `[[0, 1], [2, 3]]`. "
        "Unset: as NVML says, or as is usual for such cards.",
    )
    exclude: dict[str, str] = Field(
        default_factory=dict,
        description="Cards to leave alone, by index or id, each with the reason. "
        "A job that runs on one may finish.",
    )
    host: Host = Field(default=Host(), description="What surrounds the cards.")

    @model_validator(mode="after")
    def stands_alone(self) -> FleetTerms:
        if self.extends is not None:
            raise ValueError("a fleet file stands alone: extends is for profiles and policies")
        if self.ids and self.gpus is None:
            raise ValueError("ids name the cards of gpus: write gpus as well")
        if len(set(self.ids)) < len(self.ids):
            raise ValueError("the same id is written twice")
        return self


KEYS = Keys(FleetTerms, {"cards": "gpus", "nvlink": "links", "memory_bytes": "memory"}, [(), ("host",)])
FLEET = Kind(word="fleet file", folder="fleet", model=FleetTerms, advice=KEYS.advice, may_be_empty=True)


class LoadedFleet:
    def __init__(self, layers: Sequence[Layer[FleetTerms]]) -> None:
        self.layers = tuple(layers)

    @property
    def terms(self) -> FleetTerms:
        return self.layers[-1].content


def follow(path: Path, on_problem: Callable[[ConfigError], None] | None = None) -> Live[LoadedFleet]:
    """The file as it is, and as it becomes: a bad edit keeps what was read last."""
    return Live(lambda: LoadedFleet(FLEET.layers(str(path))), on_problem)


class FileSource:
    """Looks as the file says, or as somebody else sees with the file's corrections."""

    def __init__(self, file: Live[LoadedFleet], otherwise: Source) -> None:
        self._file, self._otherwise = file, otherwise

    async def look(self) -> Look:
        terms = self._file.current().terms
        source: Source = self._otherwise
        if terms.gpus is not None:
            source = FixedSource(parse_gpus(terms.gpus), f"FLEET_FILE, {terms.gpus}", terms.ids)
        return corrected(await source.look(), terms)

    async def close(self) -> None:
        await self._otherwise.close()


def corrected(look: Look, terms: FleetTerms) -> Look:
    cards = list(look.cards)
    if terms.links is not None:
        groups = _groups(terms.links, [card.index for card in cards])
        names = {card.index: card.id for card in cards}
        cards = [_linked(card, groups.get(card.index, frozenset()), names) for card in cards]
    if terms.exclude:
        cards = [
            replace(card, excluded=terms.exclude.get(card.id) or terms.exclude.get(str(card.index)))
            for card in cards
        ]
    return replace(look, cards=tuple(cards))


def _groups(links: LinkWord | list[list[int]], every: Sequence[int]) -> dict[int, frozenset[int]]:
    if links is LinkWord.NONE:
        return {}
    groups = [every] if isinstance(links, LinkWord) else links
    return {index: frozenset(group) for group in groups for index in group}


def _linked(card: Seen, group: frozenset[int], names: dict[int, str]) -> Seen:
    linked = frozenset(names[index] for index in group if index in names and index != card.index)
    return replace(card, linked=linked, kind=_with_link(card.kind, len(linked)))


def _with_link(kind: GpuKind, neighbours: int) -> GpuKind:
    link = (Link.PCIE, Link.NVLINK_PAIR)[neighbours] if neighbours < 2 else Link.NVLINK
    if link is kind.link:
        return kind
    rate = min(kind.link_bandwidth, PCIE_BANDWIDTH) if link is Link.PCIE else kind.link_bandwidth
    return kind.model_copy(update={"link": link, "link_bandwidth": rate})
