"""Seconds of a training pass with logits for every token, and for the answers' alone: texts and preferences.

Needs the training environment's Python in GOD_MINER_TRAINING_PYTHON. The models are as wide and deep as a
CPU computes in seconds, and their vocabularies such that the output layer has the share of the arithmetic
that it has in models of 0.5, 1.5 and 7 billion parameters. Rows have one length; that of their prompts varies
from row to row.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.report import Report
from benchmarks.training_python import reported

#: Vocabulary of the model, by the size that its output layer stands for.
MODELS = {"0.5 B": 6100, "1.5 B": 2900, "7 B": 1400}
#: Part of a row that is its prompt, on average.
PROMPTS = (0.25, 0.5, 0.75)
PASSES, QUICK_PASSES = 9, 3


def run(quick: bool) -> Report:
    passes = QUICK_PASSES if quick else PASSES
    report = Report(
        "A pass forward and backward: seconds with logits of all tokens → of answers only",
        ("rows", "like", "output layer's share", "prompts", "seconds", "times as fast", "loss differs by"),
    )
    asked = {"models": MODELS, "prompts": PROMPTS, "passes": passes}
    report.data["cases"] = list(reported("benchmarks.answer_logits_worker", asked))
    report.rows += [_row(found) for found in report.data["cases"]]
    report.notes += [
        "CPU seconds of one thread, the median; both sides take turns.",
        "Texts: transformers' loss. With a KL there is a pass of the base too. Pairs: TRL's loss and what it "
        "logs; the base's probabilities are there.",
    ]
    return report


def _row(found: dict[str, Any]) -> tuple[str, ...]:
    before, after = median(found["all"]), median(found["answers"])
    return (
        found["rows"],
        found["model"],
        f"{found['share']:.0%}",
        f"{found['prompt']:.0%}",
        f"{before:.2f} → {after:.2f}",
        f"{before / after:.2f}",
        f"{found['gap']:.1e}",
    )
