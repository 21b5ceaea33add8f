"""A host of H100s for NVML: the stub library, and the file that describes its GPUs."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.doubles.required import missing

SOURCE = Path(__file__).with_name("nvml_stub.c")
LOST = 15
UNKNOWN = 999
DRIVER_NOT_LOADED = 9


class NvmlHost:
    def __init__(self, library: Path, state: Path, count: int) -> None:
        self.state_file = state
        self._state: dict[str, Any] = {"count": count}
        self.environment = {"LD_LIBRARY_PATH": str(library.parent), "NVML_STUB_STATE": str(state)}
        self.set()

    def set(self, **state: Any) -> None:
        """Words of the whole host: `count=3`, `topology="pairs"`."""
        self._state |= state
        self._write()

    def gpu(self, index: int, **state: Any) -> None:
        """Of one GPU: `error=LOST`. None removes a fault."""
        for name, value in state.items():
            self._state[f"{index}.{name}"] = value
        self._state = {name: value for name, value in self._state.items() if value is not None}
        self._write()

    def xid(self, index: int, code: int) -> None:
        """The driver reports an error about a GPU."""
        self.gpu(index, xid=code, xids=self._state.get(f"{index}.xids", 0) + 1)

    def play(self, index: int, frames: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Bring a GPU into one state after the other; each stays until the next is asked for."""
        for frame in frames:
            self.gpu(index, **frame)
            yield frame

    def _write(self) -> None:
        partial = self.state_file.with_suffix(".part")
        partial.write_text(json.dumps(self._state))
        partial.replace(self.state_file)


#: Bits of the reasons why clocks are held down.
IDLE, POWER_CAP, HARDWARE, SOFTWARE_HEAT, HEAT = 0x1, 0x4, 0x8, 0x20, 0x40
#: What `lacks` takes from a GPU so that it is like one before Hopper, or a consumer's.
BEFORE_HOPPER = "gpm"
CONSUMER = "gpm ecc nvlink_counter pcie_counter pcie_now power_limit_mw events"


def training(**more: Any) -> dict[str, Any]:
    """The state of a GPU that trains."""
    usual = {"utilization": 97, "used_mib": 60_000, "temperature": 62, "power_mw": 640_000, "sm_clock": 1755}
    profile = {"throttle": 0, "tensor": 41, "dram": 55, "pcie_mib": 1200, "nvlink_mib": 30_000}
    return {**usual, **profile, **more}


def idling() -> dict[str, Any]:
    return training(
        utilization=0,
        used_mib=4,
        temperature=31,
        power_mw=70_000,
        sm_clock=345,
        throttle=IDLE,
        tensor=0,
        dram=0,
        pcie_mib=0,
        nvlink_mib=0,
    )


def heating(low: int = 60, high: int = 92, steps: int = 5) -> list[dict[str, Any]]:
    """A GPU that gets hotter, until heat holds its clocks down."""
    degrees = [low + (high - low) * step // (steps - 1) for step in range(steps)]
    return [
        training(temperature=one, **({"throttle": HEAT, "sm_clock": 1200} if one >= 88 else {}))
        for one in degrees
    ]


def uuid(index: int) -> str:
    return f"GPU-{index:08x}-0000-4000-8000-000000000000"


def compiled(folder: Path) -> Path:
    """The library, made by the C compiler; skips where there is none, unless this is CI."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        missing("no C compiler for the NVML stub")
    library = folder / "libnvidia-ml.so.1"
    flags = ["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-O1", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([compiler, *flags, "-o", library, SOURCE], check=True)
    return library
