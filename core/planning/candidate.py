"""One candidate for a run: every number that memory and time depend on, and nothing else.

The search varies these by the dozen before a plan is written down, so this is a plain dataclass. The plan
contains the one that was chosen. The model's shape (sums over its layers) is computed once per plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, NamedTuple, TypedDict, Unpack

from pydantic import PlainSerializer

from core.domain.choices import Attention, CompileMode, Engine, Method, Optimizer, Parallelism
from core.domain.evaluation import GRPO_KL_LENGTH
from core.domain.hardware import GpuKind
from core.domain.tasks import ImageModelType, TaskType
from core.models.facts import ImageFacts, ModelFacts
from core.models.kernels import LigerPart
from core.models.shapes import (
    RankFactors,
    expert_shapes,
    linear_shapes,
    rank_factor,
)

#: NCCL_BUFFSIZE's default, bytes.
NCCL_BUFFER = 4 * 2**20


class AdaptedShape(NamedTuple):
    """The matrices with an adapter: sums over one average layer, and over the model."""

    #: Input widths of the adapted matrices of a layer.
    inputs: float
    #: Their ranks together, as a multiple of the rank: how many there are, unless some have another rank.
    ranks: float
    #: d_in + d_out of all adapted matrices of the model: adapter parameters per unit of rank.
    params_per_rank: int


class MixerShape(NamedTuple):
    """A convolution or state space, in an average layer, beside its linear layers."""

    #: Bytes that a token saves for the backward pass, and operations of its forward pass.
    saved: float = 0.0
    flops: float = 0.0
    #: Bytes of a sequence's state while it is generated.
    state: float = 0.0


NO_MIXER = MixerShape()


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Widths in elements per token, per layer; parameters of the whole model."""

    layers: int
    hidden: int
    vocab: int
    heads: int
    #: Width of all query heads, and of the keys (the values' is the same).
    queries: int
    keys: int
    #: Width of the MLP that a token passes through; for experts, of those it visits.
    mlp: float
    gated: bool
    params: int
    active: int
    #: Embedding and head: they stay gathered under FSDP, and have a gradient of their own.
    embedding_params: int
    #: One of the two: vocabulary times width.
    vocab_params: int
    #: Routed experts, of a layer in single tensors.
    expert_params: int
    adapted: AdaptedShape
    mixer: MixerShape = NO_MIXER

    @property
    def layer_params(self) -> float:
        return max(self.params - self.embedding_params, 0) / self.layers


def shape_of(
    model: ModelFacts,
    modules: tuple[str, ...] = (),
    factors: RankFactors = (),
) -> ModelShape:
    """Sum up the model's layers. `modules` have an adapter; empty means every linear layer. `factors`: on
    the rank of some of them."""
    rotary = 64 if model.kv_lora_rank else 0  # latent attention: rotary dimensions beside head_dim
    attending = model.mixer.attention_layers / model.layers if model.mixer else 1.0
    return ModelShape(
        layers=model.layers,
        hidden=model.hidden,
        vocab=model.vocab,
        heads=round(model.heads * attending),
        queries=round(model.heads * (model.head_dim + rotary) * attending),
        keys=round(model.kv_heads * (model.head_dim + rotary) * attending),
        mlp=_mlp_width(model),
        gated=model.gated_mlp and not model.is_image,
        params=model.params_total,
        active=min(model.params_active, model.params_total),
        embedding_params=min(model.embedding_params, model.params_total),
        vocab_params=0 if model.is_image else model.vocab * model.hidden,
        expert_params=sum(shape.params for shape in expert_shapes(model)),
        adapted=_adapted(model, modules, factors),
        mixer=_mixer_shape(model),
    )


#: Tensors of a convolution's width that are saved in bf16: both gates and the input, their product, the
#: output, and what goes into the last layer.
CONVOLUTION_SAVES = 6


