"""The dynamic learning rate: lower on a plateau, a little higher while the score improves, always bounded."""

from __future__ import annotations

from dataclasses import dataclass

from core.plan_parts import PlateauPlan

#: However long a plateau lasts or a score improves, the rate stays within these factors of the schedule's.
LEAST, MOST = 0.1, 1.5


@dataclass
class Plateau:
    plan: PlateauPlan
    factor: float = 1.0
    #: Evaluations since the last better one.
    waited: int = 0

    def judged(self, better: bool) -> str | None:
        """After an evaluation: what changed, in words, or None."""
        before = self.factor
        if better:
            self.waited = 0
            self.factor = min(self.factor * self.plan.growth, MOST)
        else:
            self.waited += 1
            if self.waited >= self.plan.patience:
                self.waited = 0
                self.factor = max(self.factor * self.plan.factor, LEAST)
        if self.factor == before:
            return None
        return f"learning rate × {self.factor:.3g} (was × {before:.3g}): the score {_why(better, self.plan)}"

    def state(self) -> dict[str, float]:
        return {"factor": self.factor, "waited": self.waited}

    def restore(self, state: dict[str, float]) -> None:
        self.factor, self.waited = float(state["factor"]), int(state["waited"])


def _why(better: bool, plan: PlateauPlan) -> str:
    return "improves" if better else f"has not improved in {plan.patience} evaluations"
