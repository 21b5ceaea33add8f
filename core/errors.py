"""The one exception tree.

Every error that a user or a validator can meet is a `GodMinerError`. Its text says what is wrong, the
offending value and the way out; its `code` is stable and machine-readable. HTTP statuses are not
decided here but in `miner/api/errors.py`, and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


class GodMinerError(Exception):
    """The root: anything this project raises on purpose."""

    code: ClassVar[str] = "error"

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
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