def _mixer_shape(model: ModelFacts) -> MixerShape:
    """Mamba-2 as the scan in matrix products computes it (`trainer/inputs/state_space.py`), in fp32: within a
    chunk every head weighs each pair of tokens, between chunks there are the states. Its fused kernel, where
    it is installed, saves less."""
    mixer = model.mixer
    if mixer is None:
        return NO_MIXER
    share = mixer.layers / model.layers
    if not mixer.heads:
        saved = 2.0 * CONVOLUTION_SAVES * mixer.inner
        return MixerShape(share * saved, share * 10.0 * mixer.inner, share * 6.0 * mixer.inner)
    pairs = mixer.chunk * mixer.heads
    states = mixer.inner * mixer.state
    # Projections and convolution in bf16; input, output and B, C in fp32; decays, weights, and their product.
    saved = 2.0 * 3 * mixer.projected + 4.0 * 7 * mixer.inner + 4.0 * 3 * pairs
    flops = 2.0 * mixer.chunk * (mixer.groups * mixer.state + mixer.inner) + 4.0 * states
    return MixerShape(share * saved, share * flops, share * 4.0 * states)


def _mlp_width(model: ModelFacts) -> float:
    if model.moe is None:
        return float(model.intermediate)
    moe = model.moe
    dense = min(moe.dense_layers, model.layers)
    visited = moe.expert_intermediate * (moe.experts_per_token + moe.shared_experts)
    return (dense * model.intermediate + (model.layers - dense) * visited) / model.layers


def _adapted(model: ModelFacts, modules: tuple[str, ...], factors: RankFactors) -> AdaptedShape:
    if model.image is not None:
        # A transformer block of a diffusion model: q, k, v, o and two MLP matrices, in and out.
        return AdaptedShape(5.0 * model.hidden + model.intermediate, 6.0, model.image.adapter_params_per_rank)
    inputs, ranks, per_rank = 0, 0.0, 0.0
    for linear in linear_shapes(model):
        if not linear.routed and is_adapted(model, linear.name, modules):
            factor = rank_factor(model, linear, factors) if factors else 1.0
            inputs += linear.d_in * linear.copies
            ranks += factor * linear.copies
            per_rank += factor * (linear.d_in + linear.d_out) * linear.copies
    return AdaptedShape(inputs / model.layers, ranks / model.layers, round(per_rank))


def is_adapted(model: ModelFacts, name: str, modules: Sequence[str] | None) -> bool:
    """Return whether an adapter on `modules`, all if there are none, reaches the layers of this name."""
    return name not in model.no_adapter and (not modules or name in modules)


class LossKind(StrEnum):
    """The part of the logits that is in memory at a time."""

    FULL = "full"
    CHUNKED = "chunked"  # Axolotl's: all logits in bf16, fp32 by chunks
    FUSED = "fused"  # Liger's and ours: never more than a chunk


