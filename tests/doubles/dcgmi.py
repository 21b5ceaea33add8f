"""A `dcgmi` for PATH: prints what `dcgmi dmon` prints on a host with these GPUs, again and again."""

from __future__ import annotations

import sys
from pathlib import Path

_PROGRAM = """#!{python}
import sys, time
open({calls!r}, "a").write(" ".join(sys.argv[1:]) + "\\n")
rows = {rows!r}
while True:
    print("#Entity   NVIDX   TENSO    DRAMA    \\nID                                ", flush=True)
    for row in rows:
        print(row, flush=True)
    if {ends!r}:
        sys.exit(1)
    time.sleep(0.05)
"""


class FakeDcgmi:
    def __init__(self, folder: Path, rows: list[str], *, ends: bool = False) -> None:
        """`rows`: as they are printed, like `GPU 0     0       0.412    0.173`. `ends`: after one table."""
        folder.mkdir(exist_ok=True)
        self.folder, self.program, self._calls = folder, folder / "dcgmi", folder / "calls"
        self.program.write_text(
            _PROGRAM.format(python=sys.executable, calls=str(self._calls), rows=rows, ends=ends)
        )
        self.program.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines() if self._calls.exists() else []
