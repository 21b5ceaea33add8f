"""A few steps under torch's profiler: the kernels that the time goes to.

    python -m trainer.native.trace RUN.json FOLDER [--steps 5]

Each answer is a line of JSON; one GPU (or the CPU) is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from core.domain.choices import Parallelism
from core.planning.candidate import vary
from core.planning.plan import TrainingPlan
from core.runs.run_files import RunSpec
from trainer.handoff import LaunchSpec, PrepareSpec
from trainer.native import train
from trainer.native.checkpoints import newest_checkpoint
from trainer.native.distributed import NativeCommunicator, join_process_group
from trainer.native.loader import BatchLoader
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


class OpenTraining(NamedTuple):
    """A training without its session: nothing is evaluated, searched for, submitted or saved."""

    setup: train.TrainingSetup
    stepper: Stepper
    ranks: NativeCommunicator
    loader: BatchLoader

    def steps(self) -> Iterator[StepResult]:
        """Make steps without end; each is over on the device when it is yielded."""
        for batches in self.loader:
            result = self.stepper.step(batches)
            if self.ranks.device.type == "cuda":
                torch.cuda.synchronize(self.ranks.device)
            yield result


@contextmanager
def open_training(
    spec: LaunchSpec, plan: TrainingPlan, progress: ProgressLog | None = None
) -> Iterator[OpenTraining]:
    """Load model and rows, as a training is launched on one GPU or the CPU."""
    if plan.gpus.is_cpu:
        # Little models gain nothing from threads that wait for each other.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with join_process_group(cpu=plan.gpus.is_cpu) as ranks:
        setup = train.set_up(spec, plan, progress or ProgressLog(None), ranks)
        stepper, loader = Stepper(setup.net, setup.plan, ranks), BatchLoader(setup.train, setup.order)
        with closing(loader):
            yield OpenTraining(setup, stepper, ranks, loader)


def single_gpu_plan(plan: TrainingPlan) -> TrainingPlan:
    """The plan on one GPU, with exactly its own batch."""
    changes = {
        "candidate": vary(plan.candidate, parallelism=Parallelism.SINGLE, world=1, hybrid=False),
        "parallelism": Parallelism.SINGLE,
        "fsdp": None,
        "batch": plan.batch.model_copy(update={"world_size": 1}),
        "launch": plan.launch.model_copy(update={"processes": 1}),
        "engine_config": {**plan.engine_config, "probe_batch": False, "batch_ramp": 0.0},
    }
    return TrainingPlan.from_json(plan.model_copy(update=changes).to_json())


#: Kernels that are printed; the table on disk has three times as many.
_SHOWN_KERNELS = 15


def trace(spec: LaunchSpec, plan: TrainingPlan, folder: Path, count: int) -> Iterator[dict[str, Any]]:
    """`trace.json.gz` for a trace viewer, `kernels.txt` for people."""
    from torch.profiler import ProfilerActivity, profile, schedule

    folder.mkdir(parents=True, exist_ok=True)
    cuda = torch.cuda.is_available() and not plan.gpus.is_cpu
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    window = schedule(wait=WARM_STEPS - 1, warmup=1, active=count, repeat=1)
    profiled = profile(activities=activities, schedule=window, record_shapes=True)
    with open_training(spec, plan) as training, profiled as profiler:
        for number, _ in enumerate(training.steps(), start=1):
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
    parser = argparse.ArgumentParser(prog="trainer.native.trace")
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args(list(arguments))
    spec = prepare_launch(RunSpec.from_json(options.run.read_bytes()))
    for event in trace(spec, single_gpu_plan(spec.plan), options.folder, options.steps):
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