@dataclass(frozen=True, slots=True)
class ImageCandidate:
    """Numbers that only image training has."""

    facts: ImageFacts
    resolutions: tuple[int, ...]
    vae_batch: int
    #: The text encoders' outputs are computed once and the encoders offloaded.
    text_offloaded: bool
    text_adapter: bool
    quantized: bool
    #: The picture trainer's second copy of an fp8 base, as the evaluator loads it.
    twin: bool = False

    @property
    def resolution(self) -> int:
        """The largest, which memory must hold."""
        return max(self.resolutions)

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of a picture in one pass, over all resolutions: each is trained on as often."""
        return sum(image_tokens(self.facts, side) for side in self.resolutions) / len(self.resolutions)


#: One term of the memory, in bytes on one GPU.
MemoryPart = Callable[["RunCandidate"], float]
#: Bytes of each part, by the function that computes them.
BytesByPart = dict[MemoryPart, float]


class HeldMemory(NamedTuple):
    """Memory allocated from the first step to the last; `total` includes fragmentation."""

    parts: BytesByPart
    total: float


class TrainedMemory(NamedTuple):
    """Memory that comes and goes with the trained parameters, whatever the batch."""

    gathered: float
    gradients: float
    buckets: float
    #: Autocast's copies.
    cast: float
    head: float
    #: Of the optimizer's step.
    work: float


@dataclass(slots=True)
class MemoryCache:
    """Memory that `memory/peak.py` computes once for all candidates that differ in their batches only."""

    held: HeldMemory | None = None
    trained: TrainedMemory | None = None


@dataclass
class RunCandidate:
    """One way to run a task. Nothing changes one: a variation is `vary(candidate, micro=4)`.

    Not frozen, as a search makes a hundred of them, and a frozen one takes three times as long to make."""

    task: TaskType
    engine: Engine
    method: Method
    shape: ModelShape
    kind: GpuKind
    world: int
    #: GPUs of one node, and bytes/s from a node to the others.
    node_gpus: int
    network: float
    parallelism: Parallelism
    #: NCCL's buffer for one peer of one channel, bytes.
    nccl_buffer: int
    #: FSDP on several nodes: shards within a node, copies between them.
    hybrid: bool
    micro: int
    accumulation: int
    eval_micro: int
    #: Tokens of one sequence at most; GRPO: prompt and completion.
    length: int
    #: GRPO: tokens generated at most.
    completion: int
    rank: int
    dropout: bool
    optimizer: Optimizer
    fp32_master: bool
    #: Bytes of a number that is computed with: 2, or 4 without bf16 and fp16.
    width: int
    checkpointing: bool
    attention: Attention
    loss: LossKind
    #: What Liger computes: its norms and activations save less for the backward pass.
    liger: Annotated[frozenset[LigerPart], PlainSerializer(sorted)]
    reshard: bool
    compile_mode: CompileMode | None
    fp8: bool
    #: DPO: the reference's log-probs are there before the training begins.
    reference_ready: bool
    #: GRPO: the share of the GPU that vLLM takes, 0 for none, and whether it gives it back while the training
    #: needs it; completions per prompt; a KL term on what is learned, and one on the prompts.
    vllm_share: float
    vllm_sleep: bool
    generations: int
    kl: bool
    prompt_kl: bool
    #: GRPO without vLLM: completions that a GPU generates at once; 0: all of a step.
    together: int
    #: GRPO, sharded, without vLLM: layers whose weights are gathered once for a generation, not for every
    #: token.
    gathered_layers: int
    #: An averaged copy of what is trained.
    ema: bool
    image: ImageCandidate | None

    def __post_init__(self) -> None:
        #: Memory that no micro batch changes, once `memory/peak.py` has computed it.
        self.memory_cache = MemoryCache()

    @property
    def full(self) -> bool:
        return self.method is Method.FULL

    @property
    def sharded(self) -> bool:
        return self.parallelism is Parallelism.FSDP and self.world > 1

    @property
    def nodes(self) -> int:
        return -(-self.world // self.node_gpus)

    @property
    def shards(self) -> int:
        """GPUs that the weights are split over; 1: each has all of them."""
        if not self.sharded:
            return 1
        return min(self.world, self.node_gpus) if self.hybrid else self.world

    @property
    def adapter_params(self) -> int:
        if self.full:
            return 0
        per_rank = self.shape.adapted.params_per_rank
        if self.image is not None and self.image.text_adapter:
            per_rank += self.image.facts.text_adapter_params_per_rank
        return self.rank * per_rank

    @property
    def trained_params(self) -> int:
        return self.shape.params if self.full else self.adapter_params

    @property
    def trained_width(self) -> int:
        """Bytes of one trained parameter, of its gradient, and of each of Adam's two states."""
        return self.width if self.full else 4

    @property
    def on_node(self) -> int:
        """GPUs on each of its nodes."""
        return self.world // self.nodes

    @property
    def keeps_average(self) -> bool:
        """Return whether the engine can keep the moving average: sd-scripts has none."""
        return self.ema and self.engine is not Engine.KOHYA

    @property
    def gathers_to_generate(self) -> bool:
        return self.sharded and self.task.generates and not self.vllm_share

    @property
    def at_once(self) -> int:
        """Completions that a GPU generates at once."""
        return min(self.together or self.per_gpu, self.per_gpu)

    @property
    def needs_base(self) -> bool:
        """Return whether steps compare with the untrained model."""
        return (self.task.has_pairs and not self.reference_ready) or self.kl or self.prompt_kl

    @property
    def prompt_kl_tokens(self) -> int:
        """Tokens of a prompt that the KL on prompts reads; 0 without that term."""
        return min(max(self.length - self.completion, 0), GRPO_KL_LENGTH) if self.prompt_kl else 0

    @property
    def saved_tokens(self) -> int:
        """Tokens of a pass whose activations wait for the backward one: with the KL on prompts, which may all
        be read in the same pass, theirs twice."""
        return self.tokens + self.micro * self.prompt_kl_tokens

    @property
    def samples_itself(self) -> bool:
        """Return whether our sampling generates, as far as the plan can know: the engine's own loop does
        where a GPU has only a part of the weights."""
        return not self.sharded or self.gathered_layers >= self.shape.layers

    @property
    def per_gpu(self) -> int:
        """Sequences of one GPU in one optimizer step."""
        return self.micro * self.accumulation

    @property
    def effective(self) -> int:
        """Sequences of one optimizer step: the effective batch."""
        return self.micro * self.accumulation * self.world

    @property
    def ordered_passes(self) -> int:
        """Passes that take a step's rows by length; 1: as they come. Axolotl orders pairs only."""
        return self.accumulation if self.engine is Engine.NATIVE or self.task.has_pairs else 1

    @property
    def tokens(self) -> int:
        """Tokens of one forward pass on one GPU; for DPO of both sides of a pair."""
        return self.micro * (2 if self.task.has_pairs else 1) * self.length


