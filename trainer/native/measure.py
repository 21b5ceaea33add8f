"""A few timed steps: which settings are fastest here, and which kernels the time goes to.

    python -m trainer.native.measure trace RUN.json FOLDER [--steps 5]
    python -m trainer.native.measure sweep RUN.json [--steps 12] [--levers compile,micro,…]

Each answer is a line of JSON; one GPU (or the CPU) is measured. In a sweep every setting has a process of its
own: one that runs out of memory, or changes torch for good, spoils no other.
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
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from core.domain.choices import Attention, CompileMode, Optimizer, Parallelism
from core.planning.plan import TrainingPlan
from core.runs.run_files import RunSpec
from trainer.handoff import LaunchSpec, PrepareSpec
from trainer.native import train
from trainer.native.checkpoints import newest_checkpoint
from trainer.native.distributed import join_process_group
from trainer.native.loader import BatchLoader
from trainer.native.model import available_attention
from trainer.native.optimizer import Stepper, StepResult
from trainer.runner.prepare import prepare
from trainer.session.progress_log import ProgressLog

#: Steps before the clock starts: allocation, autotuning, compilation.
WARM_STEPS = 3


def prepare_launch(run: RunSpec) -> LaunchSpec:
    """Prepare rows, plan and launch spec of a run in this process, without the runner."""
    work = Path(run.work_dir)
    data, launch = work / "data", work / "launch"
    for folder in (data, launch, Path(run.submission_dir).parent):
        folder.mkdir(parents=True, exist_ok=True)
    # Of an earlier launch: its records would be taken for this one's.
    files = (Path(run.stop_path), Path(run.result_path), launch / "outcome.json")
    for old in (*files, *launch.glob("failure-*.json")):
        old.unlink(missing_ok=True)
    prepare_spec = PrepareSpec(
        run=run,
        plan_path=run.plan_path,
        plan_out=str(launch / "plan.json"),
        folder=str(data),
        prepared_out=str(data / "prepared.json"),
        failure_out=str(data / "failure.json"),
    )
    prepared = prepare(prepare_spec)
    state = newest_checkpoint(work / "output")
    return LaunchSpec(
        run=run,
        plan_path=prepare_spec.plan_out,
        launch_dir=str(launch),
        prepared=prepared,
        resume_from=str(state) if state else run.resume_from,
    )


def timed_steps(spec: LaunchSpec, plan: TrainingPlan) -> Iterator[tuple[StepResult, float, int]]:
    """Each step, its seconds, and its tokens, without end."""
    if plan.gpus.is_cpu:
        # As a training is launched: little models gain nothing from threads that wait for each other.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with join_process_group(cpu=plan.gpus.is_cpu) as ranks:
        setup = train.set_up(spec, plan, ProgressLog(None), ranks)
        stepper, loader = Stepper(setup.net, setup.plan, ranks), BatchLoader(setup.train, setup.order)
        try:
            began = time.perf_counter()
            for batches in loader:
                step = stepper.step(batches)
                if ranks.device.type == "cuda":
                    torch.cuda.synchronize(ranks.device)
                ended = time.perf_counter()
                yield step, ended - began, sum(batch.tokens for batch in batches)
                began = time.perf_counter()
        finally:
            loader.close()


def measure_speed(spec: LaunchSpec, plan: TrainingPlan, count: int) -> dict[str, Any]:
    seconds, tokens, loss = [], 0, 0.0
    for number, (step, took, step_tokens) in enumerate(timed_steps(spec, plan)):
        if number >= WARM_STEPS:
            seconds.append(took)
            tokens, loss = tokens + step_tokens, step.loss
        if len(seconds) == count:
            break
    memory = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
    return {
        "tokens_s": tokens / sum(seconds),
        "step_ms": 1e3 * statistics.median(seconds),
        "memory_bytes": memory,
        "loss": loss,
    }


@dataclass(frozen=True)
class SweepSetting:
    name: str
    plan: TrainingPlan
    #: The same as a profile's targets; the native trainer's own keys under "engine_config".
    targets: dict[str, Any]


def single_gpu_plan(plan: TrainingPlan) -> TrainingPlan:
    """The plan on one GPU, with exactly its own batch."""
    changes = {
        "parallelism": Parallelism.SINGLE,
        "fsdp": None,
        "batch": plan.batch.model_copy(update={"world_size": 1}),
        "launch": plan.launch.model_copy(update={"processes": 1}),
        "engine_config": {**plan.engine_config, "probe_batch": False, "batch_ramp": 0.0},
    }
    return TrainingPlan.model_validate(plan.model_copy(update=changes).model_dump())


def _precision(plan: TrainingPlan, **changes: Any) -> TrainingPlan:
    return plan.model_copy(update={"precision": plan.precision.model_copy(update=changes)})


def _with_engine_keys(plan: TrainingPlan, **changes: Any) -> TrainingPlan:
    return plan.model_copy(update={"engine_config": {**plan.engine_config, **changes}})


def _cuda() -> bool:
    return torch.cuda.is_available()


def compile_modes(plan: TrainingPlan) -> Iterator[SweepSetting]:
    modes: list[CompileMode | None] = [None, CompileMode.DEFAULT]
    modes += [CompileMode.MAX_AUTOTUNE] if _cuda() else []
    for mode in modes:
        if mode is not plan.precision.compile_mode:
            yield SweepSetting(mode or "off", _precision(plan, compile_mode=mode), {"compile_mode": mode})


def attention_kernels(plan: TrainingPlan) -> Iterator[SweepSetting]:
    device = torch.device("cuda" if _cuda() else "cpu")
    for kind in (Attention.SDPA, Attention.FLASH_2, Attention.FLASH_3, Attention.FLEX):
        if kind is not plan.precision.attention and available_attention(kind, device) is kind:
            yield SweepSetting(kind, _precision(plan, attention=kind), {"attention": kind})


def packing_modes(plan: TrainingPlan) -> Iterator[SweepSetting]:
    other = not plan.sequence.packing
    if other and plan.model.packing_problem:
        return
    sequence = plan.sequence.model_copy(update={"packing": other})
    yield SweepSetting(
        "on" if other else "off",
        plan.model_copy(update={"sequence": sequence}),
        {"sample_packing": other},
    )


def micro_batches(plan: TrainingPlan) -> Iterator[SweepSetting]:
    """The effective batch stays, as far as it divides."""
    batch = plan.batch
    for size in (2 * batch.micro, 4 * batch.micro, batch.micro // 2):
        if size and batch.micro * batch.accumulation % size == 0:
            fewer = {"micro": size, "accumulation": batch.micro * batch.accumulation // size}
            targets = {"micro_batch_size": size, "gradient_accumulation_steps": fewer["accumulation"]}
            changed = plan.model_copy(update={"batch": batch.model_copy(update=fewer)})
            yield SweepSetting(f"{size} × {fewer['accumulation']}", changed, targets)


def checkpointing_modes(plan: TrainingPlan) -> Iterator[SweepSetting]:
    off = _precision(plan, gradient_checkpointing=False)
    on = _precision(plan, gradient_checkpointing=True)
    if plan.precision.gradient_checkpointing:
        yield SweepSetting("off", off, {"gradient_checkpointing": False})
    for name, keys in (
        ("layers", {"recompute": "layers"}),
        ("every second layer", {"recompute": "layers", "recompute_every": 2}),
        ("cheap", {"recompute": "cheap"}),
    ):
        targets = {"gradient_checkpointing": True, "engine_config": keys}
        yield SweepSetting(name, _with_engine_keys(on, **keys), targets)


def optimizers(plan: TrainingPlan) -> Iterator[SweepSetting]:
    names = [Optimizer.ADAMW_TORCH_FUSED, Optimizer.ADAMW_TORCH_8BIT, Optimizer.MUON]
    for name in names:
        if name is not plan.optimizer.name:
            changed = plan.optimizer.model_copy(update={"name": name})
            yield SweepSetting(name, plan.model_copy(update={"optimizer": changed}), {"optimizer": name})


def number_formats(plan: TrainingPlan) -> Iterator[SweepSetting]:
    if not plan.precision.bf16:
        yield SweepSetting("bf16", _precision(plan, bf16=True, fp16=False), {"bf16": True})
    if _cuda() and not plan.precision.fp8 and plan.adapter is None:
        both = _precision(plan, fp8=True, compile_mode=plan.precision.compile_mode or CompileMode.DEFAULT)
        yield SweepSetting("fp8", both, {"fp8": True, "compile_mode": both.precision.compile_mode})


#: In the order in which they are tried: the largest first, since the others depend on them.
AXES: dict[str, Callable[[TrainingPlan], Iterator[SweepSetting]]] = {
    "packing": packing_modes,
    "numbers": number_formats,
    "attention": attention_kernels,
    "checkpointing": checkpointing_modes,
    "micro": micro_batches,
    "compile": compile_modes,
    "optimizer": optimizers,
}


#: Faster by less is noise.
WORTH_SPEEDUP = 1.03
#: A setting that takes longer, compilation included, is given up.
_PATIENCE_S = 1500.0


def sweep(
    spec: LaunchSpec, plan: TrainingPlan, count: int, wanted: Sequence[str]
) -> Generator[dict[str, Any], None, None]:
    """One axis after the other, each on top of the best so far; at the end what to keep."""
    best, kept = plan, dict[str, Any]()
    measured = yield from _measured("as planned", SweepSetting("", plan, {}), spec, count, None)
    if "tokens_s" not in measured:
        return
    first = fastest = measured["tokens_s"]
    for name in wanted:
        chosen: tuple[float, TrainingPlan, dict[str, Any]] | None = None
        for setting in AXES[name](best):
            measured = yield from _measured(f"{name}: {setting.name}", setting, spec, count, first)
            if measured.get("tokens_s", 0.0) > max(fastest * WORTH_SPEEDUP, chosen[0] if chosen else 0.0):
                chosen = measured["tokens_s"], setting.plan, setting.targets
        if chosen is not None:
            fastest, best = chosen[:2]
            kept |= chosen[2]
    yield {"event": "keep", "targets": kept, "tokens_s": fastest, "gain": fastest / first}


def _measured(
    name: str, setting: SweepSetting, spec: LaunchSpec, count: int, first: float | None
) -> Generator[dict[str, Any], None, dict[str, Any]]:
    measured = _in_own_process(spec, setting.plan, count)
    gain = measured["tokens_s"] / first if "tokens_s" in measured and first else None
    yield {"event": "setting", "name": name, "targets": setting.targets, "gain": gain, **measured}
    return measured


def _in_own_process(spec: LaunchSpec, plan: TrainingPlan, count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=spec.launch_dir) as folder:
        plan_path = Path(folder) / "plan.json"
        plan_path.write_text(plan.to_json(), encoding="utf-8")
        own = spec.model_copy(update={"plan_path": str(plan_path), "launch_dir": folder})
        command = [sys.executable, "-m", "trainer.native.measure", "one", str(own.write()), str(count)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {_PATIENCE_S:.0f} s"}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"failed": lines[-1][:300] if lines else f"ended with {done.returncode}"}
    measured: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return measured


#: Kernels that are printed; the table on disk has three times as many.
_SHOWN_KERNELS = 15


def trace(spec: LaunchSpec, plan: TrainingPlan, folder: Path, count: int) -> Iterator[dict[str, Any]]:
    """`trace.json.gz` for a trace viewer, `kernels.txt` for people."""
    from torch.profiler import ProfilerActivity, profile, schedule

    folder.mkdir(parents=True, exist_ok=True)
    cuda = torch.cuda.is_available() and not plan.gpus.is_cpu
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    window = schedule(wait=WARM_STEPS - 1, warmup=1, active=count, repeat=1)
    with profile(activities=activities, schedule=window, record_shapes=True) as profiler:
        for number, _ in enumerate(timed_steps(spec, plan), start=1):
            profiler.step()
            if number == WARM_STEPS + count:
                break
    profiler.export_chrome_trace(str(folder / "trace.json.gz"))
    averages = profiler.key_averages()
    operations = [operation for operation in averages if not operation.key.startswith("ProfilerStep")]
    by = "self_device_time_total" if cuda else "self_cpu_time_total"
    (folder / "kernels.txt").write_text(
        averages.table(sort_by=by, row_limit=3 * _SHOWN_KERNELS), encoding="utf-8"
    )
    total = sum(getattr(operation, by) for operation in operations) or 1.0
    for operation in sorted(operations, key=lambda entry: -getattr(entry, by))[:_SHOWN_KERNELS]:
        spent = getattr(operation, by)
        yield {
            "event": "kernel",
            "name": operation.key,
            "calls": operation.count,
            "ms_per_step": spent / 1e3 / count,
            "share": spent / total,
        }
    yield {"event": "traced", "trace": str(folder / "trace.json.gz"), "table": str(folder / "kernels.txt")}


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["one"]:
        spec = LaunchSpec.model_validate_json(Path(arguments[1]).read_bytes())
        _print_json(measure_speed(spec, spec.plan, int(arguments[2])))
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
            kind.add_argument("--levers", default=",".join(AXES))
    options = parser.parse_args(list(arguments))
    spec = prepare_launch(RunSpec.from_json(options.run.read_bytes()))
    plan = single_gpu_plan(spec.plan)
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parents[2]))
    if options.kind == "trace":
        events = trace(spec, plan, options.folder, options.steps)
    else:
        wanted = [name for name in AXES if name in options.levers.split(",")]
        events = sweep(spec, plan, options.steps, wanted)
    for event in events:
        _print_json(event)
    return 0


def _print_json(event: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
