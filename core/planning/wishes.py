"""What the profile asks for, before memory and time have had their say.

A wish is turned into a `Setup` for a number of GPUs. Everything that cannot be had whatever the memory (a
rank above the limit, fp8 on a card without it, a sequence beyond the model's window) gives way here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from pydantic import JsonValue

from core.budget import Concession
from core.choices import Attention, CompileMode, Engine, EvalMetric, Method
from core.data import DatasetFacts
from core.hardware import GpuKind
from core.models import ModelFacts
from core.plan_parts import LrSearchPlan, TaskSpec
from core.planning.schedule import held_out
from core.planning.sequences import (
    Sequences,
    how_of,
    longest,
    natural_length,
    picture_sequences,
    text_sequences,
)
from core.planning.setup import Setup
from core.planning.shape import Shape, shape_of
from core.profile.annotations import engine_for
from core.profile.schema import ResolvedProfile
from core.profile.targets import Limits, Targets
from core.tasks import TaskType


class Wish(NamedTuple):
    """The profile's targets made concrete for one task, model and kind of GPU."""

    task: TaskSpec
    model: ModelFacts
    data: DatasetFacts
    profile: ResolvedProfile
    kind: GpuKind
    engine: Engine
    method: Method
    shape: Shape
    rank: int
    length: int
    eval_rows: int
    attention: Attention
    compile_mode: CompileMode | None
    width: int
    fp8: bool
    reference_ready: bool
    #: Steps back that hold for any number of GPUs.
    concessions: tuple[Concession, ...]
    #: Sequences per step that were asked for, where they gave too few steps (`batch.py`).
    asked_batch: int | None = None

    @property
    def targets(self) -> Targets:
        return self.profile.targets

    @property
    def limits(self) -> Limits:
        return self.profile.limits

    @property
    def training_rows(self) -> int:
        return self.data.rows - self.eval_rows

    def effective(self, world: int) -> int:
        """Sequences per step that the profile asks for on so many GPUs, before rounding."""
        asked = self.targets.effective_batch_size
        if asked is not None:
            return asked
        return self.targets.micro_batch_size * self.targets.gradient_accumulation_steps * world

    @property
    def micro_target(self) -> int:
        return min(self.targets.micro_batch_size, self.limits.max_micro_batch)

    def per_gpu(self, world: int) -> int:
        """Sequences of one GPU in one step: a whole number, and for GRPO whole groups of completions."""
        share = max(round(self.effective(world) / world), 1)
        if self.task.task_type is not TaskType.GRPO:
            return share
        group = self.targets.grpo_generations
        return max(math.ceil(share / group) * group, group * world)

    def sequences(self, setup: Setup) -> Sequences:
        if setup.picture is not None:
            repeats = self.targets.image_repeats or self.data.image_repeats
            return picture_sequences(self.data, self.model, setup.picture.resolution, repeats)
        effective = setup.micro * setup.accumulation * setup.world
        how, rows = how_of(self.targets), self.training_rows
        if self.model.attention is not Attention.FLASH_2:
            how = how._replace(packing=False)  # rows of one sequence would see each other
        return text_sequences(self.data, how, setup.length, rows, setup.micro, effective)


def wish_for(
    task: TaskSpec, model: ModelFacts, data: DatasetFacts, profile: ResolvedProfile, kind: GpuKind
) -> Wish:
    """Concrete, and with every step back that no amount of memory could spare."""
    targets, limits = profile.targets, profile.limits
    found: list[Concession] = []
    engine = _engine(targets, task, found)
    compile_mode = targets.compile_mode if kind.compute_capability >= (7, 0) else None
    width = _width(targets, kind, found)
    length = _length(data, model, targets, limits, found)
    rank = _rank(targets, limits, found)
    method = _method(model, targets, engine, found)
    attention = _attention(model, targets, kind, found)
    fp8 = _fp8(targets, kind, found)
    if targets.sample_packing and model.attention is not Attention.FLASH_2:
        found.append(_gave("sample_packing", True, False, f"{model.architecture} has no flash attention"))
    if targets.compile_mode is not None and compile_mode is None:
        found.append(_gave("compile_mode", targets.compile_mode.value, None, f"not on {kind.name}"))
    return Wish(
        task=task,
        model=model,
        data=data,
        profile=profile,
        kind=kind,
        engine=engine,
        method=method,
        shape=shape_of(model, tuple(targets.lora_target_modules or ())),
        rank=rank,
        length=length,
        eval_rows=held_out(task.task_type, data.rows, targets),
        attention=attention,
        compile_mode=compile_mode,
        width=width,
        fp8=fp8,
        reference_ready=_reference_ready(task, targets, method),
        concessions=tuple(found),
    )


