"""The design of `benchmarks/text_rules.py`: which cells there are, and what counts as better.

A cell is a type of task, a model family and a seed. Nothing here needs torch.
"""

from __future__ import annotations

import ast
import fnmatch
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.domain.choices import Method
from core.domain.tasks import TaskType

#: What validators ask for. `kl` is instruct with a KL term; `continuous` is chat on a model that was already
#: tuned on rows of the same kind.
TYPES: dict[str, TaskType] = {
    "instruct": TaskType.INSTRUCT,
    "chat": TaskType.CHAT,
    "dpo": TaskType.DPO,
    "grpo": TaskType.GRPO,
    "kl": TaskType.INSTRUCT,
    "continuous": TaskType.CHAT,
}
#: The method is part of the design, and the same for every side: models so small would all be trained full.
FAMILIES: dict[str, Method] = {"llama": Method.FULL, "qwen": Method.LORA}
SEEDS = (1, 2, 3)
#: Techniques are chosen on cells of these, which are not in the table.
CHOOSING_SEEDS = (4, 5, 6)
#: Each type meets each kind of data once.
KINDS = ("easy", "noisy", "few", "long", "copies", "altered")
#: How validators alter a base, by the type's place.
ALTERATIONS = ("noise", "scaling", "pruning", "reinit")
#: Of the KL term, which validators draw from 0.1 to 1.5.
KL_COEFFICIENT = 0.3
#: One of each type, both families, three kinds of data.
QUICK = ("instruct-llama-1", "dpo-llama-1", "grpo-qwen-1", "continuous-qwen-1")


@dataclass(frozen=True)
class Cell:
    type: str
    family: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.type}-{self.family}-{self.seed}"

    @property
    def task(self) -> TaskType:
        return TYPES[self.type]

    @property
    def method(self) -> Method:
        return FAMILIES[self.family]

    @property
    def kind(self) -> str:
        place = list(TYPES).index(self.type) + 3 * list(FAMILIES).index(self.family) + self.seed - 1
        return KINDS[place % len(KINDS)]

    @property
    def alteration(self) -> str | None:
        if self.kind != "altered":
            return None
        return ALTERATIONS[list(TYPES).index(self.type) % len(ALTERATIONS)]

    @property
    def kl_coefficient(self) -> float | None:
        return KL_COEFFICIENT if self.type == "kl" else None

    @classmethod
    def of(cls, name: str) -> Cell:
        kind, family, seed = name.split("-")
        return cls(kind, family, int(seed))


def all_cells(seeds: Sequence[int] = SEEDS) -> list[Cell]:
    return [Cell(kind, family, seed) for seed in seeds for kind in TYPES for family in FAMILIES]


def chosen_cells(patterns: Sequence[str], seeds: Sequence[int] = SEEDS) -> list[Cell]:
    """Those whose name matches one of the patterns (`dpo-*`, `*-1`); all without patterns."""
    return [
        cell
        for cell in all_cells(seeds)
        if not patterns or any(fnmatch.fnmatch(cell.name, pattern) for pattern in patterns)
    ]


def shares(cells: Iterable[Cell], workers: int) -> list[list[Cell]]:
    """Divide cells among workers so that they share as many bases as possible and take about as long."""
    parts: list[list[Cell]] = [[] for _ in range(workers)]
    for cell in cells:
        place = list(FAMILIES).index(cell.family) + cell.seed
        parts[place % workers].append(cell)
    return parts


# — records, one for each cell and side


class Records:
    """Results as JSON lines: an interrupted table goes on where it stopped.

    A record counts as long as nothing that its side runs has changed: `stamp` is a digest of that.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[tuple[str, str, str], dict[str, Any]] = {}
        for line in self._lines():
            self._found[_key(line["cell"], line["side"], line["stamp"])] = line

    def _lines(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        for text in self._path.read_text("utf-8").splitlines():
            try:
                line = json.loads(text)
            except ValueError:  # cut off while it was written
                continue
            if isinstance(line, dict) and {"cell", "side", "stamp"} <= line.keys():
                yield line

    def get(self, cell: str, side: str, stamp: str) -> dict[str, Any] | None:
        return self._found.get(_key(cell, side, stamp))

    def add(self, record: dict[str, Any]) -> None:
        self._found[_key(record["cell"], record["side"], record["stamp"])] = record
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _key(cell: str, side: str, stamp: str) -> tuple[str, str, str]:
    return cell, side, stamp


def digest_of(files: Iterable[Path]) -> str:
    """Make rows of programs without their comments."""
    digest = hashlib.sha256()
    for file in sorted(files):
        text = file.read_text("utf-8")
        digest.update(file.name.encode())
        digest.update((ast.dump(ast.parse(text)) if file.suffix == ".py" else text).encode())
    return digest.hexdigest()[:12]
