"""The evaluator's reward: what changed in the file system, and how alike the two outputs are.

Each of three parts is worth up to 0.33 and is rounded to hundredths: no path missed or changed in addition,
common changes that are identical, and the cosine of the outputs' words. A task that changes nothing has the
first two for free.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

#: What is at a path: a folder with its mode, a link with its target, or a file's digest with its size.
PathState = tuple[str, int | str]
State = Mapping[str, PathState]

_WORD = re.compile(r"(?u)\b\w\w+\b")
_PART, _BASE = 0.33, 0.01


class ShellReward(NamedTuple):
    """A reward and its parts."""

    paths: float
    contents: float
    output: float

    @property
    def total(self) -> float:
        return _BASE + self.paths + self.contents + self.output


def shell_reward(
    before: State, agent: State, gold: State, agent_output: str, gold_output: str
) -> ShellReward:
    """Compare what an agent did with what the gold command did, both from the same state on."""
    by_agent, by_gold = changed_paths(before, agent), changed_paths(before, gold)
    common = by_agent & by_gold
    alike = sum(agent.get(path) == gold.get(path) for path in common)
    return ShellReward(
        paths=round(_PART * (1 - math.erf(len(by_agent ^ by_gold))), 2),
        contents=round(_PART * (alike / len(common)), 2) if common else _PART,
        output=round(_PART * likeness(agent_output, gold_output), 2),
    )


def changed_paths(before: State, after: State) -> set[str]:
    """Every path that is new, gone or different."""
    return {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}


def likeness(one: str, other: str) -> float:
    """The cosine of two texts' words, weighted as scikit-learn's TfidfVectorizer weights them by default.

    Where neither has a word of two letters, they are alike when they are equal."""
    counts = [Counter(_WORD.findall(text.lower())) for text in (one, other)]
    if not any(counts):
        return float(one == other)
    # Of two texts a word is in one or in both.
    rare = math.log(3 / 2) + 1
    vectors = [
        {word: count * (1.0 if word in counts[1 - place] else rare) for word, count in counts[place].items()}
        for place in (0, 1)
    ]
    lengths = [math.sqrt(sum(weight * weight for weight in vector.values())) for vector in vectors]
    if not all(lengths):
        return 0.0
    dot = sum(weight * vectors[1].get(word, 0.0) for word, weight in vectors[0].items())
    return dot / (lengths[0] * lengths[1])
