"""The cards as the driver knows them, asked through a process that may hang without harm (`nvml_worker`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, Field

import miner
from core.hardware import from_nvml
from miner.fleet.looks import CannotLook, Look, NoDriver, Seen

log = logging.getLogger(__name__)

WORKER = (sys.executable, "-P", "-m", "miner.fleet.nvml_worker")
#: What the driver's library and the dynamic linker are told through the environment; nothing else goes there.
_HANDED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
_HANDED_ON_PREFIXES = ("CUDA_", "NVIDIA_", "NVML_")
#: One look at 64 cards is 20 kB.
_MAX_LINE = 2**20
#: Processes that hang in the driver, where no signal ends them, while another one is tried.
_MOST_DYING = 3


class _Card(BaseModel):
    """A line's card, as the worker writes it."""

    slot: int
    error: str | None = None
    uuid: str = ""
    name: str = ""
    capability: tuple[int, int] = (0, 0)
    total: int = Field(default=0, ge=0)
    used: int = Field(default=0, ge=0)
    processes: int = 0
    slice: bool = False
    bus: str = ""
    peers: tuple[str, ...] = ()
    switch: bool = False


class _Told(BaseModel):
    cards: tuple[_Card, ...] = ()
    driver: str = ""
    trouble: str | None = None
    absent: bool = False


class NvmlSource:
    def __init__(
        self, *, timeout: float = 10.0, start_timeout: float = 60.0, worker: Sequence[str] = WORKER
    ) -> None:
        """The first look of a driver that keeps no state between its users takes seconds for each card."""
        self._timeout, self._start_timeout = timeout, start_timeout
        self._worker = worker
        self._process: asyncio.subprocess.Process | None = None
        self._dying: set[asyncio.Task[int]] = set()

    async def look(self) -> Look:
        limit = self._timeout if self._process is not None else self._start_timeout
        try:
            told = await asyncio.wait_for(self._ask(), limit)
        except TimeoutError:
            self._drop()
            raise CannotLook(f"NVML did not answer within {limit:g} s: the driver hangs; see dmesg") from None
        except BaseException:
            self._drop()
            raise
        if told.trouble is not None or any(card.error for card in told.cards):
            # The library keeps what it knew of a card when opened: only a new process sees a reset one.
            self._drop()
        if told.trouble is not None:
            raise (NoDriver if told.absent else CannotLook)(told.trouble)
        return _look(told)

    async def close(self) -> None:
        self._drop()
        if self._dying:
            await asyncio.wait(self._dying, timeout=1.0)

    async def _ask(self) -> _Told:
        try:
            process = await self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
            if not line:
                raise CannotLook(f"the NVML process ended with status {await process.wait()}")
            return _Told.model_validate_json(line)
        except (OSError, ValueError) as error:
            raise CannotLook(f"the NVML process is of no help: {error}") from error

    async def _running(self) -> asyncio.subprocess.Process:
        if len(self._dying) >= _MOST_DYING:
            raise CannotLook(
                "NVML does not answer, and its processes can't be ended: the driver hangs; see dmesg"
            )
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *self._worker,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=_environment(os.environ),
                limit=_MAX_LINE,
            )
        return self._process

    def _drop(self) -> None:
        """End the process without waiting: one that hangs in the driver ends when the driver lets it."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        task = asyncio.ensure_future(process.wait())
        self._dying.add(task)
        task.add_done_callback(self._dying.discard)


def _environment(outer: Mapping[str, str]) -> dict[str, str]:
    kept = {
        name: value
        for name, value in outer.items()
        if name in _HANDED_ON or name.startswith(_HANDED_ON_PREFIXES)
    }
    paths = (str(Path(miner.__file__).parent.parent), outer.get("PYTHONPATH"))
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _look(told: _Told) -> Look:
    good = [card for card in told.cards if card.error is None]
    by_bus = {card.bus: card.uuid for card in good if card.bus}
    on_switch = {card.uuid for card in good if card.switch}
    # A card that is cut up takes one slot and is several: then there is no telling by slots.
    renumbered = any(card.slice for card in good)
    seen = []
    for position, card in enumerate(good):
        linked = {by_bus[bus] for bus in card.peers if bus in by_bus}
        linked |= on_switch if card.switch else set()
        seen.append(_seen(card, position if renumbered else card.slot, frozenset(linked - {card.uuid})))
    errors = {card.slot: card.error for card in told.cards if card.error is not None}
    return Look(tuple(seen), errors, f"driver {told.driver}")


def _seen(card: _Card, index: int, linked: frozenset[str]) -> Seen:
    kind = from_nvml(card.name, card.total, card.capability, nvlink=bool(linked))
    return Seen(card.uuid, index, kind, linked, card.total, card.used, card.processes)
