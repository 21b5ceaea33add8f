"""Find the kernel that a crash names, and do without it.

What cannot even be loaded is left out in the training process (`trainer.axolotl.patches`). What fails
later, mostly in the first step, ends the process: the next attempt does without.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from core.domain.choices import Attention
from core.planning.conditions import Workarounds
from core.planning.plan import TrainingPlan


class KernelKind(StrEnum):
    FLASH = "flash attention"
    LIGER = "Liger"
    LORA = "LoRA kernels"
    STATE = "kernels of state spaces"
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
    KernelKind.STATE: re.compile(
        r"\b(?:mamba_ssm|causal_conv1d)|\bfla[./](?:ops|modules|layers)", re.IGNORECASE
    ),
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


def without_kernel(plan: TrainingPlan, detail: str) -> Workarounds | None:
    """Leave out the kernel that failed: it would fail again. None where the plan uses none that is named."""
    failure = kernel_failure(detail)
    if failure is None:
        return None
    precision, changes, change = plan.precision, dict[str, object](), ""
    if failure.kind is KernelKind.FLASH and precision.attention not in (Attention.SDPA, Attention.EAGER):
        following = Attention.FLASH_2 if precision.attention is Attention.FLASH_3 else Attention.SDPA
        changes, change = {"attention": following}, f"attention {precision.attention} → {following}"
    elif used := _used(plan, failure.kind):
        changes, change = {f"no_{name}": True for name in used}, f"{', '.join(used)} → off"
    if not changes:
        return None
    return plan.conditions.workarounds.adding(f"{change}: {failure.line.strip()[:200]}", **changes)


def _used(plan: TrainingPlan, kind: KernelKind) -> list[str]:
    """The switches that are still on, of those behind this kind of kernel."""
    used = [name for name in _SWITCHES[kind] if getattr(plan.precision, name)]
    mamba = plan.model.mixer is not None and kind is KernelKind.TRITON
    if (mamba or kind is KernelKind.STATE) and not plan.conditions.workarounds.no_state_kernels:
        used.append("state_kernels")
    return used


_SWITCHES: Mapping[KernelKind, tuple[str, ...]] = {
    KernelKind.FLASH: (),
    KernelKind.LIGER: ("liger",),
    KernelKind.LORA: ("lora_kernels",),
    KernelKind.STATE: (),
    KernelKind.TRITON: ("liger", "lora_kernels"),
}
