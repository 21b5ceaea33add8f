"""A host of H100s for NVML: the stub library, and the file that describes its GPUs."""

from __future__ import annotations

import json
import shutil
import subprocess
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

    def _write(self) -> None:
        partial = self.state_file.with_suffix(".part")
        partial.write_text(json.dumps(self._state))
        partial.replace(self.state_file)


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
