"""Generating with a model split over two processes: gathered once, or as the engine does it, for every token.

Needs the training environment's Python in GOD_MINER_TRAINING_PYTHON. A random Llama with an adapter, split as
Axolotl splits it, answers the same prompts with as many tokens in turns: whole on each process (with room for
a copy and all its states), gathered once (`trainer/axolotl/patches.py`), half of it once, and
layer by layer. The processes talk over gloo, which is slower than NVLink, as the CPU is slower than a GPU.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.report import Report
from benchmarks.training_python import reported

WAYS = {
    "whole": "not split (DDP)",
    "once": "split, gathered once for a generation",
    "half": "split, half of the layers gathered once",
    "token": "split, gathered for every token: the engine's own way",
}


def run(quick: bool) -> Report:
    tokens, rounds = (16, 3) if quick else (64, 7)
    what = {"layers": 8, "hidden": 256, "rank": 16, "tokens": tokens, "rounds": rounds}
    title = f"A generation of {tokens} tokens, 8 layers and an adapter, two processes"
    return measured("generation", what, WAYS, title)


def measured(what: str, asked: dict[str, Any], ways: dict[str, str], title: str) -> Report:
    """The last of the ways is the engine's own."""
    (found,) = reported("benchmarks.sharding_worker", {"what": what, **asked})
    report = Report(title, ("way", "s, median", "from", "to", "gathers", "against the engine's own"))
    report.data.update(asked=asked, found=found)
    slow = median(found["seconds"][list(ways)[-1]])
    for way, name in ways.items():
        seconds = found["seconds"][way]
        middle = median(seconds)
        cells = (f"{middle:.3f}", f"{min(seconds):.3f}", f"{max(seconds):.3f}", f"{found['gathers'][way]:,}")
        report.rows.append((name, *cells, f"{slow / middle:.1f} times as fast"))
    report.notes.append(f"The same results in all of them: {'yes' if found['same'] else 'NO'}.")
    report.notes.append("Both processes work at once, and the slower one's time counts.")
    return report
