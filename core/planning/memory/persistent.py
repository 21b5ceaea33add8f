"""GPU memory that stays through the whole training: weights, gradients, optimizer states, fixed costs.

Every term is one function from a candidate `s` to bytes on one GPU; `memory_part` gives it a name and a
phrase that says how the number came about.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from core.domain.choices import Attention, CompileMode, Engine, Method, Optimizer
from core.domain.hardware import Device
from core.domain.units import show_bytes, show_params
from core.planning.candidate import NCCL_BUFFER, MemoryPart, RunCandidate
from core.planning.measured import measured_offset


class DescribedBytes(NamedTuple):
    name: str
    bytes: float
    why: str


PartReason = Callable[[RunCandidate], str]
#: The name of a term, and how it came about.
PART_TEXTS: dict[MemoryPart, tuple[str, str | PartReason]] = {}


def memory_part(name: str, why: str | PartReason = "") -> Callable[[MemoryPart], MemoryPart]:
    """Name a term. The text is apart from the number: a search computes the numbers a hundred times before
    one breakdown is shown."""

    def register(part: MemoryPart) -> MemoryPart:
        PART_TEXTS[part] = name, why
        return part

    return register


def described_bytes(part: MemoryPart, size: float, s: RunCandidate) -> DescribedBytes:
    name, why = PART_TEXTS[part]
    return DescribedBytes(name, size, why if isinstance(why, str) else why(s))


#: 4-bit weights with their doubly quantised scales (NF4, blocks of 64).
NF4_BYTES = 0.516
#: Bytes of optimizer state per trained parameter: (when it is fp32, when it is bf16).
STATE_BYTES: dict[Optimizer, tuple[float, float]] = {
    Optimizer.ADAMW_TORCH: (8, 4),
    Optimizer.ADAMW_TORCH_FUSED: (8, 4),
    Optimizer.ADAMW_BNB_8BIT: (2.1, 2.1),
    Optimizer.ADAMW_TORCH_8BIT: (2.1, 2.1),
    # Paged states may move to host memory, but only when the GPU is already full: counted as if they stayed.
    Optimizer.PAGED_ADAMW_8BIT: (2.1, 2.1),
    Optimizer.PAGED_ADAMW_32BIT: (8, 8),
    Optimizer.ADAFACTOR: (0.5, 0.5),
    Optimizer.LION_8BIT: (1.1, 1.1),
    Optimizer.MUON: (4, 2),
    Optimizer.PRODIGY: (16, 8),
}
#: Optimizers that need a whole matrix and its gradient; others can update any part of it.
WHOLE_MATRICES = frozenset((Optimizer.ADAFACTOR, Optimizer.MUON))
#: Numbers that the native trainer updates at a time if weights are bf16: only these are in fp32.
UPDATE_BLOCK = 1 << 25
#: The CUDA context, cuBLAS's workspaces and the kernels themselves.
CONTEXT_BYTES = 0.85e9
#: NCCL's buffers of its default size; sharded training has several communicators.
NCCL_BYTES, NCCL_SHARDED_BYTES = 1.0e9, 1.5e9
#: Buffers of a larger NCCL_BUFFSIZE, by NCCL's sources (`p2pRecvSetup` in transport/p2p.cc): one of that size
#: for each peer of each channel. Upper bounds: 32 channels inside a node, and five peers (one in the ring,
#: three children and a parent in the tree); two communicators with FSDP. Not yet measured on a GPU.
NCCL_CHANNELS, NCCL_PEERS, NCCL_SHARDED_COMMUNICATORS = 32, 5, 2
#: Reserved by the allocator but not in use: with expandable segments a few percent of what comes and goes.
FRAGMENTATION = 0.05


def _per_shard(s: RunCandidate) -> str:
    return f" ÷ {s.shards} GPUs" if s.shards > 1 else ""


def _weights_reason(s: RunCandidate) -> str:
    if s.image is not None:
        return f"{show_params(s.image.facts.backbone_params)} at {_image_model_width(s):g} B"
    options = ", layers in 4 bits" if s.method is Method.QLORA else f" at {s.width} B"
    return f"{show_params(s.shape.params)}{options}{_per_shard(s)}"


def _image_model_width(s: RunCandidate) -> float:
    assert s.image is not None
    return 1.0 if s.image.quantized else float(s.width)


@memory_part("weights", _weights_reason)
def weights(s: RunCandidate) -> float:
    """The base model, complete on every GPU or in shards."""
    if s.image is not None:
        return s.image.facts.backbone_params * _image_model_width(s)
    if s.method is Method.QLORA:
        unquantised = s.shape.embedding_params
        return ((s.shape.params - unquantised) * NF4_BYTES + unquantised * s.width) / s.shards
    return s.shape.params * s.width / s.shards


@memory_part("frozen parts", lambda s: f"text encoders, {show_params(_encoders(s))}")
def frozen_parts(s: RunCandidate) -> float:
    """Image models: text encoders that every step needs. The VAE is offloaded once the latents are cached."""
    if s.image is None or s.image.text_offloaded:
        return 0.0
    return _encoders(s) * _image_model_width(s)


@memory_part("twin", "the base once more, in fp8 as the evaluator loads it")
def twin(s: RunCandidate) -> float:
    return float(s.image.facts.backbone_params) if s.image is not None and s.image.twin else 0.0


def _encoders(s: RunCandidate) -> int:
    return s.image.facts.text_encoder_params if s.image else 0


@memory_part(
    "fp32 embeddings",
    lambda s: f"{s.attention.value} without FSDP: {show_params(s.shape.embedding_params)} in fp32",
)
def fp32_tables(s: RunCandidate) -> float:
    """Axolotl keeps embeddings, head and norms of a full fine-tune in fp32 unless the attention kernel or
    FSDP asks for bf16: twice the bytes of weight, gradient and both states for these parameters."""
    if not _has_fp32_tables(s):
        return 0.0
    fp32, bf16 = STATE_BYTES[s.optimizer]
    return s.shape.embedding_params * (2 + fp32 - bf16)


def _has_fp32_tables(s: RunCandidate) -> bool:
    no_flash = s.attention in (Attention.SDPA, Attention.EAGER)
    return s.full and not s.sharded and no_flash and s.engine is Engine.AXOLOTL and s.width == 2


@memory_part(
    "adapter",
    lambda s: f"rank {s.rank}: {show_params(s.adapter_params)} at {s.trained_width} B{_per_shard(s)}",
)
def adapter(s: RunCandidate) -> float:
    return s.adapter_params * s.trained_width / s.shards


@memory_part("reference", "the untrained model beside the trained one")
def reference(s: RunCandidate) -> float:
    """A frozen copy, where there is no adapter to disable to get the base model back. TRL shards that of
    preferences and rewards as the model, the native trainer each; for Axolotl's KL to it every GPU has it
    whole."""
    if not s.full or not s.needs_base:
        return 0.0
    return s.shape.params * 2 / (s.shards if s.task.is_rl or s.engine is Engine.NATIVE else 1)


@memory_part(
    "optimizer",
    lambda s: f"{s.optimizer.value}: {_per_param(s):g} B × {show_params(s.trained_params)}{_per_shard(s)}",
)
def optimizer_states(s: RunCandidate) -> float:
    size = s.trained_params * _per_param(s) / s.shards
    # Muon is for the layers' matrices: the embeddings have AdamW's two states, which is one more.
    tables = s.shape.embedding_params if s.full and s.optimizer is Optimizer.MUON else 0
    return size + tables * _state_bytes(s) / s.shards


def _per_param(s: RunCandidate) -> float:
    return _state_bytes(s) + (4 if s.full and s.fp32_master else 0)


def _state_bytes(s: RunCandidate) -> float:
    fp32, bf16 = STATE_BYTES[s.optimizer]
    return fp32 if s.trained_width == 4 or (s.full and s.fp32_master) else bf16


@memory_part("average", lambda s: f"moving average of {show_params(s.trained_params)}{_per_shard(s)}")
def average(s: RunCandidate) -> float:
    """The moving average lies beside the weights, in their own format."""
    return s.trained_params * s.trained_width / s.shards


@memory_part("gradients", lambda s: f"{s.trained_width} B × {show_params(s.trained_params)}{_per_shard(s)}")
def gradients(s: RunCandidate) -> float:
    size = s.trained_params * s.trained_width / s.shards
    return size + s.shape.embedding_params * 2 if _has_fp32_tables(s) else size


@memory_part("ddp buckets", "a second copy of the gradients, to be sent")
def ddp_buckets(s: RunCandidate) -> float:
    """DDP copies gradients into buckets to send them; accelerate leaves `gradient_as_bucket_view` off."""
    return 0.0 if s.world == 1 or s.sharded or s.image is not None else gradients(s)


def _temporaries_reason(s: RunCandidate) -> str:
    if s.optimizer is Optimizer.ADAMW_TORCH and s.engine is not Engine.NATIVE:
        return "one temporary copy of all trained parameters"
    copies = "three fp32 copies of the largest matrix"
    if not _in_blocks(s):
        return copies
    block = f"{_block_bytes(s)} B × {show_params(round(_block_numbers(s)))} in fp32 at a time"
    return f"{block}, {copies}" if s.optimizer in WHOLE_MATRICES else block


@memory_part("optimizer work", _temporaries_reason)
def optimizer_temporaries(s: RunCandidate) -> float:
    """`adamw_torch` works on all parameters at once and makes one more copy; fused kernels, which the native
    trainer has for it too, make none. That updates bf16 weights in fp32, block by block."""
    if s.optimizer is Optimizer.ADAMW_TORCH and s.engine is not Engine.NATIVE:
        return s.trained_params * s.trained_width / s.shards
    block = _block_bytes(s) * _block_numbers(s) if _in_blocks(s) else 0.0
    if s.optimizer in (*WHOLE_MATRICES, Optimizer.PRODIGY):
        return block + 3 * 4 * _largest_matrix(s)
    return block


def _in_blocks(s: RunCandidate) -> bool:
    return s.engine is Engine.NATIVE and s.trained_width == 2


def _block_numbers(s: RunCandidate) -> float:
    least = _largest_matrix(s) if s.optimizer in WHOLE_MATRICES else 0.0
    return max(min(UPDATE_BLOCK, s.trained_params / s.shards), least)


def _block_bytes(s: RunCandidate) -> int:
    """A gradient beside a master; without one weight, gradient, two moments, and what rounding needs."""
    return 4 if s.full and s.fp32_master else 24


def _largest_matrix(s: RunCandidate) -> float:
    if s.full:
        return max(s.shape.vocab_params, s.shape.hidden * s.shape.mlp)
    return s.rank * max(s.shape.mlp, s.shape.hidden)


@memory_part("gathered", lambda s: f"embeddings and {_unsharded(s)} layers unsharded")
def gathered(s: RunCandidate) -> float:
    """FSDP: embedding and head stay gathered from the first layer to the last; two layers at a time do."""
    return _unsharded_bytes(s, _unsharded(s)) if s.sharded else 0.0


def _unsharded(s: RunCandidate) -> int:
    return 2 if s.reshard else s.shape.layers


def _unsharded_bytes(s: RunCandidate, layers: int) -> float:
    width = NF4_BYTES if s.method is Method.QLORA else 2
    base = s.shape.embedding_params * 2 + layers * s.shape.layer_params * width
    return base + layers / s.shape.layers * s.adapter_params * 2


def _generating_reason(s: RunCandidate) -> str:
    when = " while it generates" if _stay_gathered(s) else ""
    return f"embeddings and {_generating(s)} layers unsharded{when}"


@memory_part("gathered", _generating_reason)
def gathered_to_generate(s: RunCandidate) -> float:
    """Layers that stay gathered, and those that come and go for every token."""
    return _unsharded_bytes(s, _generating(s)) if s.sharded else 0.0


def _stay_gathered(s: RunCandidate) -> bool:
    return bool(s.gathers_to_generate and s.gathered_layers and s.reshard)


def _generating(s: RunCandidate) -> int:
    # One at work, one that comes in, and one that is freed when the next has been copied out.
    return min(s.gathered_layers + 3, s.shape.layers) if _stay_gathered(s) else _unsharded(s)


@memory_part("gathered", "embeddings coming in, copied out")
def gathering(s: RunCandidate) -> float:
    """The moment at which the embeddings are gathered: what comes in, and where it is copied to."""
    return 2 * s.shape.embedding_params * 2 + s.shape.layer_params * 2


@memory_part("dequantised", "the matrix at work, in bf16")
def dequantised(s: RunCandidate) -> float:
    """The largest matrix in bf16; of experts those of a layer."""
    return max(2 * s.shape.hidden * s.shape.mlp, 2 * s.shape.expert_params / s.shape.layers)


#: What a sleeping vLLM keeps: its graphs and workspaces. Not measured.
VLLM_ASLEEP_BYTES = 1.5e9


@memory_part("vllm", lambda s: "asleep" if s.vllm_sleep else _vllm_reason(s))
def vllm(s: RunCandidate) -> float:
    return VLLM_ASLEEP_BYTES if s.vllm_sleep else s.vllm_share * s.kind.memory_bytes


def _vllm_reason(s: RunCandidate) -> str:
    return f"{s.vllm_share:.0%} of the GPU for generation, weights and cache"


@memory_part("vllm awake", _vllm_reason)
def vllm_awake(s: RunCandidate) -> float:
    """While it generates: the rest of its share."""
    return max(s.vllm_share * s.kind.memory_bytes - VLLM_ASLEEP_BYTES, 0.0)


@memory_part("cuda", lambda s: f"context {show_bytes(CONTEXT_BYTES)}{_nccl(_links(s))}")
def cuda(s: RunCandidate) -> float:
    return 0.0 if s.kind.device is Device.CPU else CONTEXT_BYTES + _links(s)


def _links(s: RunCandidate) -> float:
    if s.world == 1:
        return 0.0
    larger = (s.nccl_buffer - NCCL_BUFFER) * NCCL_CHANNELS * min(s.world - 1, NCCL_PEERS)
    return NCCL_SHARDED_BYTES + NCCL_SHARDED_COMMUNICATORS * larger if s.sharded else NCCL_BYTES + larger


def _nccl(links: float) -> str:
    return f", NCCL {show_bytes(links)}" if links else ""


@memory_part("measured", "what a card has shown beyond these estimates")
def measured_more(s: RunCandidate) -> float:
    return measured_offset(s)


@memory_part("compile", lambda s: f"torch.compile {s.compile_mode.value}" if s.compile_mode else "")
def compiled(s: RunCandidate) -> float:
    """Memory that inductor's autotuning and CUDA graphs keep allocated."""
    return 0.3e9 if s.compile_mode is CompileMode.DEFAULT else 1.5e9


def fragmentation(temporary: float) -> DescribedBytes:
    return DescribedBytes(
        "fragmentation", FRAGMENTATION * temporary, f"{FRAGMENTATION:.0%} of what comes and goes"
    )
