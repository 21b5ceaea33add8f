"""The rules of the text trainer that won a tournament in June 2026, and how they are scaled to tiny models.

Numbers only: `peer.py` trains by them. Rates and batches are the tables' smallest class for a full
fine-tune and, where the method is LoRA, the smallest class that the tables train so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from core.domain.choices import Method
from core.domain.tasks import TaskType


@dataclass(frozen=True)
class WinnerClass:
    """A line of the winner's tables."""

    rate: float
    batch: int


_SFT = {Method.FULL: WinnerClass(1e-4, 140), Method.LORA: WinnerClass(1e-4, 32)}
_DPO = {Method.FULL: WinnerClass(1.35e-5, 16), Method.LORA: WinnerClass(6.5e-6, 12)}
_GRPO = {Method.FULL: WinnerClass(8e-6, 40), Method.LORA: WinnerClass(8e-6, 42)}
#: Rows of a step at least, by accumulation; and the most passes of it for preferences.
LEAST_ROWS, MOST_PASSES, GRPO_PASSES = 64, 4, 4
LORA_RANK, LORA_ALPHA, LORA_ALPHA_RL, LORA_DROPOUT = 128, 512, 256, 0.1
FLOOR = 0.25
MAX_NORM = 1.0
NEFTUNE = 1.0
#: GRPO.
GENERATIONS, KL_WEIGHT, GRPO_EPOCHS = 2, 0.5, 4.0
#: Of the clock: searching, evaluating, and what is kept free at the end (3 minutes of an hour).
SEARCH_SHARE, EVALUATION_SHARE, END_SHARE = 0.2, 0.1, 0.05
#: In epochs.
FIRST_EVALUATION = 0.75
SOUP_MEMBERS, SOUP_GAIN, SOUP_SHARE = 8, 1e-6, 0.5
DEV_RATE = 0.25
#: Near-duplicates are left out where there are more than this share of them.
DUPLICATES = 0.2


def class_of(task: TaskType, method: Method) -> WinnerClass:
    if task.has_pairs:
        return _DPO[method]
    return (_GRPO if task.generates else _SFT)[method]


def rows_of_step(task: TaskType, method: Method) -> int:
    """With accumulation; for rewards, completions."""
    batch = class_of(task, method).batch
    passes = 1 if batch >= LEAST_ROWS else int(LEAST_ROWS / batch)
    if task.generates:
        passes = GRPO_PASSES
    return batch * (min(passes, MOST_PASSES) if task.has_pairs else passes)


