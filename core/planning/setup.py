"""One candidate for a run: every number that memory and time depend on, and nothing else.

The search varies these by the dozen before a plan is written down, so this is a plain dataclass; the plan
itself can be turned back into one, for the recalibration after the first steps and for the OOM ladder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, TypedDict, Unpack

from core.choices import Attention, CompileMode, Engine, Method, Optimizer, Parallelism
from core.hardware import GpuKind, GpuSet
from core.models import ImageFacts
from core.planning.shape import Shape, shape_of
from core.tasks import ImageModelType, TaskType

if TYPE_CHECKING:
    from core.plan import TrainingPlan
    from core.plan_parts import TaskSpec
    from core.planning.memory import Held, Trained


class Loss(StrEnum):
    """How much of the logits is in memory at a time."""

    FULL = "full"
    CHUNKED = "chunked"  # Axolotl's: bf16 logits in whole, fp32 by chunks
    FUSED = "fused"  # Liger's and our own: never more than a chunk


@dataclass(frozen=True, slots=True)
class Picture:
    """What only image training adds."""

    facts: ImageFacts
    resolution: int
    vae_batch: int
    #: The text encoders' outputs are computed once and the encoders put away.
    text_put_away: bool
    text_adapter: bool
    quantized: bool


class Kept:
    """What `memory.py` keeps for all setups that differ in their batches only."""

    __slots__ = ("held", "trained")

    def __init__(self) -> None:
        self.held: Held | None = None
        self.trained: Trained | None = None


@dataclass(frozen=True)
class Setup:
    """Frozen: a variation is `vary(setup, micro=4)`."""

    task: TaskType
    engine: Engine
    method: Method
    shape: Shape
    kind: GpuKind
    world: int
    parallelism: Parallelism
    micro: int
    accumulation: int
    eval_micro: int
    #: Tokens of one sequence at most; GRPO: prompt and completion.
    length: int
    #: GRPO: tokens generated at most.
    completion: int
    rank: int
    adapter_fp32: bool
    dropout: bool
    optimizer: Optimizer
    fp32_master: bool
    #: Bytes of a number that is computed with: 2, or 4 without bf16 and fp16.
    width: int
    checkpointing: bool
    offload: bool
    attention: Attention
    loss: Loss
    reshard: bool
    compile_mode: CompileMode | None
    fp8: bool
    #: DPO: the reference's log-probs are there before the training begins.
    reference_ready: bool
    #: GRPO: the share of the card that vLLM takes, 0 for none; completions per prompt; a KL term.
    vllm_share: float
    generations: int
    kl: bool
    #: GRPO, sharded, without vLLM: layers whose weights are gathered once for a generation, not for every
    #: token.
    whole: int
    #: An averaged copy of what is trained.
    ema: bool
    picture: Picture | None
    #: What follows from the rest, for the hundred times that a search asks.
    full: bool = field(init=False, compare=False)
    sharded: bool = field(init=False, compare=False)
    shards: int = field(init=False, compare=False)
    adapter_params: int = field(init=False, compare=False)
    trained_params: int = field(init=False, compare=False)
    #: Bytes of one trained parameter, of its gradient, and of each of Adam's two states.
    trained_width: int = field(init=False, compare=False)
    #: Terms of memory that no micro batch changes, once `memory.py` has made them.
    kept: Kept = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        full = self.method is Method.FULL
        sharded = self.parallelism is Parallelism.FSDP and self.world > 1
        adapter = 0 if full else self.rank * self._adapter_params_per_rank()
        width = self.width if full or not self.adapter_fp32 else 4
        self.__dict__.update(
            full=full,
            sharded=sharded,
            shards=self.world if sharded else 1,
            adapter_params=adapter,
            trained_params=self.shape.params if full else adapter,
            trained_width=width,
            kept=Kept(),
        )

    def _adapter_params_per_rank(self) -> int:
        extra = 0
        if self.picture is not None and self.picture.text_adapter:
            extra = self.picture.facts.text_adapter_params_per_rank
        return self.shape.adapted.params_per_rank + extra

    @property
    def averages(self) -> bool:
        """Whether the engine can keep the moving average: not of weights that FSDP2 takes apart under
        Axolotl's callbacks, and sd-scripts has none."""
        apart = self.engine is Engine.AXOLOTL and self.sharded
        return self.ema and not apart and self.engine is not Engine.KOHYA

    @property
    def gathers_to_generate(self) -> bool:
        return self.sharded and self.task is TaskType.GRPO and not self.vllm_share

    @property
    def gpus(self) -> GpuSet:
        return GpuSet(kind=self.kind, count=self.world)

    @property
    def sequences(self) -> int:
        """Sequences in one forward pass: DPO's are pairs."""
        return self.micro * (2 if self.task is TaskType.DPO else 1)

    @property
    def tokens(self) -> int:
        """In one forward pass, on one GPU."""
        return self.sequences * self.length


