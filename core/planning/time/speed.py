"""Seconds per optimizer step, from the GPU's peaks: a prior until the run has measured itself.

Matrix products run at a share of the peak, everything between them at the speed of memory, and small
batches at the speed at which Python launches kernels. The shares were fitted to a per-operation roofline of
Hugging Face and PEFT in eager mode, which lay 3 % off torchtune's published A100 figure; no H100 run stands
behind them. `DERATE` then takes off what published end-to-end numbers fall short of such a roofline.

Floating-point operations are those of the matrix products: a LoRA has no weight gradients. `s` is the
candidate.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from core.domain.choices import Attention
from core.domain.hardware import Device, GpuLink
from core.domain.tasks import ImageModelType
from core.models.image_families import IMAGE_FAMILIES
from core.planning.candidate import RunCandidate, image_tokens, image_type
from core.planning.memory.persistent import STATE_BYTES

#: One 1024² image through SDXL's U-Net, forward: its convolutions see tokens at several resolutions.
SDXL_FORWARD = 6.0e12


def training_flops(s: RunCandidate, row_tokens: float) -> float:
    """Per token: forward, backward, recomputation, the reference's pass.

    4N for LoRA, 6N for a full fine-tune; checkpointing adds another 2N; adapters 6P, 8P with checkpointing;
    attention by the tokens of a row that it can see.
    """
    recomputed = 1 if s.checkpointing else 0
    dense = 2.0 * matmul_params(s) * ((3 if s.full else 2) + recomputed)
    adapters = 2.0 * s.adapter_params * (3 + recomputed)
    # Causal attention sees half of the row; its backward pass costs two and a half forward passes.
    attention = 2.0 * s.shape.layers * s.shape.queries * row_tokens * (3.5 + recomputed)
    mixers = s.shape.layers * s.shape.mixer.flops * (3 + recomputed)
    trained, reference = dense + adapters + attention + mixers, forward_flops(s, row_tokens)
    return trained + _reference_share(s) * reference + _prompt_share(s) * (trained + reference)


def _reference_share(s: RunCandidate) -> float:
    """Passes of the untrained model over all tokens."""
    return float(s.kl if not s.task.has_pairs else not s.reference_ready)


def _prompt_share(s: RunCandidate) -> float:
    """Work of the KL on prompts: a pass of both models over each prompt, whose completions share it."""
    return s.prompt_kl_tokens / (s.length * s.generations)


def forward_flops(s: RunCandidate, row_tokens: float) -> float:
    attention = 2.0 * s.shape.layers * s.shape.queries * row_tokens
    mixers = s.shape.layers * s.shape.mixer.flops
    return 2.0 * (matmul_params(s) + s.adapter_params) + attention + mixers


def matmul_params(s: RunCandidate) -> float:
    """Parameters that are multiplied: not the embedding, which is looked up; the head, tied or not."""
    lookup = max(s.shape.embedding_params - s.shape.vocab_params, 0)
    return float(max(s.shape.active - lookup, 1))


def image_flops(s: RunCandidate) -> float:
    """Per image: the backbone's forward pass and its multiples."""
    assert s.image is not None
    passes = (3 if s.full else 2) + (1 if s.checkpointing else 0)
    sides = s.image.resolutions
    return passes * sum(_image_forward(s, side) for side in sides) / len(sides)


def _image_forward(s: RunCandidate, side: int) -> float:
    assert s.image is not None
    tokens = image_tokens(s.image.facts, side)
    if image_type(s) is ImageModelType.SDXL:
        return SDXL_FORWARD * tokens / s.image.facts.tokens_at_1024
    attention = 4.0 * s.shape.layers * s.shape.hidden * tokens
    return tokens * (2.0 * s.image.facts.backbone_params + attention)


GEMM_SHARE = 0.65
#: Attention kernels reach less of the peak than plain products; weights their part in `_gemm_share`.
EAGER_SHARE = 0.45
BANDWIDTH_SHARE = 0.85
DERATE = 0.75
#: Bytes moved between the products, per token, layer and element of width: (plain, with checkpointing).
LORA_MOVES, FULL_MOVES = (975.0, 1280.0), (700.0, 800.0)
#: What a mixer saves is written once, and read and written again around each of its products and gradients.
MIXER_MOVES = 6.0
#: Kernels that one layer launches in a step, and what launching one costs.
LORA_KERNELS, FULL_KERNELS, IMAGE_KERNELS = 370.0, 190.0, 250.0
LAUNCH_S = 7e-6
#: What of the nominal link bandwidth collectives reach, and what part of the work can hide them.
LINK_SHARE, HIDES = 0.65, 0.6
#: Most of SDXL's blocks see a quarter of the tokens; its convolutions make up for half of that.
SDXL_TOKENS = 0.57
#: torch.compile's gain on the work between the products, fp8's on the products (full fine-tunes, compiled).
COMPILED_MOVES, FP8_PRODUCTS = 0.6, 0.7
#: Hugging Face's generate: seconds per layer and token step, however small the batch.
GENERATE_LAYER_S, VLLM_LAYER_S, CPU_LAYER_S = 1.0e-3, 1.5e-4, 2.0e-4


