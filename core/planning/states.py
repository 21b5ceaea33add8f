"""What lies in GPU memory through the whole training: weights, gradients, optimizer states, the fixed costs.

Every term is one function from a setup to a `Term`: bytes on one GPU, and how they came about in half a line.
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
    #: Or what makes it: a search counts bytes a hundred times before one breakdown is shown.
    why: str | Callable[[], str] = ""

    def text(self) -> str:
        return self.why if isinstance(self.why, str) else self.why()


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


def weights(s: Setup) -> Term:
    """The base model, whole on every GPU or in shards."""
    if s.picture is not None:
        size = 1.0 if s.picture.quantized else float(s.width)
        params = s.picture.facts.backbone_params
        return Term("weights", params * size, lambda: f"{show_params(params)} at {size:g} B")
    if s.method is Method.QLORA:
        plain = s.shape.root
        held = ((s.shape.params - plain) * NF4_BYTES + plain * s.width) / s.shards
        return Term("weights", held, lambda: f"{show_params(s.shape.params)}, layers in 4 bits{_split(s)}")
    held = s.shape.params * s.width / s.shards
    return Term("weights", held, lambda: f"{show_params(s.shape.params)} at {s.width} B{_split(s)}")


def frozen_parts(s: Setup) -> Term:
    """Image models: text encoders that every step needs. The VAE is put away once the latents are cached."""
    if s.picture is None or s.picture.text_put_away:
        return Term("frozen parts", 0)
    params = s.picture.facts.text_encoder_params
    held = params * (1.0 if s.picture.quantized else s.width)
    return Term("frozen parts", held, lambda: f"text encoders, {show_params(params)}")


def fp32_tables(s: Setup) -> Term:
    """Axolotl keeps embeddings, head and norms of a full fine-tune in fp32 unless the attention kernel or
    FSDP asks for bf16: twice the bytes of weight, gradient and both states for these parameters."""
    if not _fp32_tables(s):
        return Term("fp32 embeddings", 0)
    states = STATE_BYTES[s.optimizer]
    extra = s.shape.root * (2 + states[0] - states[1])
    return Term(
        "fp32 embeddings",
        extra,
        lambda: f"{s.attention.value} without FSDP: {show_params(s.shape.root)} in fp32",
    )


def _fp32_tables(s: Setup) -> bool:
    plain = s.attention in (Attention.SDPA, Attention.EAGER)
    return s.full and not s.sharded and plain and s.picture is None and s.width == 2


def adapter(s: Setup) -> Term:
    params = s.adapter_params
    held = params * s.trained_width / s.shards
    return Term(
        "adapter", held, lambda: f"rank {s.rank}: {show_params(params)} at {s.trained_width} B{_split(s)}"
    )


def reference(s: Setup) -> Term:
    """A frozen copy, where the base model cannot be had back by switching an adapter off."""
    needs = (s.task is TaskType.DPO and not s.reference_ready) or s.kl
    if not (s.full and needs):
        return Term("reference", 0)
    return Term("reference", s.shape.params * 2 / s.shards, "the untrained model beside the trained one")


def optimizer_states(s: Setup) -> Term:
    fp32, bf16 = STATE_BYTES[s.optimizer]
    per = fp32 if s.trained_width == 4 else bf16
    if s.full and s.fp32_master:
        per = fp32 + 4
    held = s.trained_params * per / s.shards
    return Term(
        "optimizer",
        held,
        lambda: f"{s.optimizer.value}: {per:g} B × {show_params(s.trained_params)}{_split(s)}",
    )


def average(s: Setup) -> Term:
    """The moving average lies beside the weights, in their own format."""
    if not s.averages:
        return Term("average", 0)
    held = s.trained_params * s.trained_width / s.shards
    return Term("average", held, lambda: f"moving average of {show_params(s.trained_params)}{_split(s)}")


def gradients(s: Setup) -> Term:
    held = s.trained_params * s.trained_width / s.shards
    if _fp32_tables(s):
        held += s.shape.root * 2
    return Term(
        "gradients", held, lambda: f"{s.trained_width} B × {show_params(s.trained_params)}{_split(s)}"
    )


def ddp_buckets(s: Setup) -> Term:
    """DDP copies the gradients into buckets to send them; accelerate leaves `gradient_as_bucket_view` off."""
    if s.world == 1 or s.sharded or s.picture is not None:
        return Term("ddp buckets", 0)
    return Term("ddp buckets", gradients(s).bytes, "a second copy of the gradients, to be sent")


def optimizer_temporaries(s: Setup) -> Term:
    """`adamw_torch` works on all parameters at once and makes one more copy; fused kernels make none."""
    if s.optimizer is Optimizer.ADAMW_TORCH:
        held = s.trained_params * s.trained_width / s.shards
        return Term("optimizer work", held, "one temporary copy of all trained parameters")
    if s.optimizer in (Optimizer.ADAFACTOR, Optimizer.MUON, Optimizer.PRODIGY):
        held = 3 * 4 * _largest_matrix(s)
        return Term("optimizer work", held, "three fp32 copies of the largest matrix")
    return Term("optimizer work", 0)


def _largest_matrix(s: Setup) -> float:
    if s.full:
        return max(s.shape.table, s.shape.hidden * s.shape.mlp)
    return s.rank * max(s.shape.mlp, s.shape.hidden)


def gathered(s: Setup) -> Term:
    """FSDP: embedding and head stay whole from first layer to last; two layers are whole at a time."""
    if not s.sharded:
        return Term("gathered", 0)
    return _held_layers(s, 2 if s.reshard else s.shape.layers)


def _held_layers(s: Setup, layers: int, when: str = "") -> Term:
    size = NF4_BYTES if s.method is Method.QLORA else 2
    held = s.shape.root * 2 + layers * s.shape.layer_params * size
    held += layers / s.shape.layers * s.adapter_params * 2
    return Term("gathered", held, lambda: f"embeddings and {layers} layers unsharded {when}".rstrip())


def gathered_to_generate(s: Setup) -> Term:
    """Layers that stay, and those that come and go for every token."""
    if not (s.gathers_to_generate and s.whole and s.reshard):
        return gathered(s)
    # One at work, one that comes in, and one that is let go when the next has been copied out.
    return _held_layers(s, min(s.whole + 3, s.shape.layers), "while it generates")


def gathering(s: Setup) -> Term:
    """The moment at which the embeddings are gathered: what comes in, and where it is copied to."""
    return Term(
        "gathered", 2 * s.shape.root * 2 + s.shape.layer_params * 2, "embeddings coming in, copied out"
    )


def dequantised(s: Setup) -> Term:
    if s.method is not Method.QLORA:
        return Term("dequantised", 0)
    return Term("dequantised", 2 * s.shape.hidden * s.shape.mlp, "the matrix at work, in bf16")


def vllm(s: Setup) -> Term:
    if not s.vllm_share:
        return Term("vllm", 0)
    held = s.vllm_share * s.kind.memory_bytes
    return Term("vllm", held, lambda: f"{s.vllm_share:.0%} of the card for generation, weights and cache")


def cuda(s: Setup) -> Term:
    if s.kind.device is Device.CPU:
        return Term("cuda", 0)
    links = 0.0 if s.world == 1 else NCCL_SHARDED_BYTES if s.sharded else NCCL_BYTES
    return Term("cuda", CONTEXT_BYTES + links, lambda: f"context {show_bytes(CONTEXT_BYTES)}{_nccl(links)}")


def _nccl(links: float) -> str:
    return f", NCCL {show_bytes(links)}" if links else ""


def compiled(s: Setup) -> Term:
    """What inductor's autotuning and CUDA graphs keep for themselves."""
    held = {None: 0.0, CompileMode.DEFAULT: 0.3e9}.get(s.compile_mode, 1.5e9)
    return Term("compile", held, lambda: f"torch.compile {s.compile_mode.value}" if s.compile_mode else "")


def fragmentation(moving: float) -> Term:
    return Term(
        "fragmentation", FRAGMENTATION * moving, lambda: f"{FRAGMENTATION:.0%} of what comes and goes"
    )


def _split(s: Setup) -> str:
    return f" ÷ {s.shards} GPUs" if s.shards > 1 else ""
