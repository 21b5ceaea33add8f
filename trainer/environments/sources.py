"""The environments, and the sources of their rows.

What plays is imported with the first row that it makes: planning and encoding know the names alone.
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from core.data.facts import MADE_ROWS
from core.domain.records import Record
from core.domain.tasks import INTERCODE, PVP_GAMES, SWE
from trainer.errors import TrainingError

#: Tokens of the longest row: a game's has two thousand at most, a shell's whole history of ten turns twice
#: that, and repairs of repositories are cut at eight thousand.
_LIMITS: Mapping[str, int] = {**dict.fromkeys(PVP_GAMES, 4096), INTERCODE: 4096, SWE: 8192}

#: Seeds of one environment; they begin with a multiple of it.
SEEDS = 10_000_000
#: Rows of one job, and the seconds that one may take.
_SHELL_ROWS, _SHELL_S, _REPAIR_ROWS = 60, 20.0, 64


def sequence_limit_of(names: Iterable[str]) -> int:
    return max((_LIMITS[name] for name in names if name in _LIMITS), default=4096)


class RowsOrder(Record):
    """An order of rows: which, until when, and where to write them."""

    environment: str
    rows: int = Field(ge=1)
    end_by: float
    cores: int = Field(ge=1)
    seed: int = 0
    folder: str
    #: Folders of the datasets that came with the task.
    requested_data: tuple[str, ...] = ()

    def parts(self) -> list[Path]:
        """Files of rows as lines, one of each worker."""
        return sorted(Path(self.folder).glob("rows-*.jsonl"))

    def made(self) -> Iterator[dict[str, Any]]:
        """The rows that there are, as many as were ordered. The last line of a worker that was killed is
        none."""
        return itertools.islice(self._lines(), self.rows)

    def _lines(self) -> Iterator[dict[str, Any]]:
        for part in self.parts():
            with part.open(encoding="utf-8") as lines:
                for line in lines:
                    try:
                        yield json.loads(line)
                    except ValueError:
                        continue

    @property
    def report_path(self) -> Path:
        """Written last."""
        return Path(self.folder) / "report.json"


class RowsReport(Record):
    """The rows that were made."""

    rows: int
    games: int
    #: Of which until the first game could begin.
    ready_s: float
    seconds: float
    notes: tuple[str, ...] = ()


class RowSource(Protocol):
    """Makes rows of one environment. Its seeds are jobs of a few seconds at most."""

    name: str

    def get_ready(self) -> None:
        """Solve and compile what every row needs."""

    def rows(self, seed: int) -> Sequence[Mapping[str, Any]]:
        """Rows of a game, or of a few tasks: `messages` and `tools`. None: there are no more."""


def known_environments(names: Sequence[str]) -> tuple[str, ...]:
    """Those that rows are made of. Without any known name all games are played: their answers have at least
    the form of every environment's."""
    return tuple(name for name in dict.fromkeys(names) if name in _LIMITS) or PVP_GAMES


def unknown_environments(names: Sequence[str]) -> tuple[str, ...]:
    """Return a note for each unknown name."""
    unknown = [name for name in dict.fromkeys(names) if name not in _LIMITS]
    notes = [f"{name[:100]!r} is no environment that is known here: it is left out" for name in unknown]
    if len(unknown) == len(set(names)):
        notes.append(f"no environment is known: {', '.join(PVP_GAMES)} are played instead")
    return tuple(notes)


def source_of(name: str, requested_data: Sequence[str]) -> RowSource:
    """Imported here: a game needs its engine, and a shell its file systems."""
    if name in PVP_GAMES:
        game: Callable[[str], RowSource] = importlib.import_module("trainer.environments.selfplay").GameSource
        return game(name)
    return ShellSource() if name == INTERCODE else RepairSource(requested_data)


class ShellSource:
    """Rows of shell tasks: a seed is some tasks in one machine."""

    name = INTERCODE

    def get_ready(self) -> None:
        """Fails where commands cannot be kept from the container's own files."""
        importlib.import_module("trainer.environments.intercode.machine").ShellMachine().close()

    def rows(self, seed: int) -> Sequence[Mapping[str, Any]]:
        made = importlib.import_module("trainer.environments.intercode.generation").generate
        rows = list(made(seed, _SHELL_S, _SHELL_ROWS))
        if not rows:  # which would say that there are no more
            raise TrainingError(f"no shell task was made in {_SHELL_S:.0f} s")
        return rows


class RepairSource:
    """Rows of a requested dataset: a seed is some of them, and there are so many."""

    name = SWE

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = folders
        self._rows: list[dict[str, Any]] = []

    def get_ready(self) -> None:
        self._rows = importlib.import_module("trainer.environments.swe").swe_rows(self._folders, MADE_ROWS)

    def rows(self, seed: int) -> Sequence[Mapping[str, Any]]:
        start = (seed % SEEDS - 1) * _REPAIR_ROWS
        return [{"tools": None, **row} for row in self._rows[start : start + _REPAIR_ROWS]]
