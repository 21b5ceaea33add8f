"""FLEET_FILE: facts about this host that cannot be detected, or are detected wrongly."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from core.config.files import ConfigFileModel, ConfigKind, LoadedConfig
from core.config.live import LiveConfig
from core.config.problems import SchemaKeys
from core.domain.errors import ConfigError
from core.domain.hardware import PCIE_BANDWIDTH, GpuKind, GpuLink, UnknownGpu, find_kind, parse_gpus
from core.domain.records import Record
from core.domain.units import Bytes
from miner.fleet.sources import FixedGpuSource, GpuScan, GpuSource, ScannedGpu
from miner.settings import Settings
from miner.settings.values import Price

log = logging.getLogger(__name__)


class LinkKeyword(StrEnum):
    ALL = "all"
    NONE = "none"


def _gpus(value: Any) -> Any:
    if value is not None:
        try:
            parse_gpus(str(value))
        except UnknownGpu as error:
            raise ValueError(str(error)) from None
    return value


class HostTerms(Record):
    """The surroundings of the GPUs. Default: as the system reports; rates: the planner's."""

    cpu_cores: int | None = Field(default=None, ge=1, description="Cores for training.")
    memory: Bytes | None = Field(default=None, description="Memory for training.")
    download: Bytes | None = Field(default=None, description="From the hub to this host, per second.")
    upload: Bytes | None = Field(default=None, description="From this host to the hub, per second.")
    disk: Bytes | None = Field(default=None, description="From the disk into GPU memory, per second.")

    def facts(self) -> dict[str, object]:
        """The fields of `Hardware` that are set."""
        facts = {
            "cpu_cores": self.cpu_cores,
            "cores": None if self.cpu_cores is None else (),  # their number is known, not which ones
            "memory_bytes": self.memory,
            "download_rate": self.download,
            "upload_rate": self.upload,
            "disk_rate": self.disk,
        }
        return {name: value for name, value in facts.items() if value is not None}


class FleetTerms(ConfigFileModel):
    """One file."""

    gpus: Annotated[str | None, BeforeValidator(_gpus)] = Field(
        default=None, description="The GPUs, like `4xH100`, where they cannot be scanned. Unset: by GPUS."
    )
    ids: list[str] = Field(
        default_factory=list,
        description="With `gpus`: their ids for backends, in their order. Unset: 0, 1, 2…",
    )
    links: LinkKeyword | list[list[int]] | None = Field(
        default=None,
        description="Fast links: `all`, `none`, or groups of indices, like `[[0, 1], [2, 3]]`. "
        "Unset: as NVML says, or as is usual for such GPUs.",
    )
    exclude: dict[str, str] = Field(
        default_factory=dict,
        description="GPUs to leave alone, by index or id, or a cluster's nodes by name, each with the "
        "reason. A job that runs on one may finish.",
    )
    kinds: dict[str, str] = Field(
        default_factory=dict,
        description="What a cluster's GPUs are, where their type does not say it: a node's name, a type, or "
        "`gpu` for those without a type, each with a kind like `H100`.",
    )
    prices: dict[str, Price] = Field(
        default_factory=dict,
        description="What one GPU of a kind costs in an hour, in dollars, like `H100: 2.5`. Other kinds: by "
        "GPU_PRICE_PER_HOUR.",
    )
    host: HostTerms = Field(default=HostTerms(), description="What surrounds the GPUs.")

    @model_validator(mode="after")
    def stands_alone(self) -> FleetTerms:
        if self.extends is not None:
            raise ValueError("a fleet file stands alone: extends is for profiles and policies")
        if self.ids and self.gpus is None:
            raise ValueError("ids name the GPUs of `gpus`: write `gpus` as well")
        if len(set(self.ids)) < len(self.ids):
            raise ValueError("the same id is written twice")
        return self


FLEET_FILE_KIND = ConfigKind(
    "fleet file",
    "fleet",
    FleetTerms,
    SchemaKeys(FleetTerms, {"cards": "gpus", "nvlink": "links", "memory_bytes": "memory"}, [(), ("host",)]),
    may_be_empty=True,
)


FollowedFleetFile = LiveConfig[LoadedConfig[FleetTerms]]


