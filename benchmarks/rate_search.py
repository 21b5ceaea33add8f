"""What the search for a learning rate finds, beside the best rate of a whole training.

Needs the training environment's Python in GOD_MINER_TRAINING_PYTHON; runs `rate_search_worker.py` there. In
cells of `text_rules` that its table does not score, a model is trained by the native engine for 300 steps at
each of seven rates (the oracle), at a planned one that is too low or about right, and at the rate that the
search makes of that within 15 % of the time.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

from benchmarks.report import Report
from benchmarks.training_python import reported

#: All kinds of data, both methods, preferences and tuned starts.
CELLS = ("instruct-llama-4", "instruct-llama-5", "chat-llama-4", "instruct-qwen-4", "chat-qwen-4")
CELLS += ("continuous-llama-4", "dpo-llama-4", "dpo-llama-6", "dpo-llama-7", "dpo-llama-8")
CELLS += ("dpo-qwen-4", "dpo-qwen-6", "dpo-qwen-7", "dpo-qwen-8")
STEPS, QUICK_STEPS = 300, 150
SIDES = ("planned", "searched")


def run(quick: bool) -> Report:
    steps, cells = (QUICK_STEPS, CELLS[:1]) if quick else (STEPS, CELLS)
    asked = {"cells": cells, "steps": steps}
    return report_of(list(reported("benchmarks.rate_search_worker", asked)), steps)


def report_of(trials: list[dict[str, Any]], steps: int) -> Report:
    report = Report(
        f"Rates for {steps} steps, and what they lose against the best: nats, and part of its gain",
        ("cell", "data", "base", "best rate", "score", "planned, loses", "searched, loses"),
    )
    report.data["trials"] = trials
    for trial in trials:
        oracle = trial["found"]["oracle"]
        first = (trial["cell"], trial["kind"], f"{trial['base']:.3f}")
        best = (f"{oracle['rate']:.2g}", f"{oracle['score']:.4f}")
        report.rows.append((*first, *best, *(_side(trial, side) for side in SIDES)))
    for side in SIDES:
        nats, part = (fmean(lost(trial, side)[at] for trial in trials) for at in (0, 1))
        report.notes.append(f"{side}: {nats:.4f} nats lost on average, {part:.1%} of the gain")
    report.notes.append(_NOTE)
    return report


def lost(trial: dict[str, Any], side: str) -> tuple[float, float]:
    """Against the best rate: nats, and the part of its gain. Negative where a rate between was better."""
    best = trial["found"]["oracle"]["score"]
    nats = trial["found"][side]["score"] - best
    gain = trial["base"] - best
    return nats, nats / gain if gain > 0 else 0.0


def _side(trial: dict[str, Any], side: str) -> str:
    nats, part = lost(trial, side)
    return f"{trial['found'][side]['rate']:.2g}, {nats:+.3f} {part:+.0%}"


_NOTE = (
    "Scores are the best of six evaluations, on the rows that the search reads too, as a run submits its "
    "best. An evaluation counts as two steps. The search's own time is not taken off its training's."
)
