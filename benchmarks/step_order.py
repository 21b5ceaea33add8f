"""Seconds of a step on preferences: its pairs in passes as they come, and with those of like length together.

Needs the training environment's Python in GOD_MINER_TRAINING_PYTHON. Lengths are drawn from distributions of
several shapes, an eighth as long as in real data: a CPU is to compute them in seconds. Ranks of several GPUs
are computed one after the other. In each pass the slowest one's seconds count, as where weights are sharded.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.report import Report
from benchmarks.training_python import reported

#: Of prompts and answers: the median, and the spread of its logarithm.
LENGTHS = {
    "long tails (conversations)": ((13, 1.1), (28, 0.8)),
    "short prompts, answers of many lengths": ((4, 0.5), (25, 1.0)),
    "much alike": ((30, 0.05), (30, 0.05)),
}
#: GPUs, pairs of a pass on each, passes of a step: 64 pairs each time.
LAYOUTS = ((1, 4, 16), (4, 4, 4), (4, 8, 2))
STEPS, QUICK_STEPS = 2, 1


def run(quick: bool) -> Report:
    report = Report(
        "A step of 64 pairs: seconds with passes as they come → with pairs of like length together",
        ("lengths", "GPUs × pairs × passes", "tokens with padding, of real ones", "seconds", "times as fast"),
    )
    asked = {"lengths": LENGTHS, "layouts": LAYOUTS, "steps": QUICK_STEPS if quick else STEPS}
    report.data["cases"] = list(reported("benchmarks.step_order_worker", asked))
    report.rows += [_row(found) for found in report.data["cases"]]
    report.notes.append(
        "CPU seconds of one thread, in each pass the slowest rank's; the median of all steps; both sides "
        "take turns. Loss and gradients of a step are the same "
        "(`tests/trainer/axolotl/test_micro_batches.py`)."
    )
    return report


def _row(found: dict[str, Any]) -> tuple[str, ...]:
    before, after = median(found["random"]), median(found["ordered"])
    return (
        found["lengths"],
        " × ".join(map(str, found["layout"])),
        f"{found['padded']['random']:.2f} → {found['padded']['ordered']:.2f}",
        f"{before:.2f} → {after:.2f}",
        f"{before / after:.2f}",
    )
