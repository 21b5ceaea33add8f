"""A few steps under the clock: which settings are fastest here, and which kernels the time goes to.

    python -m trainer.native.measure trace RUN.json FOLDER [--steps 5]
    python -m trainer.native.measure sweep RUN.json [--steps 12] [--levers compile,micro,…]

Nothing is trained that anybody keeps. Each answer is a line of JSON on standard output; one GPU (or the CPU)
is measured. In a sweep every setting has a process of its own: one that runs out of memory, or that changes
torch for good, spoils no other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from core.plan import TrainingPlan
from core.run_files import RunSpec
from trainer.callbacks.report import Report
from trainer.native import levers, parts
from trainer.native.batches import Loader
from trainer.native.levers import LEVERS, Setting
from trainer.native.ranks import joined
from trainer.native.ready import plan_of, ready
from trainer.native.step import Step, Stepper
from trainer.sheet import Sheet

#: Steps before the clock starts: allocation, autotuning, compilation.
WARM = 3
#: Faster by less is noise.
WORTH = 1.03
#: A setting that takes longer, compilation included, is given up.
_PATIENCE_S = 1500.0
_TOP = 15


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


# — which settings


def sweep(
    sheet: Sheet, plan: TrainingPlan, count: int, wanted: Sequence[str]
) -> Generator[dict[str, Any], None, None]:
    """One lever after the other, each tried upon what was best before it; at the end what to keep."""
    best, kept = plan, dict[str, Any]()
    found = yield from _said("as planned", Setting("", plan, {}), sheet, count, None)
    if "tokens_s" not in found:
        return
    first = fastest = found["tokens_s"]
    for name in wanted:
        chosen: tuple[float, TrainingPlan, dict[str, Any]] | None = None
        for setting in LEVERS[name](best):
            found = yield from _said(f"{name}: {setting.name}", setting, sheet, count, first)
            if found.get("tokens_s", 0.0) > max(fastest * WORTH, chosen[0] if chosen else 0.0):
                chosen = found["tokens_s"], setting.plan, setting.targets
        if chosen is not None:
            fastest, best = chosen[:2]
            kept |= chosen[2]
    yield {"event": "keep", "targets": kept, "tokens_s": fastest, "gain": fastest / first}


def _said(
    name: str, setting: Setting, sheet: Sheet, count: int, first: float | None
) -> Generator[dict[str, Any], None, dict[str, Any]]:
    found = _apart(sheet, setting.plan, count)
    gain = found["tokens_s"] / first if "tokens_s" in found and first else None
    yield {"event": "setting", "name": name, "targets": setting.targets, "gain": gain, **found}
    return found


def _apart(sheet: Sheet, plan: TrainingPlan, count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=sheet.launch_dir) as folder:
        plan_path = Path(folder) / "plan.json"
        plan_path.write_text(plan.to_json(), encoding="utf-8")
        own = sheet.model_copy(update={"plan_path": str(plan_path), "launch_dir": folder})
        command = [sys.executable, "-m", "trainer.native.measure", "one", str(own.write()), str(count)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {_PATIENCE_S:.0f} s"}
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        return {"failed": said[-1][:300] if said else f"ended with {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


# — which kernels


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


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["one"]:
        sheet = Sheet.model_validate_json(Path(arguments[1]).read_bytes())
        _say(speed(sheet, plan_of(sheet), int(arguments[2])))
        return 0
    parser = argparse.ArgumentParser(prog="trainer.native.measure")
    kinds = parser.add_subparsers(dest="kind", required=True)
    for name in ("trace", "sweep"):
        kind = kinds.add_parser(name)
        kind.add_argument("run", type=Path)
        kind.add_argument("--steps", type=int, default=5 if name == "trace" else 12)
        if name == "trace":
            kind.add_argument("folder", type=Path)
        else:
            kind.add_argument("--levers", default=",".join(LEVERS))
    said = parser.parse_args(list(arguments))
    sheet = ready(RunSpec.from_json(said.run.read_bytes()))
    plan = levers.measurable(plan_of(sheet))
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parents[2]))
    if said.kind == "trace":
        found = trace(sheet, plan, said.folder, said.steps)
    else:
        wanted = [name for name in LEVERS if name in said.levers.split(",")]
        found = sweep(sheet, plan, said.steps, wanted)
    for event in found:
        _say(event)
    return 0


def _say(event: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
