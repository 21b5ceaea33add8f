"""Steps under the clock: nothing is trained that anybody keeps."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from core.plan import TrainingPlan
from trainer.callbacks.report import Report
from trainer.native import parts
from trainer.native.batches import Loader
from trainer.native.ranks import joined
from trainer.native.step import Step, Stepper
from trainer.sheet import Sheet

#: Steps before the clock starts: allocation, autotuning, compilation.
WARM = 3


def steps(sheet: Sheet, plan: TrainingPlan) -> Iterator[tuple[Step, float, int]]:
    """Each step, its seconds, and its tokens, without end."""
    if plan.gpus.is_cpu:
        # As a training is launched: little models gain nothing from threads that wait for each other.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with joined(cpu=plan.gpus.is_cpu) as here:
        made = parts.assemble(sheet, plan, Report(None), here)
        stepper, loader = Stepper(made.net, made.plan, here), Loader(made.train, made.order)
        try:
            began = time.perf_counter()
            for batches in loader:
                step = stepper.step(batches)
                if here.device.type == "cuda":
                    torch.cuda.synchronize(here.device)
                ended = time.perf_counter()
                yield step, ended - began, sum(batch.tokens for batch in batches)
                began = time.perf_counter()
        finally:
            loader.close()


def speed(sheet: Sheet, plan: TrainingPlan, count: int) -> dict[str, Any]:
    seconds, tokens, loss = [], 0, 0.0
    for number, (step, took, seen) in enumerate(steps(sheet, plan)):
        if number >= WARM:
            seconds.append(took)
            tokens, loss = tokens + seen, step.loss
        if len(seconds) == count:
            break
    memory = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
    return {
        "tokens_s": tokens / sum(seconds),
        "step_ms": 1e3 * statistics.median(seconds),
        "memory_bytes": memory,
        "loss": loss,
    }
