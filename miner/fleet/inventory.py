"""Looks at the cards in the background and tells the fleet what it found."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from core.hardware import GpuSet, Hardware
from miner.fleet.health import Health, Judged
from miner.fleet.local import LocalFleet, Stock
from miner.fleet.looks import CannotLook, Look, NoDriver, Source

log = logging.getLogger(__name__)

#: How long the daemon's start waits for the first look. A driver that wakes its cards first takes longer.
FIRST_LOOK_SECONDS = 1.0


class Told(Protocol):
    """Hears what the operator wants to know: kind, words for people, the GPU if it is about one."""

    def __call__(self, kind: str, text: str, gpu: str | None = None) -> None: ...


class Inventory:
    def __init__(
        self,
        source: Source,
        fleet: LocalFleet,
        health: Health,
        host: Callable[[], Mapping[str, Any]],
        told: Told,
        *,
        refresh_seconds: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`host` gives what surrounds the cards, in `Hardware`'s words."""
        self._source, self._fleet, self._health = source, fleet, health
        self._host, self._told = host, told
        self._refresh_seconds = refresh_seconds
        self._clock = clock
        self._wake = asyncio.Event()
        self._first = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._judged: Judged | None = None
        self.source_name = ""
        self.looked_at: float | None = None

    async def start(self) -> None:
        """Begin to look. Waits a moment for the first one: an offer that comes now should find some GPUs."""
        self._fleet.on_release(self._wake.set)
        self._task = asyncio.create_task(self._run(), name="inventory")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._first.wait(), FIRST_LOOK_SECONDS)

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        await self._source.close()

    async def look(self) -> None:
        """Look now. What can't be read changes nothing but the trouble that the fleet shows."""
        try:
            look = await self._source.look()
        except CannotLook as error:
            self._note_trouble(str(error))
        else:
            self._note_look(look)
        self._first.set()

    async def _run(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:  # a bug here must not leave the daemon blind for good
                log.exception("looking at the GPUs failed unexpectedly; it is tried again")
                self._note_trouble("looking at the GPUs failed; the daemon's log says why")
            await self._pause()

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), self._refresh_seconds)
        self._wake.clear()

    def _note_trouble(self, text: str) -> None:
        trouble = self._fleet.stock.trouble
        self._fleet.update(self._stock(self._judged, text))
        if trouble is None:
            self._told("inventory_unreadable", text)

    def _note_look(self, look: Look) -> None:
        fleet = self._fleet
        had_trouble = fleet.stock.trouble is not None
        self.source_name, self.looked_at = look.source, self._clock()
        self._judged = self._health.judge(look, self.looked_at, fleet.is_in_use, fleet.released_at)
        fleet.update(self._stock(self._judged, None))
        if had_trouble:
            self._told("inventory_recovered", f"{look.source} can be read again: {len(look.cards)} cards")
        for change in self._judged.changes:
            self._told(change.kind, f"GPU {change.gpu}: {change.text}", change.gpu)

    def _stock(self, judged: Judged | None, trouble: str | None) -> Stock:
        if judged is None:
            return Stock(trouble=trouble)
        usable = sum(gpu.out is None for gpu in judged.gpus)
        hardware = installed = None
        if judged.kind is not None:
            gpus = GpuSet(kind=judged.kind, count=usable)
            hardware = Hardware.model_validate({**self._host(), "gpus": gpus})
            installed = hardware.model_copy(update={"gpus": gpus.take(len(judged.gpus))})
        return Stock(
            gpus=judged.gpus,
            hardware=hardware,
            installed=installed,
            failed=judged.failed,
            unclean=judged.unclean,
            shared=judged.shared,
            trouble=trouble,
            sees_memory=judged.sees_memory,
        )


class AutoSource:
    """The driver's cards, or what else there is on a host without any driver."""

    def __init__(self, driver: Source, otherwise: Source) -> None:
        self._source, self._otherwise = driver, otherwise
        self._is_settled = False

    async def look(self) -> Look:
        try:
            look = await self._source.look()
        except NoDriver:
            if self._is_settled:
                raise
            await self._source.close()
            self._source = self._otherwise
            look = await self._source.look()
        self._is_settled = True
        return look

    async def close(self) -> None:
        await self._source.close()
