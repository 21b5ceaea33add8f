"""Power limits that were lowered come back, without waiting for a driver that hangs."""

from __future__ import annotations

from pathlib import Path

from miner.fleet.power import PowerLimits
from miner.fleet.sources import ScanFailed


class PowerSupply:
    def __init__(self) -> None:
        self.watts: dict[str, float] = {}
        self.hangs = False
        self.asked = 0

    async def set_power_limit(self, gpu: str, watts: float) -> float:
        self.asked += 1
        if self.hangs:
            raise ScanFailed("the driver hangs")
        self.watts[gpu] = watts
        return watts


async def test_a_driver_that_hangs_is_asked_once_and_the_next_start_puts_all_limits_back(
    tmp_path: Path,
) -> None:
    supply, file = PowerSupply(), tmp_path / "power-limits.json"
    limits = PowerLimits(supply, file)
    for gpu in ("g0", "g1"):
        await limits.set_share(gpu, 0.9, 700.0)
    supply.hangs, supply.asked = True, 0
    await limits.restore()
    assert (supply.asked, limits.lowered) == (1, ["g0", "g1"])
    supply.hangs = False
    again = PowerLimits(supply, file)
    await again.restore_after_restart()
    assert (supply.watts, again.lowered) == ({"g0": 700.0, "g1": 700.0}, [])
