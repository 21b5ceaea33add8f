"""A training step with a model split over two processes: an adapter with its layer, or matrix by matrix.

Needs the training environment's Python in GOD_MINER_TRAINING_PYTHON. A random Llama with an adapter takes the
same steps in turns: whole on each process (DDP), split by layers (`trainer/axolotl/patches.py`), and with
each matrix of the adapter as a part of its own, as Axolotl does it. gloo and a CPU are slower than NVLink and
a GPU; what each part costs in Python is the same.
"""

from __future__ import annotations

from benchmarks.generation import measured
from benchmarks.report import Report

WAYS = {
    "ddp": "not split (DDP)",
    "layers": "split by layers, an adapter goes with its own",
    "matrices": "split by layers and matrices: the engine's own way",
}


def run(quick: bool) -> Report:
    asked = {"layers": 8, "hidden": 256, "rank": 16, "tokens": 32, "rounds": 5 if quick else 31}
    return measured(
        "step", asked, WAYS, "A step of 8 sequences of 32 tokens, 8 layers and an adapter, two processes"
    )