def follow_fleet_file(
    path: Path, on_problem: Callable[[ConfigError], None] | None = None
) -> FollowedFleetFile:
    """Read the file, and again whenever it changes; after a bad edit the last good content stays."""
    return LiveConfig(FLEET_FILE_KIND.load, str(path), (), on_problem)


class Prices(NamedTuple):
    """Prices in dollars: of a GPU in an hour, and of a TAO; None where nobody gave one."""

    of_others: float | None = None
    by_kind: Mapping[str, float] = {}
    tao: float | None = None

    @classmethod
    def in_force(cls, settings: Settings, terms: FleetTerms | None) -> Prices:
        by_kind = {} if terms is None else terms.prices
        named = {(kind.name if (kind := find_kind(name)) else name): by_kind[name] for name in by_kind}
        return cls(settings.gpu_price_per_hour, named, settings.tao_price)

    def __bool__(self) -> bool:
        """True if a GPU has a price."""
        return self.of_others is not None or bool(self.by_kind)

    def of(self, kind: str | None) -> float | None:
        """Look up the price of a kind by its name, like `H100-SXM`."""
        return self.of_others if kind is None else self.by_kind.get(kind, self.of_others)


NO_PRICES = Prices()


def gpu_prices(settings: Settings) -> Prices:
    """Return the prices in force: GPU_PRICE_PER_HOUR and FLEET_FILE as they are now."""
    try:
        file = follow_fleet_file(settings.fleet_file) if settings.fleet_file else None
    except ConfigError as error:  # what is stored can be looked at still
        log.warning("no costs are shown: %s", error)
        return NO_PRICES
    return Prices.in_force(settings, file.current.content if file else None)


class FleetFileSource:
    """The GPUs that the file names, or those of another source with the file's corrections."""

    def __init__(
        self, file: LiveConfig[LoadedConfig[FleetTerms]], fallback: GpuSource, *, is_local: bool = True
    ) -> None:
        """`is_local`: the other source finds this machine's GPUs, which the file may name instead."""
        self._file, self._fallback, self._is_local = file, fallback, is_local

    async def scan(self) -> GpuScan:
        terms = self._file.current.content
        source: GpuSource = self._fallback
        if terms.gpus is not None and self._is_local:
            source = FixedGpuSource(parse_gpus(terms.gpus), f"FLEET_FILE, {terms.gpus}", terms.ids)
        return apply_terms(await source.scan(), terms)

    async def close(self) -> None:
        await self._fallback.close()


def apply_terms(scan: GpuScan, terms: FleetTerms) -> GpuScan:
    gpus = list(scan.gpus)
    if terms.links is not None:
        names = {gpu.index: gpu.id for gpu in gpus if not gpu.node}
        groups = _groups(terms.links, list(names))
        gpus = [gpu if gpu.node else _linked(gpu, groups.get(gpu.index, frozenset()), names) for gpu in gpus]
    if terms.exclude:
        gpus = [replace(gpu, excluded=_exclusion(gpu, terms.exclude) or gpu.excluded) for gpu in gpus]
    return replace(scan, gpus=tuple(gpus))


def _exclusion(gpu: ScannedGpu, exclude: Mapping[str, str]) -> str | None:
    """Look up a GPU by its id, by its index on this machine, or by the name of another node."""
    return exclude.get(gpu.id) or exclude.get(gpu.node or str(gpu.index))


def _groups(links: LinkKeyword | list[list[int]], indices: Sequence[int]) -> dict[int, frozenset[int]]:
    if links is LinkKeyword.NONE:
        return {}
    groups = [indices] if isinstance(links, LinkKeyword) else links
    return {index: frozenset(group) for group in groups for index in group}


def _linked(gpu: ScannedGpu, group: frozenset[int], names: dict[int, str]) -> ScannedGpu:
    linked = frozenset(names[index] for index in group if index in names and index != gpu.index)
    return replace(gpu, linked=linked, kind=_with_link(gpu.kind, len(linked)))


def _with_link(kind: GpuKind, neighbours: int) -> GpuKind:
    link = (GpuLink.PCIE, GpuLink.NVLINK_PAIR)[neighbours] if neighbours < 2 else GpuLink.NVLINK
    if link is kind.link:
        return kind
    rate = min(kind.link_bandwidth, PCIE_BANDWIDTH) if link is GpuLink.PCIE else kind.link_bandwidth
    return kind.model_copy(update={"link": link, "link_bandwidth": rate})
