"""Read what a tournament's validator has measured of the base model: the file of `BASELINE_STATS_PATH`.

It comes from outside and its form has changed before: a value that is missing or makes no sense is as if it
were not there, and nothing in it can end a run. Two things are read.

The speed of forward and backward passes becomes the first guess of a step's time, until steps are measured.

The RMS of the weights says where the search for a rate begins (`optimizer.py`).

The loss in the file is not read: the trainer scores the base on its own held-out rows, by the validator's
metric, and recognises a tuned model by that (`trainer.session.learning_rate`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from core.domain.choices import Attention, Method, Parallelism
from core.domain.hardware import find_kind
from core.domain.records import Record
from core.domain.tasks import TaskType
from core.planning.candidate import LossKind
from core.planning.plan import TrainingPlan
from core.planning.time.speed import PassWork, step_time
from core.submission.folder import read_plain

#: Theirs are a few kilobytes.
MOST_BYTES = 1_000_000
MATRICES = ("attention_qkv", "attention_output", "ffn_up", "ffn_down")
#: Their harness is not our engine: beyond these factors on our estimate it says more of itself than of the
#: GPU.
FASTEST, SLOWEST = 0.5, 2.0


class BaselineSpeed(Record):
    """Forward and backward passes of the whole model, with checkpointing, without an optimizer. Over several
    GPUs the layers are spread one after the other, so this is about the speed of one GPU."""

    tokens_s: float
    length: int
    micro: int
    gpu: str


class BaselineStats(Record):
    #: The median over the kinds of matrices.
    weight_rms: float | None = None
    speed: BaselineSpeed | None = None


class BadStats(Exception):
    """Why a file of statistics is ignored."""


def read_baseline_stats(path: Path) -> BaselineStats:
    """`BadStats` where nothing in the file can be used."""
    try:
        content = json.loads(read_plain(path, MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise BadStats(f"they cannot be read: {str(error)[:200]}") from None
    stats = BaselineStats(weight_rms=_weight_rms(content), speed=_speed(content))
    if stats == BaselineStats():
        raise BadStats("they have neither weights nor a throughput")
    return stats


def _weight_rms(content: Any) -> float | None:
    groups = _part(_part(content, "weights"), "by_group")
    values = [_number(_part(groups, name), "weight_rms", 1e-6, 1e3) for name in MATRICES]
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _speed(content: Any) -> BaselineSpeed | None:
    part = _part(content, "throughput")
    tokens_s = _number(part, "tokens_per_sec", 1.0, 1e8)
    length, micro = _number(part, "seq_len", 1, 1e6), _number(part, "micro_batch_size", 1, 1e5)
    gpu = part.get("gpu_name")
    if tokens_s is None or length is None or micro is None or not isinstance(gpu, str):
        return None
    return BaselineSpeed(tokens_s=tokens_s, length=int(length), micro=int(micro), gpu=gpu[:200])


def _part(content: Any, name: str) -> Mapping[str, Any]:
    part = content.get(name) if isinstance(content, dict) else None
    return part if isinstance(part, dict) else {}


def _number(part: Mapping[str, Any], name: str, least: float, most: float) -> float | None:
    value = part.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        return None
    return float(value)


def slowness_of(plan: TrainingPlan, stats: BaselineStats) -> float | None:
    """Return a step's time relative to our estimate, by the measured passes, or None if they were measured
    on another kind of GPU."""
    speed, kind = stats.speed, plan.gpus.kind
    named = find_kind(speed.gpu) if speed is not None else None
    if speed is None or plan.gpus.is_cpu or named is None or named.name != kind.name:
        return None
    measured_as = replace(
        plan.candidate,
        task=TaskType.INSTRUCT,
        method=Method.FULL,
        world=1,
        parallelism=Parallelism.SINGLE,
        micro=speed.micro,
        accumulation=1,
        length=speed.length,
        rank=0,
        width=2,
        checkpointing=True,
        attention=Attention.SDPA,
        loss=LossKind.FULL,
        compile_mode=None,
        fp8=False,
        kl=False,
        prompt_kl=False,
    )
    tokens = speed.micro * speed.length
    expected_s = step_time(measured_as, PassWork(tokens, speed.length)).compute_s
    return min(max(tokens / speed.tokens_s / expected_s, FASTEST), SLOWEST)


def speed_text(stats: BaselineStats, slowness: float) -> str:
    assert stats.speed is not None
    speed = f"{stats.speed.tokens_s:,.0f} tokens/s forward and backward"
    return f"by the validator's statistics ({speed}) steps take {slowness:.2f} × our estimate"
