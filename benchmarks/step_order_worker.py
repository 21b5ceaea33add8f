"""Runs inside the training environment: steps on preferences, cut into passes in two ways.

training-python -m benchmarks.step_order_worker '{"lengths": {…}, "layouts": [[1, 4, 16]], "steps": 5}'
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from typing import Any

import numpy as np
from datasets import Dataset

from benchmarks.answer_logits_worker import pair_trainer
from trainer.axolotl.trainers import PairTrainer
from trainer.session.step_order import passes_by_length

VOCABULARY, LONGEST = 1400, 128


def main(asked: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, shape in asked["lengths"].items():
            rows = pairs_of(shape, 64 * asked["steps"])
            trainer = pair_trainer(PairTrainer, VOCABULARY, Dataset.from_list(rows), folder)
            for layout in asked["layouts"]:
                found = compared(trainer, layout, asked["steps"])
                sys.stdout.write(json.dumps({"lengths": name, "layout": layout, **found}) + "\n")
                sys.stdout.flush()


def compared(trainer: Any, layout: list[int], steps: int) -> dict[str, Any]:
    ranks, micro, passes = layout
    rows = trainer.train_dataset
    lengths = np.array([len(row["prompt_ids"]) + longer_answer(row) for row in rows])
    seconds: dict[str, list[float]] = {"random": [], "ordered": []}
    tokens = dict.fromkeys(seconds, 0)
    real = 0
    seconds_of(trainer, np.arange(2))  # warms up
    for number in range(steps):
        step = np.arange(64) + 64 * number
        cuts = {
            "random": list(step.reshape(passes, ranks, micro)),
            "ordered": passes_by_length(step, lengths, micro, ranks),
        }
        for side, cut in cuts.items():
            seconds[side].append(sum(max(seconds_of(trainer, part) for part in turn) for turn in cut))
            tokens[side] += sum(2 * micro * int(lengths[part].max()) for turn in cut for part in turn)
        chosen = rows.select(step)
        real += sum(2 * len(row["prompt_ids"]) + sum(answers(row)) for row in chosen)
    return {"padded": {side: count / real for side, count in tokens.items()}, **seconds}


def seconds_of(trainer: Any, rows: Any) -> float:
    """Of one pass."""
    batch = trainer.data_collator([trainer.train_dataset[int(row)] for row in rows])
    began = time.process_time()
    trainer.compute_loss(trainer.model, batch).backward()
    return time.process_time() - began


def pairs_of(shape: Any, count: int) -> list[dict[str, list[int]]]:
    chance, (prompts, texts) = random.Random(0), shape

    def drawn(median: float, spread: float) -> list[int]:
        length = median * float(np.exp(spread * chance.gauss(0, 1)))
        return [chance.randrange(VOCABULARY) for _ in range(int(min(max(length, 2), LONGEST)))]

    return [
        {"prompt_ids": drawn(*prompts), "chosen_ids": drawn(*texts), "rejected_ids": drawn(*texts)}
        for _ in range(count)
    ]


def answers(row: dict[str, Any]) -> tuple[int, int]:
    return len(row["chosen_ids"]), len(row["rejected_ids"])


def longer_answer(row: dict[str, Any]) -> int:
    return max(answers(row))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
