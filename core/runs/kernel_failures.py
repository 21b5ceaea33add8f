"""Find the kernel that a crash names, and the plan without it.

What cannot even be loaded is left out in the training process (`trainer.axolotl.patches`). What fails
later, mostly in the first step, ends the process: the next attempt does without.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import NamedTuple

from core.domain.choices import Attention
from core.planning.candidate import candidate_of
from core.planning.memory.peak import memory_of, peak_bytes
from core.planning.plan import BatchPlan, PrecisionPlan, TrainingPlan
from core.planning.search.ladder import with_micro
from core.planning.search.requirements import largest_divisor


class KernelKind(StrEnum):
    FLASH = "flash attention"
    LIGER = "Liger"
    LORA = "LoRA kernels"
    TRITON = "Triton"  # one of the two before


class KernelFailure(NamedTuple):
    kind: KernelKind
    #: What it said.
    line: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.line.strip()[:200]}"


_FLASH = r"(?:flash[ _-]?att|flash_(?:fwd|bwd))"
#: How a kernel of flash attention fails once it is used: made for other GPUs, for another torch or libc, not
#: there. What a model refuses while it is loaded is met there (`trainer.inputs.model_loading`).
_NO_KERNEL = re.compile(
    rf"{_FLASH}.{{0,60}} (?:only supports?|requires)\b|{_FLASH}.*undefined symbol|undefined symbol.*{_FLASH}"
    rf"|No module named '?flash_attn|no flash-attn build|GLIBC\S* not found.*{_FLASH}",
    re.IGNORECASE,
)
#: Any kernel's failure: flash attention's where it is named beside it.
_NO_IMAGE = re.compile("no kernel image is available", re.IGNORECASE)
#: Named in any line of a stack: the last one is nearest to the failure. A bad address in the GPU's memory is
#: found out later than it happened, so it may be anybody's.
_NAMED: Mapping[KernelKind, re.Pattern[str]] = {
    KernelKind.LIGER: re.compile("liger", re.IGNORECASE),
    KernelKind.LORA: re.compile(r"axolotl[./]kernels|lora[_ ]kernels", re.IGNORECASE),
    KernelKind.TRITON: re.compile(
        r"\btriton\b|illegal memory access|misaligned address|invalid device function", re.IGNORECASE
    ),
}


def kernel_failure(text: str) -> KernelFailure | None:
    """The kernel that a crash's message or stack names, and the line that does."""
    if line := _flash_line(text):
        return KernelFailure(KernelKind.FLASH, line)
    found: KernelFailure | None = None
    for line in text.splitlines():
        for kind, pattern in _NAMED.items():
            # Triton's own frames come after those of whoever called it.
            if pattern.search(line) and not (kind is KernelKind.TRITON and found):
                found = KernelFailure(kind, line)
                break
    return found


def _flash_line(text: str) -> str | None:
    named = re.search(_FLASH, text, re.IGNORECASE) is not None
    failures = (
        line for line in text.splitlines() if _NO_KERNEL.search(line) or (named and _NO_IMAGE.search(line))
    )
    return next(failures, None)


def without_kernel(plan: TrainingPlan, detail: str) -> tuple[TrainingPlan, str] | None:
    """The plan without the kernel that failed, and what changed; None where the plan uses none that is named.
    It would fail again."""
    failure = kernel_failure(detail)
    if failure is None:
        return None
    precision, change = _LEFT_OUT[failure.kind](plan.precision)
    if precision == plan.precision:
        return None
    changed = plan.model_copy(update={"precision": precision})
    if precision.liger != plan.precision.liger:
        changed = _in_smaller_passes(changed)
    return changed, f"{change}: {failure.line.strip()[:200]}"


def _without_flash(precision: PrecisionPlan) -> tuple[PrecisionPlan, str]:
    if precision.attention in (Attention.SDPA, Attention.EAGER):
        return precision, ""
    following = Attention.FLASH_2 if precision.attention is Attention.FLASH_3 else Attention.SDPA
    change = f"attention {precision.attention} → {following}"
    return precision.model_copy(update={"attention": following}), change


def _without(*names: str) -> Callable[[PrecisionPlan], tuple[PrecisionPlan, str]]:
    def left_out(precision: PrecisionPlan) -> tuple[PrecisionPlan, str]:
        used = [name for name in names if getattr(precision, name)]
        return precision.model_copy(update=dict.fromkeys(used, False)), f"{', '.join(used)} → off"

    return left_out


_LEFT_OUT: Mapping[KernelKind, Callable[[PrecisionPlan], tuple[PrecisionPlan, str]]] = {
    KernelKind.FLASH: _without_flash,
    KernelKind.LIGER: _without("liger"),
    KernelKind.LORA: _without("lora_kernels"),
    KernelKind.TRITON: _without("liger", "lora_kernels"),
}


def _in_smaller_passes(plan: TrainingPlan) -> TrainingPlan:
    """Without Liger a pass needs more memory: as many sequences fewer as that takes, in more passes."""
    candidate, budget = candidate_of(plan), plan.memory.budget_bytes
    while candidate.micro > 1 and peak_bytes(candidate) > budget:
        candidate = with_micro(candidate, largest_divisor(candidate.per_gpu, candidate.micro // 2))
    batch: BatchPlan = plan.batch.model_copy(
        update={"micro": candidate.micro, "accumulation": candidate.accumulation}
    )
    return plan.model_copy(update={"batch": batch, "memory": memory_of(candidate, budget)})
