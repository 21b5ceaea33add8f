"""What the search for a learning rate finds, beside the best rate of a whole training.

Needs the training environment's Python in GOD_MINER_TRAINING_PYTHON; runs `rate_search_worker.py` there. A
tiny Llama is trained by the native engine for 300 steps at each of seven rates (the oracle), and at the rates
that two searches find within 15 % of the time: the present one, and the one before it, which tried rates √10
apart and took the highest within 2.5 % of the best gain.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

from benchmarks.report import Report
from benchmarks.training_python import reported

CASES = ("easy", "noisy", "few rows", "noised model", "tuned model", "fully tuned", "LoRA", "DPO")
STEPS, QUICK_STEPS = 300, 150
SIDES = ("planned", "before", "now")


def run(quick: bool) -> Report:
    steps, cases = (QUICK_STEPS, CASES[:1]) if quick else (STEPS, CASES)
    asked = {"cases": cases, "steps": steps, "seed": 1}
    return report_of(list(reported("benchmarks.rate_search_worker", asked)), steps)


def report_of(trials: list[dict[str, Any]], steps: int) -> Report:
    report = Report(
        f"Rates for {steps} steps, and what they lose against the best: nats, and part of its gain",
        ("case", "base", "best rate", "score", "planned, loses", "search before, loses", "search now, loses"),
    )
    report.data["trials"] = trials
    for trial in trials:
        oracle = trial["found"]["oracle"]
        first = (trial["case"], f"{trial['base']:.3f}", f"{oracle['rate']:.2g}", f"{oracle['score']:.4f}")
        report.rows.append((*first, *(_side(trial, side) for side in SIDES)))
    for side in SIDES:
        nats, part = (fmean(lost(trial, side)[at] for trial in trials) for at in (0, 1))
        report.notes.append(f"{side}: {nats:.4f} nats lost on average, {part:.1%} of the gain")
    report.notes.append(_NOTE)
    return report


def lost(trial: dict[str, Any], side: str) -> tuple[float, float]:
    best = trial["found"]["oracle"]["score"]
    nats = max(trial["found"][side]["score"] - best, 0.0)
    return nats, nats / max(trial["base"] - best, 1e-9)


def _side(trial: dict[str, Any], side: str) -> str:
    nats, part = lost(trial, side)
    return f"{trial['found'][side]['rate']:.2g}, {nats:.3f} {part:.0%}"


_NOTE = (
    "Scores are the best of six evaluations, on the rows that the search reads too, as a run submits its "
    "best. Both searches divide the time among the same number of candidates; an evaluation counts as two "
    "steps. The tuned model was trained for 300 steps on other rows of the task, the fully tuned one for "
    "2,000."
)