def lr_search(wish: Wish) -> LrSearchPlan | None:
    """Only where there are held-out rows in the validator's metric, and an engine that can try and undo."""
    targets = wish.targets
    judged = wish.eval_rows > 0 and targets.eval_metric is EvalMetric.VALIDATOR
    if targets.lr_search_share <= 0 or wish.engine is not Engine.AXOLOTL or not judged:
        return None
    return LrSearchPlan(share=targets.lr_search_share, most=targets.lr_search_most)


def _gave(field: str, wanted: JsonValue, got: JsonValue, reason: str) -> Concession:
    return Concession(field=field, wanted=wanted, got=got, reason=reason)


def _engine(targets: Targets, task: TaskSpec, found: list[Concession]) -> Engine:
    engine = engine_for(targets, task.task_type, task.image_type)
    if engine is Engine.NATIVE and task.task_type is TaskType.GRPO:
        engine = Engine.AXOLOTL
    if targets.engine is not None and targets.engine is not engine:
        reason = f"{targets.engine.value} does not train {task.image_type or task.task_type}"
        found.append(_gave("engine", targets.engine.value, engine.value, reason))
    return engine


def _width(targets: Targets, kind: GpuKind, found: list[Concession]) -> int:
    if targets.bf16 and not kind.has_bf16:
        found.append(_gave("bf16", True, False, f"{kind.name} has no bfloat16; float16 instead"))
    return 2 if targets.bf16 or targets.fp16 else 4


def _length(
    data: DatasetFacts, model: ModelFacts, targets: Targets, limits: Limits, found: list[Concession]
) -> int:
    most = longest(data, model, limits)
    if targets.sequence_len is None or model.is_image or data.task_type is TaskType.GRPO:
        return natural_length(data, targets, most)
    if targets.sequence_len > most:
        window = model.max_position <= limits.max_sequence_len
        why = f"the model's window is {most}" if window else f"limits.max_sequence_len is {most}"
        found.append(_gave("sequence_len", targets.sequence_len, most, why))
    return min(targets.sequence_len, most)


def _rank(targets: Targets, limits: Limits, found: list[Concession]) -> int:
    if targets.lora_r > limits.max_lora_r:
        found.append(
            _gave("lora_r", targets.lora_r, limits.max_lora_r, f"limits.max_lora_r is {limits.max_lora_r}")
        )
    return min(targets.lora_r, limits.max_lora_r)


def _method(model: ModelFacts, targets: Targets, engine: Engine, found: list[Concession]) -> Method:
    if model.is_image:
        if targets.method not in (None, Method.LORA):
            found.append(_gave("method", targets.method.value, "lora", "validators take image adapters only"))
        return Method.LORA
    if targets.method is not None:
        return targets.method
    small = targets.full_below is not None and model.params_total < targets.full_below
    return Method.FULL if small else Method.LORA


def _attention(model: ModelFacts, targets: Targets, kind: GpuKind, found: list[Concession]) -> Attention:
    able = model.attention
    best = Attention.FLASH_2 if kind.compute_capability >= (8, 0) else Attention.SDPA
    best = best if able is Attention.FLASH_2 else able
    asked = targets.attention
    if asked is None:
        return best
    if able is not Attention.FLASH_2 and asked not in (able, Attention.EAGER):
        found.append(_gave("attention", asked.value, best.value, f"{model.architecture} has none such"))
        return best
    hopper_only = asked is Attention.FLASH_3 and kind.compute_capability < (9, 0)
    needs_ampere = asked in (Attention.FLASH_2, Attention.FLASH_3, Attention.FLEX)
    if hopper_only or (needs_ampere and kind.compute_capability < (8, 0)):
        found.append(_gave("attention", asked.value, best.value, f"{kind.name} cannot run it"))
        return best
    return asked


def _fp8(targets: Targets, kind: GpuKind, found: list[Concession]) -> bool:
    if targets.fp8 and not kind.has_fp8:
        found.append(_gave("fp8", True, False, f"{kind.name} has no fp8 tensor cores"))
    return targets.fp8 and kind.has_fp8


def _reference_ready(task: TaskSpec, targets: Targets, method: Method) -> bool:
    """A full fine-tune is spared the second copy; for an adapter the clock decides later."""
    if task.task_type is not TaskType.DPO:
        return False
    if targets.dpo_precompute_reference is not None:
        return targets.dpo_precompute_reference
    return method is Method.FULL
