"""The one exception tree.

Every error that a user or a validator can meet is a `GodMinerError`. Its text says what is wrong, the
offending value and the way out; its `code` is stable and machine-readable: a class has one, and an error that
nobody catches by its class may have its own. HTTP statuses are decided in
`miner/http/errors.py` alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class GodMinerError(Exception):
    """The root of everything this project raises on purpose."""

    code: str = "error"

    def __init__(self, text: str = "", *, code: str | None = None) -> None:
        super().__init__(text)
        if code is not None:
            self.code = code

    def as_dict(self) -> dict[str, Any]:
        """The error as JSON output."""
        return {"code": self.code, "message": str(self)}


@dataclass(frozen=True)
class Problem:
    """One thing wrong with something a person wrote: where, the value, and the rule it breaks."""

    where: str
    value: str
    rule: str

    def __str__(self) -> str:
        shown = f" has value {self.value}" if self.value else ""
        return f"{self.where}{shown}: {self.rule}"


class ConfigError(GodMinerError):
    """Something an operator wrote is wrong. Carries every problem found, not only the first."""

    code = "bad_config"

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self.source = source
        self.problems = problems
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        super().__init__("\n".join([f"{source}: {count}", *(f"  - {problem}" for problem in problems)]))

    def as_dict(self) -> dict[str, Any]:
        return {**super().as_dict(), "problems": [vars(problem) for problem in self.problems]}


def nearest_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that somebody who wrote `name` may have meant."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)