def warmup(steps: int, hours: float) -> int:
    asked = min(max(10, round(0.03 * steps)), min(max(round(60 * hours), 10), 200))
    # In a real task ten steps are few; here some trainings have twenty.
    return min(asked, steps // 4)


def rate_factor(step: int, steps: int, warmup_steps: int) -> float:
    """Linear, then a cosine down to a quarter."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(steps - warmup_steps, 1)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def epochs(left_s: float, step_s: float, per_epoch: int, rows: int) -> float:
    fits = 1.25 * 0.85 * left_s / (step_s * per_epoch)
    return min(max(fits, 1.3), 4.0 if rows < 10_000 else 3.0)


def dev_rows(rows: int) -> int:
    return round(min(1000, max(min(400, rows / 5), rows / 33)))


def evaluation_every(task: TaskType, per_epoch: int) -> int:
    return max(per_epoch // 5, 30) if task.has_pairs else max(per_epoch // 8, 20)


def prompt_weight(prompt_tokens: float, answer_tokens: float) -> float:
    """Weight of a prompt token in the loss: above zero where prompts are much longer."""
    ratio = prompt_tokens / max(answer_tokens, 1)
    return 0.05 / (ratio / 5) if ratio > 5 else 0.0


def first_rate(task: TaskType, table: float, rms: float, usual_rms: float) -> float:
    """The winner's formula is proportional to the weights' RMS. Its constants are made for models of
    billions, where they give about the table's rate: here they give the table's for an untouched base. For
    preferences the table is the most."""
    rate = table * rms / usual_rms
    return min(rate, table) if task.has_pairs else rate


def probed_factor(drop: float) -> float:
    """On the first rate, by the relative fall of the loss over eight steps of warm-up."""
    return min(max(1 + 4 * (drop - 0.04), 0.6), 1.6)


# — the search for a rate

#: In decades around the first rate, and around the best of the first stage.
STAGE_1, STAGE_2 = (-0.3, -0.1, 0.1, 0.3), (0.0, -0.075, 0.075, 0.15)
STAGE_1_STEPS, STAGE_2_STEPS, VALIDATION_STEPS = (25, 100), (50, 150), 15
#: The second stage needs as many steps in the first.
STAGE_2_NEEDS = 50
MIN_GAP = 0.04
NEARLY = 0.025
PRUNE, PRUNE_EARLY, EARLY = 1.75, 1.5, 5
WARMUP_PROBE = 8
#: Looks at edges and gaps at most.
EXTENSIONS = 4


@dataclass(frozen=True)
class SearchPlan:
    """Steps of each candidate in the two stages; 0: the stage is left out."""

    first: int
    second: int
    #: Offsets of the first stage, in decades.
    offsets: tuple[float, ...] = STAGE_1
    #: Whether edges and gaps are looked at afterwards.
    third: bool = False


def search_plan(steps: int, epochs_left: float) -> SearchPlan | None:
    """Return the search that fits into this many steps, or None."""
    if epochs_left < 1:
        each = min(steps // 3, STAGE_1_STEPS[1])
        return SearchPlan(each, 0, (-0.1, 0.0, 0.1)) if each >= VALIDATION_STEPS else None
    whole = STAGE_2_NEEDS * len(STAGE_1) + STAGE_2_STEPS[0] * len(STAGE_2)
    share = steps * len(STAGE_1) / (len(STAGE_1) + len(STAGE_2)) if steps >= whole else steps
    first = min(int(share / len(STAGE_1)), STAGE_1_STEPS[1])
    if first < STAGE_1_STEPS[0]:
        each = min(steps // 3, STAGE_1_STEPS[0])
        return SearchPlan(each, 0, (-0.3, 0.0, 0.3)) if each >= VALIDATION_STEPS else None
    left = steps - first * len(STAGE_1)
    second = min(int(left / (len(STAGE_2) + 1)), STAGE_2_STEPS[1])
    if first < STAGE_2_NEEDS or second < STAGE_2_STEPS[0]:
        second = 0
    return SearchPlan(first, second, third=epochs_left >= 2)


def score_of(losses: Sequence[float]) -> float:
    """Median training loss of a candidate's last fifth."""
    return median(losses[-max(len(losses) // 5, 1) :])


def given_up(losses: Sequence[float], best: float) -> bool:
    """Return True if a candidate is dropped; `best` is the best score so far, infinite if there is none."""
    loss = losses[-1]
    if not math.isfinite(loss):
        return True
    # A training begins with the loss of the base, which is no reason yet.
    level = max(losses[0], best) if math.isfinite(best) else losses[0]
    return loss > PRUNE * level or (len(losses) == EARLY and loss > PRUNE_EARLY * losses[0])


def pick(scores: dict[float, float], *, highest: bool) -> float:
    """The highest rate that is nearly as good as the best, or the best itself."""
    best = min(scores, key=lambda rate: scores[rate])
    if not highest:
        return best
    level = abs(scores[best]) * NEARLY
    return max(rate for rate, score in scores.items() if score <= scores[best] + level)


def next_rate(scores: dict[float, float], best: float) -> float | None:
    """Beyond the best where that is at an edge, else in the wider gap beside it; None where none is wide."""
    ordered = sorted(scores)
    place = ordered.index(best)
    if place == len(ordered) - 1:
        return best * 10**0.15
    if place == 0:
        return best / 10**0.15
    above, below = math.log10(ordered[place + 1] / best), math.log10(best / ordered[place - 1])
    if max(above, below) / 2 < MIN_GAP:
        return None
    return best * 10 ** (above / 2) if above >= below else best / 10 ** (below / 2)