class Changes(TypedDict, total=False):
    """What the search varies."""

    method: Method
    world: int
    parallelism: Parallelism
    micro: int
    accumulation: int
    eval_micro: int
    length: int
    completion: int
    rank: int
    optimizer: Optimizer
    fp32_master: bool
    checkpointing: bool
    reference_ready: bool
    whole: int
    picture: Picture | None


#: Changes that leave alone what `__post_init__` makes.
_PASSING = frozenset(
    ("micro", "accumulation", "eval_micro", "checkpointing", "length", "completion", "whole")
)


def vary(setup: Setup, **changes: Unpack[Changes]) -> Setup:
    """The same with some numbers changed. `dataclasses.replace` was a sixth of a plan's time: it passes every
    field through the constructor."""
    varied = object.__new__(Setup)
    varied.__dict__.update(setup.__dict__, **changes)
    if not _PASSING.issuperset(changes):
        varied.__post_init__()
    return varied


def tokens_of_picture(facts: ImageFacts, resolution: int) -> int:
    """Tokens grow with the area; the prompt's (512 of Flux's 4608) are left in, being few."""
    return max(round(facts.tokens_at_1024 * (resolution / 1024) ** 2), 1)


def loss_kind(task: TaskSpec, engine: Engine, fused: bool, liger: bool) -> Loss:
    """TRL's DPO and GRPO compute log-probs from full logits whatever the SFT loss is set to, and the KL to
    the base model needs them too."""
    if task.task_type in (TaskType.DPO, TaskType.GRPO) or task.kl_coefficient or not (fused or liger):
        return Loss.FULL
    return Loss.FUSED if liger or engine is Engine.NATIVE else Loss.CHUNKED


def setup_of(plan: TrainingPlan) -> Setup:
    """The numbers of a plan again."""
    adapter, precision, grpo, image = plan.adapter, plan.precision, plan.grpo, plan.image
    modules = adapter.target_modules if adapter else ()
    return Setup(
        task=plan.task.task_type,
        engine=plan.engine,
        method=plan.method,
        shape=shape_of(plan.model, modules),
        kind=plan.gpus.kind,
        world=plan.batch.world_size,
        parallelism=plan.parallelism,
        micro=plan.batch.micro,
        accumulation=plan.batch.accumulation,
        eval_micro=plan.batch.eval_micro,
        length=plan.sequence.length,
        completion=plan.sequence.completion_limit or 0,
        rank=adapter.rank if adapter else 0,
        adapter_fp32=adapter.fp32 if adapter else False,
        dropout=bool(adapter and adapter.dropout),
        optimizer=plan.optimizer.name,
        fp32_master=plan.optimizer.fp32_master,
        width=2 if precision.bf16 or precision.fp16 else 4,
        checkpointing=precision.gradient_checkpointing,
        offload=precision.activation_offload,
        attention=precision.attention,
        loss=loss_kind(plan.task, plan.engine, precision.fused_loss, precision.liger),
        reshard=plan.fsdp.reshard_after_forward if plan.fsdp else True,
        compile_mode=precision.compile_mode,
        fp8=precision.fp8,
        reference_ready=bool(plan.dpo and plan.dpo.precompute_reference),
        vllm_share=grpo.vllm_memory_share if grpo and grpo.vllm else 0.0,
        generations=grpo.generations if grpo else 1,
        kl=bool(grpo and grpo.beta > 0) or plan.task.kl_coefficient is not None,
        whole=grpo.whole_layers if grpo else 0,
        ema=plan.ema is not None,
        picture=_picture(plan) if image and plan.model.image else None,
    )


def _picture(plan: TrainingPlan) -> Picture | None:
    facts, image = plan.model.image, plan.image
    if facts is None or image is None:
        return None
    return Picture(
        facts=facts,
        resolution=image.resolution,
        vae_batch=image.vae_batch,
        text_put_away=image.cache_text,
        text_adapter=bool(plan.adapter and plan.adapter.text_encoder),
        quantized=image.quantize_base,
    )


def image_type(setup: Setup) -> ImageModelType | None:
    return setup.picture.facts.image_type if setup.picture else None
