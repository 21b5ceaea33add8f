"""Scale every side of `benchmarks/text_rules` to tiny models, by the same rules.

Tables of rates are for models of billions of parameters. One factor for each objective, found with constant
AdamW, multiplies upstream's, the winner's and our rates alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from benchmarks.text_rules.cells import Cell
from core.domain.choices import Method
from core.domain.tasks import TaskType
from core.models.facts import ModelFacts
from core.models.identify import facts_from_name
from core.profile.resolve import load_profile, resolve_profile
from core.profile.schema import ResolvedProfile

#: By objective.
RATE_FACTORS = {"sft": 8.0, "dpo": 40.0, "grpo": 40.0}
#: The tables' batches are for an hour of several hundred steps; so few seconds hold as many of a quarter of
#: the rows. Not upstream's, which are small, nor our 32 completions: the winner's are 160.
BATCH_DIVISOR = 4
#: In place of 128: a quarter of the models' width. Alpha is kept: with Adam, alpha times the rate is how fast
#: an adapter moves, at any rank.
RANK = 32
#: The RMS of an untouched base's matrices (median of attention's and the MLP's).
USUAL_RMS = 0.034
#: An hour of the clock: so many seconds of it stand for a real hour.
SECONDS_OF_AN_HOUR = 40.0
#: What a plan allows for reading and loading before the first step, on a CPU.
PLANNED_START_S = 45.0
#: GRPO is planned as LoRA at every size. A full fine-tune of it takes a fifth of the rate, as the winner's.
FULL_GRPO = 0.2
SIZES = (0.5e9, 1.5e9, 3e9, 4.5e9, 7e9, 10e9, 14e9)


def objective(task: TaskType) -> str:
    if task.has_pairs:
        return "dpo"
    return "grpo" if task.generates else "sft"


def rate_factor(cell: Cell) -> float:
    return RATE_FACTORS[objective(cell.task)]


def upstream_factor(cell: Cell) -> float:
    """Upstream trains adapters. All weights by preferences or rewards take a tenth of its rate."""
    full = cell.method is Method.FULL and not cell.task.is_supervised
    return rate_factor(cell) * (0.1 if full else 1.0)


def peer_ask(cell: Cell, seconds: float, number: int = 0) -> dict[str, Any]:
    """`number`: of the training, for its random numbers."""
    return {
        "seconds": seconds,
        "seed": cell.seed + 100 * number,
        "method": cell.method.value,
        "rank": RANK,
        "rate_factor": rate_factor(cell),
        "batch_divisor": BATCH_DIVISOR,
        "usual_rms": USUAL_RMS,
        "hours": seconds / SECONDS_OF_AN_HOUR,
    }


# — our profile


def _method(resolved: ResolvedProfile, model: ModelFacts) -> Method:
    targets = resolved.targets
    if targets.method is not None:
        return targets.method
    small = targets.full_below is not None and model.params_total < targets.full_below
    return Method.FULL if small else Method.LORA


def resolved_for(profile: Path, task: TaskType, method: Method) -> tuple[ResolvedProfile, bool]:
    """Resolve for the smallest model that the profile trains by this method, and return False if none is."""
    loaded = load_profile(str(profile))
    for size in SIZES:
        model = facts_from_name("org/some-llama", int(size))
        resolved = resolve_profile(loaded, task, model)
        if _method(resolved, model) is method:
            return resolved, True
    return resolve_profile(loaded, task, facts_from_name("org/some-llama", int(SIZES[0]))), False


def cell_profile(cell: Cell, profile: Path, changes: str = "", number: int = 0) -> dict[str, Any]:
    """The profile as it is for a model of the method's size, scaled; `changes` are laid over it. A rate
    of `x2` is twice the cell's. `number`: of the training, for its random numbers."""
    resolved, planned = resolved_for(profile, cell.task, cell.method)
    tiny = resolve_profile(load_profile(str(profile)), cell.task, facts_from_name("org/tiny-llama", 130_000))
    factor = rate_factor(cell)
    targets = _differing(resolved.targets, tiny.targets)
    limits = _differing(resolved.limits, tiny.limits)
    rate = resolved.targets.learning_rate * factor * (1.0 if planned else FULL_GRPO)
    targets |= {"method": cell.method.value, "learning_rate": float(f"{rate:.6g}"), "lora_r": RANK}
    if number:
        targets["seed"] = resolved.targets.seed + number
    batch = resolved.targets.effective_batch_size
    if batch is not None and not cell.task.generates:
        targets["effective_batch_size"] = batch // BATCH_DIVISOR
    if resolved.limits.max_alpha_lr is not None:
        limits["max_alpha_lr"] = resolved.limits.max_alpha_lr * factor
    written: dict[str, Any] = {
        "extends": str(profile),
        "sections": {"cell": {"targets": targets, "limits": limits}},
    }
    if changes:
        varied = yaml.safe_load(changes)
        named = varied.get("targets", {})
        if str(named.get("learning_rate", "")).startswith("x"):
            named["learning_rate"] = float(f"{rate * float(named['learning_rate'][1:]):.6g}")
        written["sections"]["variant"] = varied
    return written


def _differing(one: Any, other: Any) -> dict[str, Any]:
    mine, theirs = one.model_dump(mode="json"), other.model_dump(mode="json")
    return {name: value for name, value in mine.items() if value != theirs[name]}
