"""Two models on the same rows: who predicts which row better, and whether that is more than luck.

As the boss rounds of tournaments are decided: a row counts for a model that is better by more than a dead
zone; a challenger wins with a clear majority of those rows and a clear mean gap, both at the lower end of a
bootstrap over all rows, with a fixed seed.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence

from core.facts import Record

DEAD_ZONE, WIN_RATE, LEAST_GAP, GAP_SHARE = 0.01, 0.55, 0.01, 0.01
RESAMPLES, SEED, CONFIDENCE = 10_000, 20260808, 0.99
#: Places drawn at once: the generator's stream depends on it, so it is a part of the rule.
AT_ONCE = 2_000_000


class Comparison(Record):
    """Positive gaps mean that the challenger's loss is lower."""

    rows: int
    #: Rows on which the challenger is better by more than the dead zone, and on which the champion is.
    wins: int
    losses: int
    #: Of the decided rows, and its lower bound.
    win_rate: float
    win_rate_bound: float
    mean_gap: float
    mean_gap_bound: float
    #: What the mean gap's bound has to reach.
    gap_needed: float
    won: bool
    reason: str


def compare(champion: Sequence[float], challenger: Sequence[float]) -> Comparison:
    """Losses row by row, in the same order; rows that either model could not be scored on are left out."""
    pairs = [
        (one, other)
        for one, other in zip(champion, challenger, strict=True)
        if math.isfinite(one) and math.isfinite(other)
    ]
    gaps = [one - other for one, other in pairs]
    wins = sum(1 for gap in gaps if gap > DEAD_ZONE)
    losses = sum(1 for gap in gaps if gap < -DEAD_ZONE)
    rate_bound, gap_bound = _bounds(gaps) if gaps else (0.0, 0.0)
    level = abs(math.fsum(one for one, _ in pairs)) / max(len(pairs), 1)
    needed = max(LEAST_GAP, GAP_SHARE * level)
    if rate_bound < WIN_RATE:
        reason = (
            f"of {wins + losses} decided rows {wins} are won: surely {rate_bound:.1%}, {WIN_RATE:.0%} needed"
        )
    elif gap_bound < needed:
        reason = f"the mean gap is surely {gap_bound:.4f}, {needed:.4f} needed"
    else:
        reason = f"surely {rate_bound:.1%} of the decided rows, and {gap_bound:.4f} on average"
    return Comparison(
        rows=len(gaps),
        wins=wins,
        losses=losses,
        win_rate=wins / (wins + losses) if wins + losses else 0.0,
        win_rate_bound=rate_bound,
        mean_gap=math.fsum(gaps) / len(gaps) if gaps else 0.0,
        mean_gap_bound=gap_bound,
        gap_needed=needed,
        won=rate_bound >= WIN_RATE and gap_bound >= needed,
        reason=reason,
    )


def _bounds(gaps: Sequence[float]) -> tuple[float, float]:
    """Lower bounds of win rate and mean gap, drawing all rows anew with replacement.

    Which rows are decided is a matter of the draw as well; a draw that decides nothing is no evidence.
    """
    numpy = importlib.import_module("numpy")
    gap = numpy.asarray(gaps, dtype=numpy.float64)
    won, decided = (gap > DEAD_ZONE).astype(float), (abs(gap) > DEAD_ZONE).astype(float)
    generator = numpy.random.default_rng(SEED)
    size = max(1, min(RESAMPLES, AT_ONCE // len(gap)))
    rates, means = [], []
    for start in range(0, RESAMPLES, size):
        drawn = generator.integers(0, len(gap), size=(min(size, RESAMPLES - start), len(gap)))
        counts = decided[drawn].sum(axis=1)
        rates.append(won[drawn].sum(axis=1) / numpy.maximum(counts, 1))
        means.append(gap[drawn].mean(axis=1))
    low = 100 * (1 - CONFIDENCE)
    return (
        float(numpy.percentile(numpy.concatenate(rates), low)),
        float(numpy.percentile(numpy.concatenate(means), low)),
    )
