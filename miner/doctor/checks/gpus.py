"""The cards that trainings would get."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator

from miner.doctor.examine import Check, Surroundings
from miner.doctor.finding import Finding, fail, ok, warn
from miner.fleet.build import build_fleet, build_inventory
from miner.fleet.local import Stock

#: The first look of a driver that wakes its cards for it.
LIMIT_SECONDS = 40.0


def run(surroundings: Surroundings) -> Iterator[Finding]:
    settings = surroundings.settings
    fleet = build_fleet(settings, time.time)
    inventory = build_inventory(settings, fleet, lambda *_, **__: None, time.time)

    async def look() -> None:
        try:
            await inventory.look()
        finally:
            await inventory.stop()

    asyncio.run(look())
    yield from judged(fleet.stock, inventory.source_name)


def judged(stock: Stock, source: str) -> Iterator[Finding]:
    if stock.trouble is not None:
        way = "see that nvidia-smi works for this user, or name the cards in GPUS or FLEET_FILE"
        yield fail("gpus", f"they can't be looked at: {stock.trouble}", way)
        return
    hardware = stock.hardware
    if hardware is None:
        yield fail("gpus", f"none can be used ({source})", "see god-miner fleet show")
    elif hardware.gpus.is_cpu:
        yield warn("gpus", f"a pretend card ({source})", "install the NVIDIA driver, or set GPUS")
    else:
        yield ok("gpus", f"{hardware.gpus} ({source})")
    for reason, count in Counter(gpu.out for gpu in stock.gpus if gpu.out is not None).items():
        yield warn("gpus", f"{count} out: {reason}", "see god-miner fleet show")


CHECK = Check("gpus", run, LIMIT_SECONDS)
