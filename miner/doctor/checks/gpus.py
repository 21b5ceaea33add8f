"""The cards that trainings would get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from miner.doctor.examine import Check, Surroundings
from miner.doctor.finding import Finding, fail, ok, warn
from miner.fleet.build import look_once
from miner.fleet.local import Stock

#: The first look of a driver that wakes its cards for it.
LIMIT_SECONDS = 40.0


def run(surroundings: Surroundings) -> Iterator[Finding]:
    fleet, source = look_once(surroundings.settings)
    yield from judged(fleet.stock, source)


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
