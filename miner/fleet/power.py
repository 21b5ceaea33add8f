"""Power limits of GPUs that a rule has lowered, and how they come back.

What a GPU had is written down before anything is changed: a daemon that dies leaves it to the next one, which
puts the limits back at its start.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import NamedTuple, Protocol

from core.system.files import write_atomically
from miner.fleet.sources import ScanFailed

log = logging.getLogger(__name__)

FILE_NAME = "power-limits.json"


class PowerRefused(Exception):
    """The limit cannot be set here: this user may not, or the GPU has none."""


class PowerSource(Protocol):
    """What can set the power limit of a GPU."""

    async def set_power_limit(self, gpu: str, watts: float) -> float:
        """Return the limit that holds now. `PowerRefused`, `ScanFailed`."""


class LoweredLimit(NamedTuple):
    #: Before anything was lowered.
    original_watts: float
    #: Of that, what holds now.
    share: float


class PowerLimits:
    def __init__(self, source: PowerSource, file: Path) -> None:
        self._source, self._file = source, file
        self._lowered: dict[str, LoweredLimit] = {}

    @property
    def lowered(self) -> list[str]:
        return list(self._lowered)

    def share(self, gpu: str) -> float:
        return self._lowered[gpu].share if gpu in self._lowered else 1.0

    async def set_share(self, gpu: str, share: float, present_watts: float | None) -> float:
        """Limit a GPU to this share of what it had; return the watts. `PowerRefused`, `ScanFailed`."""
        known = self._lowered.get(gpu)
        original = known.original_watts if known else present_watts
        if original is None:
            raise PowerRefused("its power limit is not known")
        if known is None:
            await self._write({**self._lowered, gpu: LoweredLimit(original, 1.0)})
        try:
            watts = await self._source.set_power_limit(gpu, original * share)
        except (PowerRefused, ScanFailed):
            await self._write(self._lowered)
            raise
        changed = {**self._lowered, gpu: LoweredLimit(original, share)}
        if share >= 1.0:
            del changed[gpu]
        self._lowered = changed
        await self._write(changed)
        return watts

    async def restore(self, gpus: list[str] | None = None) -> None:
        """Put limits back, all by default; what cannot be now is left for the next start."""
        for gpu in self.lowered if gpus is None else gpus:
            try:
                watts = await self.set_share(gpu, 1.0, None)
            except ScanFailed as error:  # the driver hangs: each further GPU would take its time to find out
                log.warning("power limits are still lowered (%s): %s", ", ".join(self.lowered), error)
                return
            except (PowerRefused, OSError) as error:
                log.warning("the power limit of GPU %s is still lowered: %s", gpu, error)
            else:
                log.info("the power limit of GPU %s is %.0f W again", gpu, watts)

    async def restore_after_restart(self) -> None:
        """Put back what an earlier process has left lowered."""
        self._lowered = await asyncio.to_thread(self._read)
        await self.restore()

    def _read(self) -> dict[str, LoweredLimit]:
        try:
            known = json.loads(self._file.read_bytes())
            return {str(gpu): LoweredLimit(float(watts), 0.99) for gpu, watts in known.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    async def _write(self, lowered: dict[str, LoweredLimit]) -> None:
        content = json.dumps({gpu: limit.original_watts for gpu, limit in lowered.items()})
        await asyncio.to_thread(write_atomically, self._file, content.encode())
