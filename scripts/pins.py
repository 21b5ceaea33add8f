"""Read and write `requirements/`: exact versions with the hashes of every file that may be installed.

Each package is in the first file that needs it, so a part installs several files together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "requirements"
HEADER = "# Exact versions and the hashes of their files, for pip's --require-hashes. Written by: make lock\n"
ENTRY = re.compile(
    r"^([\w.-]+)(===?)([^\s;\\]+)(?: ; ([^\\\n]+?))? \\\n((?:    --hash=sha256:\w{64}(?: \\)?\n?)+)",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Pin:
    name: str
    version: str
    marker: str = ""
    hashes: tuple[str, ...] = ()
    #: `===` keeps out builds of the same version that have a suffix, as in 2.13.0+cpu.
    operator: str = "=="

    def __str__(self) -> str:
        marker = f" ; {self.marker}" if self.marker else ""
        return f"{self.name}{self.operator}{self.version}{marker}"

    def entry(self) -> str:
        return " \\\n".join([str(self), *(f"    --hash=sha256:{value}" for value in self.hashes)]) + "\n"


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read(path: Path) -> list[Pin]:
    """Return the pins of one file; none if it does not exist."""
    text = path.read_text("utf-8") if path.exists() else ""
    return [
        Pin(name, version, marker, tuple(re.findall(r"sha256:(\w+)", hashes)), operator)
        for name, operator, version, marker, hashes in ENTRY.findall(text)
    ]


def write(path: Path, pins: Iterable[Pin]) -> None:
    path.parent.mkdir(exist_ok=True)
    entries = sorted(pins, key=lambda pin: (pin.name, pin.marker))
    path.write_text(HEADER + "".join(pin.entry() for pin in entries))