class PassWork(NamedTuple):
    """The work of one forward pass, on average."""

    #: Tokens on one GPU in one pass, padding included; images for image tasks.
    tokens: float
    #: Tokens that attention sees on average.
    row_tokens: float


class StepTime(NamedTuple):
    compute_s: float
    exchange_s: float
    optimizer_s: float
    generate_s: float
    #: Floating-point operations of the step on one GPU.
    flops: float

    @property
    def seconds(self) -> float:
        return self.compute_s + self.exchange_s + self.optimizer_s + self.generate_s


def step_time(s: RunCandidate, work: PassWork) -> StepTime:
    """One optimizer step: every accumulated pass, the exchange of gradients, the update."""
    flops = work.tokens * (training_flops(s, work.row_tokens) if s.image is None else image_flops(s))
    one_pass = _pass_seconds(s, flops, work.tokens)
    exchange = _exchange_seconds(s, one_pass)
    return StepTime(
        compute_s=s.accumulation * one_pass,
        exchange_s=exchange,
        optimizer_s=_optimizer_seconds(s),
        generate_s=generate_seconds(s),
        flops=s.accumulation * flops,
    )


def _pass_seconds(s: RunCandidate, flops: float, tokens: float) -> float:
    products = flops / (s.kind.bf16_flops * _gemm_share(s) * _precision(s))
    moved = moved_bytes(s) * (tokens * _image_tokens(s))
    busy = (products + moved / (s.kind.bandwidth * BANDWIDTH_SHARE)) / DERATE
    launch = _kernels(s) * LAUNCH_S
    kind = image_type(s)
    slowness = IMAGE_FAMILIES[kind].slowness if kind is not None else 1.0
    # They neither add up nor hide each other fully: at 512 tokens the roofline with 7 µs per launch gave
    # 0.117 s for 0.067 of work and 0.083 of launching.
    return slowness * float((busy**1.5 + launch**1.5) ** (1 / 1.5))


def _gemm_share(s: RunCandidate) -> float:
    return EAGER_SHARE if s.attention is Attention.EAGER and s.kind.device is Device.CUDA else GEMM_SHARE


def _precision(s: RunCandidate) -> float:
    """Relative to the bf16 peak. Without bf16 there is TF32 at half of it; fp8 pays only where it is measured
    to: full fine-tunes, compiled, not recomputed."""
    if s.fp8 and s.kind.has_fp8 and s.full and s.compile_mode and not s.checkpointing:
        return 1 / FP8_PRODUCTS
    return 1.0 if s.width == 2 else 0.5


def _image_tokens(s: RunCandidate) -> float:
    return s.image.mean_tokens if s.image is not None else 1.0


def moved_bytes(s: RunCandidate) -> float:
    """Bytes moved between the products, per token over all layers: casts, norms, activations, the loss."""
    moves = (FULL_MOVES if s.full else LORA_MOVES)[1 if s.checkpointing else 0]
    width = s.shape.layers * (s.shape.hidden + s.shape.mlp) / 4.5
    if image_type(s) is ImageModelType.SDXL:
        width *= SDXL_TOKENS
    gain = COMPILED_MOVES if s.compile_mode is not None else 1.0
    head = 0.0 if s.image is not None else 20.0 * s.shape.vocab
    mixers = MIXER_MOVES * s.shape.layers * s.shape.mixer.saved
    return (moves * width * gain + head) * (s.width / 2) + mixers


def _kernels(s: RunCandidate) -> float:
    if s.kind.device is Device.CPU:
        return 0.0
    per = IMAGE_KERNELS if s.image is not None else FULL_KERNELS if s.full else LORA_KERNELS
    return per * s.shape.layers * (0.3 if s.compile_mode is not None else 1.0)


