"""Which kernels the time of a step goes to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from core.plan import TrainingPlan
from trainer.native.clocked import WARM, steps
from trainer.sheet import Sheet

#: Kernels that are told; the table on disk has three times as many.
_TOP = 15


def trace(sheet: Sheet, plan: TrainingPlan, folder: Path, count: int) -> Iterator[dict[str, Any]]:
    """`trace.json.gz` for a trace viewer, `kernels.txt` for people."""
    from torch.profiler import ProfilerActivity, profile, schedule

    folder.mkdir(parents=True, exist_ok=True)
    cuda = torch.cuda.is_available() and not plan.gpus.is_cpu
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    plan_of_time = schedule(wait=WARM - 1, warmup=1, active=count, repeat=1)
    with profile(activities=activities, schedule=plan_of_time, record_shapes=True) as profiler:
        for number, _ in enumerate(steps(sheet, plan), start=1):
            profiler.step()
            if number == WARM + count:
                break
    profiler.export_chrome_trace(str(folder / "trace.json.gz"))
    averages = profiler.key_averages()
    operations = [one for one in averages if not one.key.startswith("ProfilerStep")]
    by = "self_device_time_total" if cuda else "self_cpu_time_total"
    (folder / "kernels.txt").write_text(averages.table(sort_by=by, row_limit=3 * _TOP), encoding="utf-8")
    whole = sum(getattr(one, by) for one in operations) or 1.0
    for one in sorted(operations, key=lambda found: -getattr(found, by))[:_TOP]:
        spent = getattr(one, by)
        yield {
            "event": "kernel",
            "name": one.key,
            "calls": one.count,
            "ms_per_step": spent / 1e3 / count,
            "share": spent / whole,
        }
    yield {"event": "traced", "trace": str(folder / "trace.json.gz"), "table": str(folder / "kernels.txt")}
