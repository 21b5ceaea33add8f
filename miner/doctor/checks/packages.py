"""Check the installed packages of the daemon and of the trainer: start-up code, and files changed since.

The environments are read and never run: starting their Python would run the code in question. Files are
compared with each package's RECORD, which comes with the wheel and is completed by pip; the wheel itself was
checked by its hash at installation.
"""

from __future__ import annotations

import csv
import hashlib
import os
import sys
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from miner.backends.environment import training_python
from miner.doctor.examine import CheckContext, DoctorCheck
from miner.support.findings import Finding, ok, skip, warn

WHAT = "packages"
#: Known `.pth` files with code for every start of Python. Others are reported: in 2026 wallets were stolen
#: that way.
KNOWN_START_CODE = frozenset({"distutils-precedence.pth", "coloredlogs.pth"})
#: Imported at every start of Python, as a file of any kind or a folder, and part of no package of ours.
START_MODULES = frozenset({"sitecustomize", "usercustomize"})
#: Files that virtualenv and `uv venv` make with the environment itself: both of them, or neither.
MADE_WITH_ENVIRONMENT = ("_virtualenv.pth", "_virtualenv.py")
#: Time for hashing files that are newer than their installation; in a copied environment all are.
READ_SECONDS = 5.0
#: Tolerance: pip writes RECORD last, but within the same second as other files.
SLACK_NS = 1_000_000_000
LIMIT_SECONDS = 60.0
SHOWN = 5


class Recorded(NamedTuple):
    """The entry of a file in one package's RECORD."""

    digest: str
    size: str
    #: When RECORD was written, by the clock of the file system, which no program can set.
    installed: int


@dataclass
class Environment:
    """One folder of installed packages."""

    folder: Path
    packages: int = 0
    #: By file: some packages share files, and each one's version is right.
    recorded: dict[str, list[Recorded]] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    #: Files that were not hashed for lack of time.
    unread: int = 0


def check_packages(context: CheckContext) -> Iterator[Finding]:
    yield from findings_of(sys.prefix, "the daemon's")
    trainer = training_python(context.settings)
    if trainer is not None and str(trainer.parent.parent) != sys.prefix:
        yield from findings_of(str(trainer.parent.parent), "the trainer's")


def findings_of(prefix: str, whose: str) -> Iterator[Finding]:
    folders = sorted(Path(prefix).glob("lib/python3.*/site-packages"))
    if not folders:
        yield skip(WHAT, f"{whose}: no site-packages below {prefix}")
    for folder in folders:
        site = examine_environment(folder)
        problems = [*_start_code(site), *(f"{name} was changed" for name in site.changed)]
        if problems:
            more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            yield warn(
                WHAT,
                f"{whose} in {folder}: {', '.join(problems[:SHOWN])}{more}",
                "find out who did that; if none of your people did, treat the hotkey as stolen. Then remove "
                "the environment and make install (or make training) again",
            )
        else:
            yield ok(
                WHAT,
                f"{whose} {site.packages} in {folder}: {len(site.recorded)} files of code as installed",
            )
        if site.unread:
            yield skip(
                WHAT, f"{whose}: {site.unread} files newer than their installation, too many to read all"
            )


def examine_environment(folder: Path, seconds: float = READ_SECONDS) -> Environment:
    site = Environment(folder)
    for record in sorted(folder.glob("*.dist-info/RECORD")):
        site.packages += 1
        installed = record.stat().st_ctime_ns
        with record.open(encoding="utf-8", newline="") as lines:
            for row in csv.reader(lines):
                if len(row) == 3 and _is_code(row[0]) and row[1].startswith("sha256="):
                    digest = row[1].removeprefix("sha256=")
                    site.recorded.setdefault(row[0], []).append(Recorded(digest, row[2], installed))
    deadline = time.monotonic() + seconds
    for name, versions in site.recorded.items():
        same = _is_as_recorded(os.path.join(folder, name), versions, time.monotonic() < deadline)
        if same is None:
            site.unread += 1
        elif not same:
            site.changed.append(name)
    return site


def _is_code(name: str) -> bool:
    return name.endswith((".py", ".pth")) or ".so" in name or name.startswith("../../../bin/")


def _is_as_recorded(path: str, versions: list[Recorded], may_read: bool) -> bool | None:
    """Return None if the file is newer than its installation and there is no time to hash it."""
    try:
        now = os.stat(path)
        if all(version.size and now.st_size != int(version.size) for version in versions):
            return False
        if now.st_ctime_ns <= max(version.installed for version in versions) + SLACK_NS:
            return True
        return _digest(path) in {version.digest for version in versions} if may_read else None
    except (OSError, ValueError):
        return False


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return urlsafe_b64encode(hashlib.file_digest(file, "sha256").digest()).rstrip(b"=").decode()


def _start_code(site: Environment) -> Iterator[str]:
    """Yield unexpected code that runs at each start of this Python."""
    for path in sorted(site.folder.glob("*.pth")):
        if path.name not in site.recorded:
            if path.name not in MADE_WITH_ENVIRONMENT or not _is_as_made(site.folder):
                yield f"{path.name} belongs to no package"
        elif path.name not in KNOWN_START_CODE and _has_code(path):
            yield f"{path.name} runs code at each start of Python"
    for name in sorted(os.listdir(site.folder)):
        if name.partition(".")[0] in START_MODULES:
            yield f"{name} runs at each start of Python"


def _is_as_made(folder: Path) -> bool:
    """No change after the environment itself was made."""
    try:
        made = (folder.parents[2] / "pyvenv.cfg").stat().st_ctime_ns + SLACK_NS
        return all((folder / name).stat().st_ctime_ns <= made for name in MADE_WITH_ENVIRONMENT)
    except OSError:
        return False


def _has_code(path: Path) -> bool:
    lines = path.read_text("utf-8-sig", errors="replace").splitlines()  # as Python reads it
    return any(line.startswith(("import ", "import\t")) for line in lines)


PACKAGES_CHECK = DoctorCheck(WHAT, check_packages, LIMIT_SECONDS)