class CandidateChanges(TypedDict, total=False):
    """Numbers that the search varies."""

    method: Method
    world: int
    parallelism: Parallelism
    hybrid: bool
    micro: int
    accumulation: int
    eval_micro: int
    length: int
    completion: int
    rank: int
    optimizer: Optimizer
    fp32_master: bool
    checkpointing: bool
    compile_mode: CompileMode | None
    reference_ready: bool
    gathered_layers: int
    vllm_share: float
    together: int
    ema: bool
    image: ImageCandidate | None


#: Changes after which the memory that is held all the time is as before.
_BATCH_CHANGES = frozenset(
    (
        "micro",
        "accumulation",
        "eval_micro",
        "checkpointing",
        "length",
        "completion",
        "gathered_layers",
        "together",
    )
)


def vary(candidate: RunCandidate, **changes: Unpack[CandidateChanges]) -> RunCandidate:
    """Copy with some numbers changed, faster than `dataclasses.replace`. Memory computed already is kept
    unless they change it."""
    varied = object.__new__(RunCandidate)
    varied.__dict__.update(candidate.__dict__, **changes)
    if not _BATCH_CHANGES.issuperset(changes):
        varied.memory_cache = MemoryCache()
    return varied


def nccl_buffer(env: Mapping[str, str]) -> int:
    """Return NCCL_BUFFSIZE; the default if that is smaller or not a number."""
    asked = env.get("NCCL_BUFFSIZE", "")
    return max(int(asked), NCCL_BUFFER) if asked.isdecimal() else NCCL_BUFFER


def image_tokens(facts: ImageFacts, resolution: int) -> int:
    """Tokens grow with the area; the prompt's (512 of Flux's 4608) are few enough to leave in."""
    return max(round(facts.tokens_at_1024 * (resolution / 1024) ** 2), 1)


def image_type(candidate: RunCandidate) -> ImageModelType | None:
    return candidate.image.facts.image_type if candidate.image else None
