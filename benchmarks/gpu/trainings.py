"""Trainings of a few steps, timed: the native trainer's as a user's run has them, and Hugging Face's."""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.figures import Figure
from benchmarks.gpu.shapes import model_folder, rows_file
from core.domain.choices import Engine
from core.planning.measured import MOST_OFFSET_BYTES, MeasuredTraining, measured_slowness, step_kind
from core.planning.memory.persistent import CONTEXT_BYTES
from core.planning.plan import TrainingPlan
from core.planning.time.calibration import expected_speed, flops_utilisation
from core.runs.run_files import RunSpec
from miner.jobs.native_runs import PROFILE_FILE, NativeMode, NativeRunOptions, make_run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GB = 1e9
Bounds = tuple[float | None, float | None]
#: What the calculations are for: the two have the same multiplying units.
HOPPER = "H"
#: Steps before the clock starts: allocation, autotuning.
WARM = 3


@dataclass(frozen=True)
class Workbench:
    """The child's place: models and runs lie in `root`, and everything ends by `until`."""

    root: Path
    small: bool
    until: float

    @property
    def left(self) -> float:
        return self.until - time.monotonic()

    def model(self, name: str) -> Path:
        """A shape's folder; the path of a model's own is as good as a name."""
        if name.startswith("/"):
            return Path(name)
        return model_folder(self.root, name, self.small, DEVICE)

    @property
    def length(self) -> int:
        return 128 if self.small else 4096


class Variant(NamedTuple):
    """A training to time, by the profile's fields."""

    name: str
    model: str
    targets: dict[str, Any]
    #: What was calculated for an H100 or H200, by the figure's name.
    bounds: dict[str, Bounds] = {}  # noqa: RUF012 - never changed
    mode: NativeMode = NativeMode.SFT
    steps: int = 8

    def figure(
        self, name: str, value: float, unit: str = "", plan: float | None = None, note: str = ""
    ) -> Figure:
        low, high = self.bounds.get(name, (None, None))
        return Figure(
            name=f"{self.name}: {name}",
            value=value,
            unit=unit,
            plan=plan or None,
            low=low,
            high=high,
            bounds_for=HOPPER,
            note=note,
        )


def run_of(bench: Workbench, variant: Variant, hours: float = 24.0) -> RunSpec:
    """The run's folder, as `god-miner train native` makes it, and its profile in the environment."""
    folder = bench.root / "runs" / variant.name.replace(" ", "-")
    pairs = variant.mode is NativeMode.DPO
    longest = variant.targets.get("sequence_len", bench.length) // (1 if pairs else 2)
    rows = rows_file(bench.root, 96 if pairs or bench.small else 600, longest, pairs)
    options = NativeRunOptions(
        mode=variant.mode,
        model=bench.model(variant.model),
        data=rows,
        hours=hours,
        profile="steady",
        targets={**COMMON, "sequence_len": bench.length, **variant.targets},
    )
    run = make_run(folder, options)
    os.environ["GOD_MINER_PROFILE"] = str(folder / PROFILE_FILE)
    return run


#: So many epochs that a day is not enough: the planner compiles where a long training gains by it.
COMMON: dict[str, Any] = {
    "num_epochs": 1000,
    "micro_batch_size": 2,
    "effective_batch_size": 2,
    "least_steps": 1,
    "lr_search_share": 0,
    "attention": "sdpa",
    "sample_packing": True,
    "gradient_checkpointing": False,
    "val_rows_max": 16,
}
LORA = {"method": "lora", "lora_r": 64, "lora_alpha": 32}
FULL = {"method": "full", "optimizer": "adamw_torch_fused"}


@dataclass
class Timed:
    """Measurements of a training's steps."""

    plan: TrainingPlan
    load_s: float
    first_s: float = 0.0
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: float | None = None
    #: After the warm steps.
    recompiled: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def tokens_s(self) -> float:
        return sum(self.tokens) / sum(self.seconds)

    @property
    def samples_s(self) -> float:
        return self.plan.batch.effective / median(self.seconds)

    def figures(self, of: Variant) -> Iterator[Figure]:
        expected = expected_speed(self.plan)
        planned = None if expected is None else expected.tokens_s
        yield of.figure("speed", self.tokens_s, "tokens/s", planned)
        if (mfu := flops_utilisation(self.plan, self.tokens_s, self.samples_s)) is not None:
            planned = None if expected is None or expected.mfu is None else 100 * expected.mfu
            yield of.figure("MFU", 100 * mfu, "%", planned)
        if self.peak_bytes is not None:
            yield of.figure("peak", self.peak_bytes / GB, "GB", self.plan.memory.total_bytes / GB)
        yield of.figure("load", self.load_s, "s", self.plan.time["load"])
        yield of.figure("first step", self.first_s, "s")
        if self.plan.precision.compile_mode is not None:
            yield of.figure("graphs compiled later", self.recompiled)

    def measured(self) -> MeasuredTraining | None:
        """Relate it to the prior, for later plans, also where this one followed measurements already."""
        plan, expected = self.plan, expected_speed(self.plan)
        efficiency = expected and expected.efficiency(self.tokens_s, self.samples_s)
        if not efficiency or plan.gpus.is_cpu or len(self.seconds) < 3:
            return None
        offset = 0.0 if self.peak_bytes is None else self.peak_bytes - plan.memory.total_bytes
        more = round(offset) + plan.memory["measured"]
        return MeasuredTraining(
            engine=Engine.NATIVE,
            step=step_kind(plan.task.task_type),
            method=plan.method,
            compiled=plan.precision.compile_mode is not None,
            checkpointing=plan.precision.gradient_checkpointing,
            params=plan.model.params_total,
            slowness=min(max(measured_slowness(plan.candidate) / efficiency, 0.2), 20.0),
            memory_offset_bytes=min(max(more, -MOST_OFFSET_BYTES), MOST_OFFSET_BYTES),
        )


