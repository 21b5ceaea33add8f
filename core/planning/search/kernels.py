"""Which kernels a run computes with, by what the GPU, the model and the engine can do.

Unset targets take the fastest that all three support. What a profile asks for and cannot have is conceded.
"""

from __future__ import annotations

from core.domain.choices import Attention, Engine
from core.domain.hardware import GpuKind
from core.domain.tasks import TaskType
from core.models.facts import ModelFacts
from core.models.kernels import LORA_KERNELS, LigerPart, liger_parts
from core.planning.budget import Concession, conceded
from core.profile.targets import Targets

#: Triton compiles for these GPUs and later ones.
TRITON_LEAST = (8, 0)


def attention(model: ModelFacts, targets: Targets, kind: GpuKind, given: list[Concession]) -> Attention:
    supported = model.attention
    best = Attention.FLASH_2 if kind.compute_capability >= (8, 0) else Attention.SDPA
    best = best if supported is Attention.FLASH_2 else supported
    asked = targets.attention
    if asked is None:
        return best
    if supported is not Attention.FLASH_2 and asked not in (supported, Attention.EAGER):
        given.append(
            conceded("attention", asked.value, best.value, f"{model.architecture} does not support it")
        )
        return best
    hopper_only = asked is Attention.FLASH_3 and kind.compute_capability < (9, 0)
    needs_ampere = asked in (Attention.FLASH_2, Attention.FLASH_3, Attention.FLEX)
    if hopper_only or (needs_ampere and kind.compute_capability < (8, 0)):
        given.append(conceded("attention", asked.value, best.value, f"{kind.name} cannot run it"))
        return best
    return asked


def fp8(targets: Targets, kind: GpuKind, given: list[Concession]) -> bool:
    if targets.fp8 and not kind.has_fp8:
        given.append(conceded("fp8", True, False, f"{kind.name} has no fp8 tensor cores"))
    return targets.fp8 and kind.has_fp8


def liger(
    task: TaskType,
    engine: Engine,
    model: ModelFacts,
    targets: Targets,
    kind: GpuKind,
    given: list[Concession],
) -> frozenset[LigerPart]:
    """The parts that Liger computes. Unset: none for GRPO, whose time goes into single tokens; what its
    launches cost there is not known."""
    parts, unset = liger_parts(model.architecture), targets.liger is None
    if targets.liger is False or engine is not Engine.AXOLOTL or (unset and task.generates):
        return frozenset()
    if parts and kind.compute_capability >= TRITON_LEAST:
        return parts
    if not unset:
        lacking = f"{kind.name} cannot run them" if parts else f"Liger has none for {model.architecture}"
        given.append(conceded("liger", True, False, lacking))
    return frozenset()


def lora_kernels(
    task: TaskType, model: ModelFacts, targets: Targets, kind: GpuKind, given: list[Concession]
) -> bool:
    """Axolotl's, for supervised training."""
    if targets.lora_kernels is False or not task.is_supervised:
        return False
    known = model.architecture in LORA_KERNELS
    if targets.lora_kernels and not known:
        reason = f"Axolotl has none for {model.architecture}"
        given.append(conceded("lora_kernels", True, False, reason))
    return known and (targets.lora_kernels is True or kind.compute_capability > (0, 0))
