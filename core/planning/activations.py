"""What lies in memory because tokens pass through: activations, logits, the cache of a generation.

The numbers are bytes per token and per element of the model's widths, counted from what autograd keeps of
Hugging Face's layers under bf16 autocast, with PEFT's fp32 adapters; `benchmarks/memory_model.py` measures
them again on torch's fake tensors. Megatron's 34 bytes per width are too few for this stack: PEFT casts its
input once per matrix, and RMSNorm keeps an fp32 copy.
"""

from __future__ import annotations

from core.choices import Attention
from core.planning.setup import Loss, Setup, image_type, tokens_of_picture
from core.planning.states import part
from core.tasks import ImageModelType, TaskType

#: Bytes per logit while the loss is computed and while its gradient flows back. HF: bf16 logits, accelerate's
#: fp32 copy and the fp32 log-softmax, then three fp32 tensors. TRL's log-probs keep one more.
LOGIT_BYTES: dict[Loss, tuple[float, float]] = {
    Loss.FULL: (10.25, 12.0),
    Loss.CHUNKED: (8.0, 4.0),
    Loss.FUSED: (0.0, 0.0),
}
TRL_LOGIT_BYTES = (10.25, 16.25)
KL_LOGIT_BYTES = (18.25, 24.0)
#: SDXL's U-Net has no single width; bytes per 1024² picture, without and with checkpointing. From published
#: totals (24 GB class without, 11 GB with), not measured by us.
SDXL_PICTURE_BYTES = (7.5e9, 2.0e9)
#: Encoding one 1024² picture with the SDXL-size VAE, fp32; measured on a CPU.
VAE_PICTURE_BYTES = 2.6e9


def layer_bytes(s: Setup) -> float:
    """What one layer keeps for its backward pass, per token."""
    kept = _norms(s) + _attention(s) + _mlp(s) + _adapter_inputs(s)
    return kept * (s.width / 2)


def _norms(s: Setup) -> float:
    """Two norms: the fp32 input of each. Trained norms keep their output too, and so do its readers."""
    if not s.full:
        return 8.0 * s.shape.hidden
    fp32 = s.attention in (Attention.SDPA, Attention.EAGER) and not s.sharded
    return (16.0 + (16.0 if fp32 else 0.0)) * s.shape.hidden


def _attention(s: Setup) -> float:
    """Queries, keys, values, output, and one fp32 per head and row; the scores too where they are written."""
    q, k = s.shape.queries, s.shape.keys
    if s.attention is Attention.EAGER:
        # Keys and values repeated for every head; softmax in fp32 and bf16.
        return 4.0 * q + 4.0 * q + 6.0 * s.shape.heads * s.length
    if s.attention is Attention.SDPA:
        # A padding mask makes transformers repeat keys and values for every query head.
        return 4.0 * q + 4.0 * q + 4.0 * s.shape.heads
    return 4.0 * q + 4.0 * k + 4.0 * s.shape.heads


def _mlp(s: Setup) -> float:
    """Gate, activated gate and up; without a gate only what goes into the activation. And the last product,
    where nobody else keeps it: an adapter in fp32 keeps its own cast, one with dropout its own copy."""
    kept = (6.0 if s.shape.gated else 2.0) * s.shape.mlp
    own_copy = _casts(s) or (not s.full and s.dropout)
    return kept if own_copy else kept + 2.0 * s.shape.mlp


def _adapter_inputs(s: Setup) -> float:
    """fp32 adapters cast the input of every matrix anew; in bf16, readers of one tensor share it."""
    if s.full:
        return 0.0
    a, h = s.shape.adapted, s.shape.hidden
    inputs = 2.0 * a.inputs if _casts(s) or s.dropout else 4.0 * h
    mask = a.inputs if s.dropout else 0.0
    return inputs + mask + 2.0 * s.rank * a.modules


def _casts(s: Setup) -> bool:
    return not s.full and s.adapter_fp32 and s.width == 2


def backward_work(s: Setup) -> float:
    """What a layer's backward pass needs beside what was kept, per token."""
    m, h = s.shape.mlp, s.shape.hidden
    casting = (10.0 if s.dropout else 6.0) * m + 4.0 * h
    work = casting if _casts(s) else max(4.0 * m - 4.0 * h, 6.0 * h)
    return work * (s.width / 2)


def forward_work(s: Setup) -> float:
    """What a layer's forward pass needs beside what is kept, per token."""
    m, h = s.shape.mlp, s.shape.hidden
    if _casts(s):
        work = (10.0 if s.dropout else 6.0) * m + 8.0 * h
    elif s.checkpointing:
        work = max(8.0 * m, 10.0 * h)
    else:
        work = max(2.0 * m, 8.0 * h)
    return work * (s.width / 2)


def _kept_why(s: Setup) -> str:
    if s.picture is not None:
        return f"{s.micro} pictures of {s.picture.resolution}²"
    if not s.checkpointing:
        return f"{s.shape.layers} layers of {s.tokens:,} tokens"
    if s.offload:
        return "each layer's input, in host memory"
    return f"inputs of {s.shape.layers} layers, {s.tokens:,} tokens"


@part("activations", _kept_why)
def kept(s: Setup) -> float:
    """At the end of the forward pass: every layer's, or only each layer's input."""
    if s.picture is not None:
        return _kept_pictures(s)
    outside = (8.0 if s.full else 4.0) * s.shape.hidden
    if not s.checkpointing:
        return s.tokens * (s.shape.layers * layer_bytes(s) + outside)
    if s.offload:
        return s.tokens * outside
    per = (4.0 if s.full and s.attention in (Attention.SDPA, Attention.EAGER) else 2.0) * s.width / 2
    return s.tokens * (per * s.shape.layers * s.shape.hidden + outside)