def native_steps(bench: Workbench, variant: Variant, save: bool = False) -> tuple[Timed, list[Figure]]:
    """Time the steps of a variant; with `save`, also a checkpoint's copy and the optimizer's update."""
    from trainer.native.trace import open_training, prepare_launch, single_gpu_plan
    from trainer.session.progress_log import ProgressLog

    run = run_of(bench, variant)
    spec = prepare_launch(run)
    plan = single_gpu_plan(spec.plan)
    free_memory()  # of the model's making
    began, more = time.monotonic(), list[Figure]()
    with open_training(spec, plan, ProgressLog(Path(run.progress_path))) as training:
        timed = Timed(training.setup.plan, load_s=time.monotonic() - began)
        timed.notes += [
            f"{variant.name}: {given}" for given in plan.concessions if given.field in variant.targets
        ]
        _steps(bench, timed, training.steps(), variant.steps)
        if save and bench.left > 10:
            more += _beside_steps(bench, variant, training)
    free_memory()
    return timed, more


def _steps(bench: Workbench, timed: Timed, steps: Iterator[Any], count: int) -> None:
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    compiled = 0
    for number in range(WARM + count):
        began = time.monotonic()
        result = next(steps)
        seconds = time.monotonic() - began
        timed.losses.append(result.loss)
        if number == 0:
            timed.first_s = seconds
        if number == WARM - 1:
            compiled = _graphs()
        if number >= WARM:
            timed.seconds.append(seconds)
            timed.tokens.append(result.tokens)
        if bench.left < 3 + 2 * seconds and len(timed.seconds) >= 3:
            timed.notes.append(f"{len(timed.seconds)} steps instead of {count}: the time was over")
            break
    timed.recompiled = _graphs() - compiled
    timed.peak_bytes = peak_bytes()


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def peak_bytes() -> float | None:
    """The most that the process has had of the card: the allocator's, and what lies beside it."""
    if DEVICE != "cuda":
        return None
    free, total = torch.cuda.mem_get_info()
    beside = total - free - torch.cuda.memory_reserved()
    # A neighbour on the card is not ours.
    return torch.cuda.max_memory_reserved() + min(max(float(beside), 0.0), 3 * CONTEXT_BYTES)


def _beside_steps(bench: Workbench, of: Variant, training: Any) -> Iterator[Figure]:
    from trainer.native.checkpoints import Saver, TrainingPosition

    masters, seconds = training.stepper.masters, list[float]()
    update = masters.step

    def timed_update() -> None:
        synchronize()
        began = time.monotonic()
        update()
        synchronize()
        seconds.append(time.monotonic() - began)

    masters.step = timed_update
    for _ in range(3):
        next(training.steps())
    yield of.figure("optimizer's update", 1e3 * median(seconds), "ms")
    saver = Saver(bench.root / "states", training.ranks, 1)
    began = time.monotonic()
    saver.save(training.stepper, TrainingPosition(1, training.setup.shape), lambda folder: None)
    blocked = time.monotonic() - began
    yield of.figure("a save blocks", blocked, "s")
    saver.wait()
    yield of.figure("a save is on disk after", time.monotonic() - began, "s")
    shutil.rmtree(bench.root / "states")


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def free_memory() -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def hugging_face(bench: Workbench, like: Variant, liger: bool, steps: int = 8) -> float:
    """Tokens per second of transformers' Trainer with a variant's numbers. All rows are full: padding
    costs it nothing."""
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    net: Any = AutoModelForCausalLM.from_pretrained(
        bench.model(like.model), dtype=torch.bfloat16, attn_implementation="sdpa"
    ).to(DEVICE)
    if like.targets["method"] == "lora":
        from peft import LoraConfig, get_peft_model

        net = get_peft_model(net, LoraConfig(r=64, lora_alpha=32, target_modules="all-linear"))
    micro, stamps = COMMON["micro_batch_size"], list[float]()
    ids = torch.randint(4, 2000, (micro * (WARM + steps + 1), bench.length)).tolist()

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronize()
            stamps.append(time.monotonic())

    arguments = TrainingArguments(
        output_dir=str(bench.root / "hf"),
        per_device_train_batch_size=micro,
        max_steps=WARM + steps,
        bf16=DEVICE == "cuda",
        use_cpu=DEVICE == "cpu",
        optim="adamw_torch_fused",
        use_liger_kernel=liger,
        gradient_checkpointing=like.targets.get("gradient_checkpointing", False),
        gradient_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=1000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = [{"input_ids": row, "labels": row} for row in ids]
    Trainer(
        model=net, args=arguments, train_dataset=rows, data_collator=_stacked, callbacks=[Watch()]
    ).train()
    del net
    free_memory()
    seconds = [after - before for before, after in zip(stamps[WARM - 1 :], stamps[WARM:], strict=False)]
    return micro * bench.length / median(seconds)


def _stacked(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
