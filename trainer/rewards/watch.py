"""Notice rewards that teach nothing, and say so: equal for all, at their maximum, equal within groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: Prompts before anything is said: a few easy ones are no sign.
PROMPTS = 64
#: Completions at the maximum, and groups without a difference, from which on it is said.
SATURATED, ALIKE = 0.9, 0.5
#: Rewards that differ by less are equal, as TRL has it: such a group has no advantage.
_EQUAL = 1e-8

#: Of one completion, what each function gave.
Given = Sequence[float]


class RewardWatch:
    """Looks at `PROMPTS` prompts at a time; each thing is said once in a run."""

    def __init__(self, weights: Sequence[float], say: Callable[[str], None]) -> None:
        self._weights, self._say = list(weights), say
        self._groups: list[Sequence[Given]] = []
        self._said: set[str] = set()

    def add(self, rewards: Sequence[Given], group: int) -> None:
        """`group` completions of a prompt follow each other."""
        for start in range(0, len(rewards) - group + 1, group):
            self._groups.append(rewards[start : start + group])
            if len(self._groups) == PROMPTS:
                self._judge()
                self._groups.clear()

    def _judge(self) -> None:
        columns = zip(*(own for group in self._groups for own in group), strict=True)
        for place, column in enumerate(columns):
            most = max(column)
            share = sum(one == most for one in column) / len(column)
            if most - min(column) <= _EQUAL:
                what = f"gave {most:g} to every completion of {PROMPTS} prompts: it teaches nothing"
                self._once(f"equal {place}", f"reward {place} {what}")
            elif share >= SATURATED:
                what = f"is at its maximum of {most:g} for {share:.0%} of the completions"
                self._once(f"saturated {place}", f"reward {place} {what}: little is left to learn from it")
        share = sum(self._alike(group) for group in self._groups) / PROMPTS
        if share >= ALIKE:
            what = f"{share:.0%} of {PROMPTS} prompts had completions of equal reward"
            self._once("alike", f"{what}: only their distance to the base is learned from them")

    def _alike(self, group: Sequence[Given]) -> bool:
        totals = [sum(weight * one for weight, one in zip(self._weights, own, strict=True)) for own in group]
        return max(totals) - min(totals) <= _EQUAL

    def _once(self, key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            self._say(text)