def _exchange_seconds(s: RunCandidate, one_pass: float) -> float:
    """The communication that the computation does not hide."""
    if s.world == 1:
        return 0.0
    rate, part = link_rate(s), (s.shards - 1) / s.shards
    gradients = s.trained_params * s.trained_width
    if not s.sharded:
        part = (s.world - 1) / s.world
        # Sent once per step, while the last pass runs backward.
        return max(2 * part * gradients / rate - HIDES * one_pass, 0.1 * 2 * part * gradients / rate)
    gathers = 2 if s.reshard else 1
    moved = part * (gathers * s.shape.params * 2 + gradients) / rate
    exchange = s.accumulation * max(moved - HIDES * one_pass, 0.1 * moved)
    if s.hybrid:
        # Once per step, every GPU its own shard; together the node sends all gradients.
        between = 2 * (s.nodes - 1) / s.nodes * gradients / (s.network * LINK_SHARE)
        exchange += max(between - HIDES * one_pass, 0.1 * between)
    return exchange


def link_rate(s: RunCandidate) -> float:
    """Bridges join pairs; a ring over more than two GPUs goes through PCIe, one over nodes through the
    network, which all GPUs of a node share."""
    rate = s.kind.link_bandwidth
    if s.kind.link is GpuLink.NVLINK_PAIR and s.on_node > 2:
        rate = min(rate, 28e9)
    if s.nodes > 1 and not s.hybrid:
        rate = min(rate, s.network)
    return rate * LINK_SHARE


def _optimizer_seconds(s: RunCandidate) -> float:
    """Read and write weights and states, read gradients: bound by memory."""
    fp32, bf16 = STATE_BYTES[s.optimizer]
    states = fp32 if s.trained_width == 4 else bf16
    moved = s.trained_params / s.shards * (3 * s.trained_width + 2 * states)
    return 0.01 + moved / (s.kind.bandwidth * 0.6)


def generate_seconds(s: RunCandidate) -> float:
    """GRPO: one token after the other, as many completions together as fit; bound by memory and launches,
    with very many by products.
    Completion lengths are unknown: all are taken to be as long as allowed."""
    if not s.task.generates:
        return 0.0
    read = s.per_gpu // s.generations if s.samples_itself or s.vllm_share else s.per_gpu
    prompts = read * max(s.length - s.completion, 1)
    prefill = prompts * forward_flops(s, s.length / 2) / (s.kind.bf16_flops * GEMM_SHARE * DERATE)
    at_once = s.per_gpu if s.vllm_share else s.at_once
    tokens = s.completion * math.ceil(s.per_gpu / at_once)
    cache = at_once * s.length / 2 * 2.0 * s.shape.layers * s.shape.keys * s.width
    gather = s.shape.params * 2 / link_rate(s) if s.gathers_to_generate else 0.0
    per_token = 1 - s.gathered_layers / s.shape.layers
    return prefill + tokens * _token_seconds(s, cache, at_once) + gather * (1 + tokens * per_token)


def least_generate_seconds(s: RunCandidate) -> float:
    """The least time for any number of completions, its layers gathered."""
    return s.completion * _token_seconds(s, 0.0, 1) if s.task.generates else 0.0


def _token_seconds(s: RunCandidate, cache: float, at_once: int) -> float:
    read = (s.shape.params * s.width + cache) / (s.kind.bandwidth * 0.7)
    if s.kind.device is Device.CPU:
        return max(read, s.shape.layers * CPU_LAYER_S)
    launched = s.shape.layers * (VLLM_LAYER_S if s.vllm_share else GENERATE_LAYER_S)
    products = at_once * forward_flops(s, s.length / 2) / (s.kind.bf16_flops * GEMM_SHARE * DERATE)
    return max(read, launched, products)


def evaluation_seconds(s: RunCandidate, rows: int, work: PassWork, row_tokens: float) -> float:
    """One evaluation of all held-out rows, split over the GPUs; small batches, nothing recomputed."""
    if rows <= 0 or s.image is not None:
        return 0.0
    batches = -(-rows // (s.eval_micro * s.world))
    passes = 2 if s.needs_base else 1
    tokens = s.eval_micro * row_tokens
    products = tokens * forward_flops(s, work.row_tokens) / (s.kind.bf16_flops * GEMM_SHARE)
    moved = tokens * moved_bytes(s) * 0.3 / (s.kind.bandwidth * BANDWIDTH_SHARE)
    launch = _kernels(s) * LAUNCH_S * 0.3
    per_batch = passes * max((products + moved) / DERATE, launch)
    if s.sharded:
        per_batch += passes * s.shape.params * 2 / link_rate(s)
    return 2.0 + batches * per_batch + batches * generate_seconds(s)
