"""Which device files a run may see: those of its own cards, and the driver's common ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/gpus")
DEVICES = Path("/dev")
_COMMON = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")


def device_files(gpus: Sequence[str], driver: Path = DRIVER, devices: Path = DEVICES) -> list[Path]:
    if not gpus:
        return []
    minors = _minors(driver)
    if all(gpu in minors for gpu in gpus):
        cards = [devices / f"nvidia{minors[gpu]}" for gpu in gpus]
    else:
        # MIG slices, or a driver that does not say: all of them, and CUDA_VISIBLE_DEVICES alone chooses.
        cards = sorted(path for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
        cards += sorted(devices.glob("nvidia-caps"))
    return [path for path in (*(devices / name for name in _COMMON), *cards) if path.exists()]


def _minors(driver: Path) -> dict[str, str]:
    """The number in the device file's name, by UUID and by index (which is the order of the bus)."""
    found: dict[str, str] = {}
    for index, card in enumerate(sorted(driver.glob("*/information"))):
        text = card.read_text(errors="replace")
        minor = re.search(r"^Device Minor:\s*(\d+)", text, re.MULTILINE)
        uuid = re.search(r"^GPU UUID:\s*(\S+)", text, re.MULTILINE)
        if minor:
            found[str(index)] = minor[1]
            if uuid:
                found[uuid[1]] = minor[1]
    return found
