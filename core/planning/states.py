"""What lies in GPU memory through the whole training: weights, gradients, optimizer states, the fixed costs.

Every term is one function from a setup to bytes on one GPU; `part` gives it a name, and half a line that
says how they came about.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from core.choices import Attention, CompileMode, Method, Optimizer
from core.hardware import Device
from core.planning.setup import Setup
from core.tasks import TaskType
from core.units import show_bytes, show_params


class Term(NamedTuple):
    name: str
    bytes: float
    why: str


#: Bytes of one term on one GPU.
Part = Callable[[Setup], float]
Why = Callable[[Setup], str]
#: What a term is called, and how it came about.
WORDS: dict[Part, tuple[str, str | Why]] = {}


def part(name: str, why: str | Why = "") -> Callable[[Part], Part]:
    """A search asks for the numbers a hundred times before the words of one breakdown are shown."""

    def named(count: Part) -> Part:
        WORDS[count] = name, why
        return count

    return named


def term(count: Part, size: float, s: Setup) -> Term:
    name, why = WORDS[count]
    return Term(name, size, why if isinstance(why, str) else why(s))


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
#: The CUDA context, cuBLAS's workspaces and the kernels themselves.
CONTEXT_BYTES = 0.85e9
#: NCCL's buffers for a few channels; sharded training keeps several communicators.
NCCL_BYTES, NCCL_SHARDED_BYTES = 1.0e9, 1.5e9
#: Reserved by the allocator but not in use: with expandable segments a few percent of what comes and goes.
FRAGMENTATION = 0.05


def _split(s: Setup) -> str:
    return f" ÷ {s.shards} GPUs" if s.shards > 1 else ""


def _weights_why(s: Setup) -> str:
    if s.picture is not None:
        return f"{show_params(s.picture.facts.backbone_params)} at {_picture_width(s):g} B"
    how = ", layers in 4 bits" if s.method is Method.QLORA else f" at {s.width} B"
    return f"{show_params(s.shape.params)}{how}{_split(s)}"


def _picture_width(s: Setup) -> float:
    assert s.picture is not None
    return 1.0 if s.picture.quantized else float(s.width)


@part("weights", _weights_why)
def weights(s: Setup) -> float:
    """The base model, whole on every GPU or in shards."""
    if s.picture is not None:
        return s.picture.facts.backbone_params * _picture_width(s)
    if s.method is Method.QLORA:
        plain = s.shape.root
        return ((s.shape.params - plain) * NF4_BYTES + plain * s.width) / s.shards
    return s.shape.params * s.width / s.shards


@part("frozen parts", lambda s: f"text encoders, {show_params(_encoders(s))}")
def frozen_parts(s: Setup) -> float:
    """Image models: text encoders that every step needs. The VAE is put away once the latents are cached."""
    if s.picture is None or s.picture.text_put_away:
        return 0.0
    return _encoders(s) * _picture_width(s)


def _encoders(s: Setup) -> int:
    return s.picture.facts.text_encoder_params if s.picture else 0


@part("fp32 embeddings", lambda s: f"{s.attention.value} without FSDP: {show_params(s.shape.root)} in fp32")
def fp32_tables(s: Setup) -> float:
    """Axolotl keeps embeddings, head and norms of a full fine-tune in fp32 unless the attention kernel or
    FSDP asks for bf16: twice the bytes of weight, gradient and both states for these parameters."""
    if not _fp32_tables(s):
        return 0.0
    states = STATE_BYTES[s.optimizer]
    return s.shape.root * (2 + states[0] - states[1])


def _fp32_tables(s: Setup) -> bool:
    plain = s.attention in (Attention.SDPA, Attention.EAGER)
    return s.full and not s.sharded and plain and s.picture is None and s.width == 2


@part(
    "adapter",
    lambda s: f"rank {s.rank}: {show_params(s.adapter_params)} at {s.trained_width} B{_split(s)}",
)
def adapter(s: Setup) -> float:
    return s.adapter_params * s.trained_width / s.shards


@part("reference", "the untrained model beside the trained one")
def reference(s: Setup) -> float:
    """A frozen copy, where the base model cannot be had back by switching an adapter off."""
    needs = (s.task is TaskType.DPO and not s.reference_ready) or s.kl
    return s.shape.params * 2 / s.shards if s.full and needs else 0.0


@part(
    "optimizer",
    lambda s: f"{s.optimizer.value}: {_per_param(s):g} B × {show_params(s.trained_params)}{_split(s)}",
)
def optimizer_states(s: Setup) -> float:
    return s.trained_params * _per_param(s) / s.shards


def _per_param(s: Setup) -> float:
    fp32, bf16 = STATE_BYTES[s.optimizer]
    if s.full and s.fp32_master:
        return fp32 + 4
    return fp32 if s.trained_width == 4 else bf16


@part("average", lambda s: f"moving average of {show_params(s.trained_params)}{_split(s)}")
def average(s: Setup) -> float:
    """The moving average lies beside the weights, in their own format."""
    return s.trained_params * s.trained_width / s.shards if s.averages else 0.0


@part("gradients", lambda s: f"{s.trained_width} B × {show_params(s.trained_params)}{_split(s)}")
def gradients(s: Setup) -> float:
    held = s.trained_params * s.trained_width / s.shards
    return held + s.shape.root * 2 if _fp32_tables(s) else held


@part("ddp buckets", "a second copy of the gradients, to be sent")
def ddp_buckets(s: Setup) -> float:
    """DDP copies the gradients into buckets to send them; accelerate leaves `gradient_as_bucket_view` off."""
    return 0.0 if s.world == 1 or s.sharded or s.picture is not None else gradients(s)


def _temporaries_why(s: Setup) -> str:
    if s.optimizer is Optimizer.ADAMW_TORCH:
        return "one temporary copy of all trained parameters"
    return "three fp32 copies of the largest matrix"


@part("optimizer work", _temporaries_why)
def optimizer_temporaries(s: Setup) -> float:
    """`adamw_torch` works on all parameters at once and makes one more copy; fused kernels make none."""
    if s.optimizer is Optimizer.ADAMW_TORCH:
        return s.trained_params * s.trained_width / s.shards
    if s.optimizer in (Optimizer.ADAFACTOR, Optimizer.MUON, Optimizer.PRODIGY):
        return 3 * 4 * _largest_matrix(s)
    return 0.0


def _largest_matrix(s: Setup) -> float:
    if s.full:
        return max(s.shape.table, s.shape.hidden * s.shape.mlp)
    return s.rank * max(s.shape.mlp, s.shape.hidden)


@part("gathered", lambda s: f"embeddings and {_unsharded(s)} layers unsharded")
def gathered(s: Setup) -> float:
    """FSDP: embedding and head stay whole from first layer to last; two layers are whole at a time."""
    return _held_layers(s, _unsharded(s)) if s.sharded else 0.0


def _unsharded(s: Setup) -> int:
    return 2 if s.reshard else s.shape.layers


def _held_layers(s: Setup, layers: int) -> float:
    size = NF4_BYTES if s.method is Method.QLORA else 2
    held = s.shape.root * 2 + layers * s.shape.layer_params * size
    return held + layers / s.shape.layers * s.adapter_params * 2


def _generating_why(s: Setup) -> str:
    when = " while it generates" if _stays(s) else ""
    return f"embeddings and {_generating(s)} layers unsharded{when}"


@part("gathered", _generating_why)
def gathered_to_generate(s: Setup) -> float:
    """Layers that stay, and those that come and go for every token."""
    return _held_layers(s, _generating(s)) if s.sharded else 0.0


def _stays(s: Setup) -> bool:
    return bool(s.gathers_to_generate and s.whole and s.reshard)


def _generating(s: Setup) -> int:
    # One at work, one that comes in, and one that is let go when the next has been copied out.
    return min(s.whole + 3, s.shape.layers) if _stays(s) else _unsharded(s)


@part("gathered", "embeddings coming in, copied out")
def gathering(s: Setup) -> float:
    """The moment at which the embeddings are gathered: what comes in, and where it is copied to."""
    return 2 * s.shape.root * 2 + s.shape.layer_params * 2


@part("dequantised", "the matrix at work, in bf16")
def dequantised(s: Setup) -> float:
    return 2 * s.shape.hidden * s.shape.mlp if s.method is Method.QLORA else 0.0


@part("vllm", lambda s: f"{s.vllm_share:.0%} of the card for generation, weights and cache")
def vllm(s: Setup) -> float:
    return s.vllm_share * s.kind.memory_bytes


@part("cuda", lambda s: f"context {show_bytes(CONTEXT_BYTES)}{_nccl(_links(s))}")
def cuda(s: Setup) -> float:
    return 0.0 if s.kind.device is Device.CPU else CONTEXT_BYTES + _links(s)


def _links(s: Setup) -> float:
    return 0.0 if s.world == 1 else NCCL_SHARDED_BYTES if s.sharded else NCCL_BYTES


def _nccl(links: float) -> str:
    return f", NCCL {show_bytes(links)}" if links else ""


@part("compile", lambda s: f"torch.compile {s.compile_mode.value}" if s.compile_mode else "")
def compiled(s: Setup) -> float:
    """What inductor's autotuning and CUDA graphs keep for themselves."""
    if s.compile_mode is None:
        return 0.0
    return 0.3e9 if s.compile_mode is CompileMode.DEFAULT else 1.5e9


def fragmentation(moving: float) -> Term:
    return Term("fragmentation", FRAGMENTATION * moving, f"{FRAGMENTATION:.0%} of what comes and goes")