def _kept_pictures(s: Setup) -> float:
    assert s.picture is not None
    if image_type(s) is ImageModelType.SDXL:
        each = SDXL_PICTURE_BYTES[1 if s.checkpointing else 0] * (s.picture.resolution / 1024) ** 2
        return s.micro * each
    tokens = s.micro * tokens_of_picture(s.picture.facts, s.picture.resolution)
    if s.checkpointing:
        return tokens * 2.0 * s.shape.layers * s.shape.hidden
    return tokens * s.shape.layers * layer_bytes(s)


@part(
    "layer at work",
    lambda s: "one layer recomputed and its gradients" if s.checkpointing else "one layer's gradients",
)
def recomputed(s: Setup) -> float:
    """During the backward pass: one layer at work, recomputed whole where it was checkpointed."""
    tokens = s.tokens
    if s.picture is not None:
        if image_type(s) is ImageModelType.SDXL:
            return 0.0
        tokens = s.micro * tokens_of_picture(s.picture.facts, s.picture.resolution)
    again = layer_bytes(s) if s.checkpointing else 0.0
    return tokens * (again + backward_work(s))


@part("layer at work", "one layer in the forward pass")
def passing(s: Setup) -> float:
    return s.tokens * forward_work(s)


@part("adapter in bf16", "autocast's copies")
def cast_adapter(s: Setup) -> float:
    """Autocast keeps a bf16 copy of every fp32 adapter weight until the pass ends; without checkpointing the
    backward pass keeps them too."""
    return 2.0 * s.adapter_params / s.shards if _casts(s) else 0.0


@part("logits", lambda s: _logits_why(s, 0))
def logits(s: Setup) -> float:
    """The vocabulary times the tokens whose loss is computed."""
    return _logits(s, 0)


@part("logits", lambda s: _logits_why(s, 1))
def logits_backward(s: Setup) -> float:
    return _logits(s, 1)


def _logits(s: Setup, way: int) -> float:
    if s.picture is not None:
        return 0.0
    per = _logit_bytes(s)[way]
    return _loss_tokens(s) * per * s.shape.vocab if per else s.tokens * 10.0 * s.shape.hidden


def _logits_why(s: Setup, way: int) -> str:
    per = _logit_bytes(s)[way]
    return f"{_loss_tokens(s):,} tokens × {s.shape.vocab:,} × {per:g} B" if per else "a chunk at a time"


def _loss_tokens(s: Setup) -> int:
    return s.micro * s.completion if s.task is TaskType.GRPO else s.tokens


def _logit_bytes(s: Setup) -> tuple[float, float]:
    if s.task in (TaskType.DPO, TaskType.GRPO):
        return TRL_LOGIT_BYTES
    return KL_LOGIT_BYTES if s.kl else LOGIT_BYTES[s.loss]


@part("head gradient", "of the output matrix")
def head_gradient(s: Setup) -> float:
    """A full fine-tune makes the head's gradient first and keeps it; the fused loss makes a second one."""
    if not s.full or s.picture is not None:
        return 0.0
    return (2 if s.loss is Loss.FUSED else 1) * 2.0 * s.shape.table


@part("logits", lambda s: f"evaluating {s.eval_micro} × {s.length:,} tokens at once")
def evaluation_logits(s: Setup) -> float:
    """Evaluation has no fused loss: the logits are whole, in bf16 and in fp32."""
    if s.picture is not None:
        return 0.0
    if s.task is TaskType.GRPO:
        tokens = s.eval_micro * s.completion
    else:
        tokens = s.eval_micro * s.length * (2 if s.task is TaskType.DPO else 1)
    return tokens * LOGIT_BYTES[Loss.FULL][0] * s.shape.vocab


@part("kv cache", lambda s: f"{s.micro * s.accumulation} completions of up to {s.length:,} tokens")
def kv_cache(s: Setup) -> float:
    """GRPO: every completion of one optimizer step is generated at once, on each GPU its share."""
    if s.task is not TaskType.GRPO or s.vllm_share:
        return 0.0
    return s.micro * s.accumulation * s.length * 2.0 * s.shape.layers * s.shape.keys * s.width


@part("generation", lambda s: f"prompts of {s.micro * s.accumulation} completions, sampling")
def generation_work(s: Setup) -> float:
    """The prompts' pass, and the sampler's copies of one row of logits per completion."""
    prompt = max(s.length - s.completion, 1)
    each = prompt * 8.0 * max(s.shape.mlp, s.shape.hidden) + 16.0 * s.shape.vocab
    return s.micro * s.accumulation * each


@part("latents", lambda s: f"VAE encoding {s.picture.vae_batch if s.picture else 0} pictures at once")
def latent_work(s: Setup) -> float:
    """The VAE encodes the pictures once, before the training, `vae_batch` at a time."""
    if s.picture is None:
        return 0.0
    facts, picture = s.picture.facts, s.picture
    each = VAE_PICTURE_BYTES * (picture.resolution / 1024) ** 2
    if facts.image_type is not ImageModelType.SDXL:
        each /= 2  # bf16; SDXL's VAE overflows in it and stays fp32
    return facts.vae_params * 4 + picture.vae_batch * each
