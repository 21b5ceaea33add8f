"""GPU memory that depends on the tokens in a pass: activations, logits, the cache of a generation.

The numbers are bytes per token and per element of the model's widths, counted from what autograd saves of
Hugging Face's layers under bf16 autocast, with PEFT's fp32 adapters; `benchmarks/memory_model.py` measures
them again on torch's fake tensors. Megatron's 34 bytes per width are too few for this stack: PEFT casts its
input once per matrix, and RMSNorm saves an fp32 copy. `s` is the candidate.
"""

from __future__ import annotations

from core.domain.choices import Attention, Engine, Method
from core.domain.tasks import ImageModelType
from core.models.kernels import LigerPart
from core.planning.candidate import LossKind, RunCandidate, image_tokens, image_type
from core.planning.memory.persistent import memory_part

#: Bytes per logit while the loss is computed and while its gradient flows back. HF: bf16 logits, accelerate's
#: fp32 copy and the fp32 log-softmax, then three fp32 tensors. TRL's log-probs keep one more.
LOGIT_BYTES: dict[LossKind, tuple[float, float]] = {
    LossKind.FULL: (10.25, 12.0),
    LossKind.CHUNKED: (8.0, 4.0),
    LossKind.FUSED: (0.0, 0.0),
}
TRL_LOGIT_BYTES = (10.25, 16.25)
KL_LOGIT_BYTES = (18.25, 24.0)
#: SDXL's U-Net has no single width; bytes per 1024² image, without and with checkpointing. From published
#: totals (24 GB class without, 11 GB with), not measured by us.
SDXL_IMAGE_BYTES = (7.5e9, 2.0e9)
#: Without checkpointing the experts of a 4-bit base are kept in bf16 for the backward pass; bytes per
#: parameter.
EXPERT_SAVED = 2.0
#: Encoding one 1024² image with the SDXL-size VAE, fp32; measured on a CPU.
VAE_IMAGE_BYTES = 2.6e9


def layer_bytes(s: RunCandidate) -> float:
    """Bytes that one layer saves for its backward pass, per token."""
    return (_norms(s) + _attention(s) + _mlp(s) + _adapter_inputs(s)) * (s.width / 2) + s.shape.mixer.saved


def _norms(s: RunCandidate) -> float:
    """Two norms: the fp32 input of each; Liger's save it as it is. Trained norms save their output too, and
    so do its readers."""
    if not s.full:
        return (4.0 if LigerPart.RMS_NORM in s.liger else 8.0) * s.shape.hidden
    if LigerPart.RMS_NORM in s.liger:
        return 8.0 * s.shape.hidden
    fp32 = s.attention in (Attention.SDPA, Attention.EAGER) and not s.sharded
    return (16.0 + (16.0 if fp32 else 0.0)) * s.shape.hidden


def _attention(s: RunCandidate) -> float:
    """Queries, keys, values, output, and one fp32 per head and row; the scores too where they are written."""
    q, k = s.shape.queries, s.shape.keys
    if s.attention is Attention.EAGER:
        # Keys and values repeated for every head; softmax in fp32 and bf16.
        return 4.0 * q + 4.0 * q + 6.0 * s.shape.heads * s.length
    if s.attention is Attention.SDPA:
        # A padding mask makes transformers repeat keys and values for every query head.
        return 4.0 * q + 4.0 * q + 4.0 * s.shape.heads
    return 4.0 * q + 4.0 * k + 4.0 * s.shape.heads


def _mlp(s: RunCandidate) -> float:
    """Gate, activated gate and up, of which Liger computes the second again; without a gate only the
    activation's input. And the last product, unless the adapter saves it anyway: in fp32 as its own cast,
    with dropout as its own copy."""
    gated = 4.0 if LigerPart.GLU in s.liger else 6.0
    saved = (gated if s.shape.gated else 2.0) * s.shape.mlp
    own_copy = _casts(s) or (not s.full and s.dropout)
    return saved if own_copy else saved + 2.0 * s.shape.mlp


def _adapter_inputs(s: RunCandidate) -> float:
    """fp32 adapters cast the input once per matrix; in bf16, readers of one tensor share it."""
    if s.full:
        return 0.0
    a, h = s.shape.adapted, s.shape.hidden
    inputs = 2.0 * a.inputs if _casts(s) or s.dropout else 4.0 * h
    mask = a.inputs if s.dropout else 0.0
    return inputs + mask + 2.0 * s.rank * a.ranks


def _casts(s: RunCandidate) -> bool:
    return not s.full and s.width == 2


def backward_work(s: RunCandidate) -> float:
    """Bytes that a layer's backward pass needs beside what was saved, per token."""
    m, h = s.shape.mlp, s.shape.hidden
    casting = (10.0 if s.dropout else 6.0) * m + 4.0 * h
    work = casting if _casts(s) else max(4.0 * m - 4.0 * h, 6.0 * h)
    return work * (s.width / 2) + s.shape.mixer.saved / 2


def forward_work(s: RunCandidate) -> float:
    """Bytes that a layer's forward pass needs beside what it saves, per token."""
    m, h = s.shape.mlp, s.shape.hidden
    if _casts(s):
        work = (10.0 if s.dropout else 6.0) * m + 8.0 * h
    elif s.checkpointing:
        work = max(8.0 * m, 10.0 * h)
    else:
        work = max(2.0 * m, 8.0 * h)
    return work * (s.width / 2) + s.shape.mixer.saved * (1.0 if s.checkpointing else 0.25)


def _saved_reason(s: RunCandidate) -> str:
    if s.image is not None:
        return f"{s.micro} image{'s' if s.micro > 1 else ''} of {s.image.resolution}²"
    if not s.checkpointing:
        return f"{s.shape.layers} layers of {s.saved_tokens:,} tokens"
    return f"inputs of {s.shape.layers} layers, {s.saved_tokens:,} tokens"


@memory_part("activations", _saved_reason)
def saved_activations(s: RunCandidate) -> float:
    """At the end of the forward pass: those of every layer, or only each layer's input."""
    if s.image is not None:
        return _saved_for_images(s)
    outside = (8.0 if s.full else 4.0) * s.shape.hidden
    if not s.checkpointing:
        experts = EXPERT_SAVED * s.shape.expert_params if s.method is Method.QLORA else 0.0
        return s.saved_tokens * (s.shape.layers * layer_bytes(s) + outside) + experts
    per = (4.0 if s.full and s.attention in (Attention.SDPA, Attention.EAGER) else 2.0) * s.width / 2
    return s.saved_tokens * (per * s.shape.layers * s.shape.hidden + outside)


def _saved_for_images(s: RunCandidate) -> float:
    assert s.image is not None
    if image_type(s) is ImageModelType.SDXL:
        per_image = SDXL_IMAGE_BYTES[1 if s.checkpointing else 0] * (s.image.resolution / 1024) ** 2
        return s.micro * per_image
    tokens = s.micro * image_tokens(s.image.facts, s.image.resolution)
    if s.checkpointing:
        return tokens * 2.0 * s.shape.layers * s.shape.hidden
    return tokens * s.shape.layers * layer_bytes(s)


@memory_part(
    "layer at work",
    lambda s: "one layer recomputed and its gradients" if s.checkpointing else "one layer's gradients",
)
def backward_layer(s: RunCandidate) -> float:
    """During the backward pass: one layer at work, fully recomputed if it was checkpointed."""
    tokens = s.tokens
    if s.image is not None:
        if image_type(s) is ImageModelType.SDXL:
            return 0.0
        tokens = s.micro * image_tokens(s.image.facts, s.image.resolution)
    recomputed = layer_bytes(s) if s.checkpointing else 0.0
    return tokens * (recomputed + backward_work(s))


@memory_part("layer at work", "one layer in the forward pass")
def forward_layer(s: RunCandidate) -> float:
    return s.tokens * forward_work(s)


@memory_part("adapter in bf16", "autocast's copies")
def cast_adapter(s: RunCandidate) -> float:
    """Autocast keeps a bf16 copy of every fp32 adapter weight until the pass ends; without checkpointing the
    backward pass keeps them too."""
    return 2.0 * s.adapter_params / s.shards if _casts(s) else 0.0


@memory_part("logits", lambda s: _logits_reason(s, 0))
def logits(s: RunCandidate) -> float:
    """The vocabulary times the tokens whose loss is computed."""
    return _logits(s, 0)


@memory_part("logits", lambda s: _logits_reason(s, 1))
def logits_backward(s: RunCandidate) -> float:
    return _logits(s, 1)


def _logits(s: RunCandidate, direction: int) -> float:
    """`direction`: 0 forward, 1 backward."""
    if s.image is not None:
        return 0.0
    per_logit = _logit_bytes(s)[direction]
    return _loss_tokens(s) * per_logit * s.shape.vocab if per_logit else s.tokens * 10.0 * s.shape.hidden


def _logits_reason(s: RunCandidate, direction: int) -> str:
    per_logit = _logit_bytes(s)[direction]
    if not per_logit:
        return "a chunk at a time"
    return f"{_loss_tokens(s):,} tokens × {s.shape.vocab:,} × {per_logit:g} B"


def _loss_tokens(s: RunCandidate) -> int:
    if not s.task.generates:
        return s.tokens
    return s.micro * (s.completion + s.prompt_kl_tokens)


def _logit_bytes(s: RunCandidate) -> tuple[float, float]:
    if s.task.is_rl:
        return TRL_LOGIT_BYTES
    return KL_LOGIT_BYTES if s.kl else LOGIT_BYTES[s.loss]


@memory_part("head gradient", "of the output matrix")
def head_gradient(s: RunCandidate) -> float:
    """A full fine-tune computes the head's gradient first and keeps it; the fused loss computes a second."""
    if not s.full or s.image is not None:
        return 0.0
    return (2 if s.loss is LossKind.FUSED else 1) * 2.0 * s.shape.vocab_params


@memory_part("logits", lambda s: f"evaluating {s.eval_micro} × {s.length:,} tokens at once")
def evaluation_logits(s: RunCandidate) -> float:
    """Evaluation has no fused loss: the full logits are there, in bf16 and in fp32."""
    if s.image is not None:
        return 0.0
    if s.task.generates:
        tokens = s.eval_micro * s.completion
    else:
        tokens = s.eval_micro * s.length * (2 if s.task.has_pairs else 1)
    return tokens * LOGIT_BYTES[LossKind.FULL][0] * s.shape.vocab


@memory_part("kv cache", lambda s: f"{s.at_once} completions of up to {s.length:,} tokens")
def kv_cache(s: RunCandidate) -> float:
    """GRPO generates the completions of one optimizer step at once where they fit, each GPU its share."""
    cache = s.length * 2.0 * s.shape.keys * s.width
    return s.at_once * s.shape.layers * (cache + s.shape.mixer.state)


#: Tokens of a pass over prompts (`trainer/scoring/sampling.py`), and bytes of a row's logits with the copies
#: that sampling makes of them.
PROMPT_TOKENS, SAMPLED_LOGIT_BYTES = 4096, 24.0


@memory_part("generation", lambda s: f"prompts of {s.at_once} completions, sampling")
def generation_work(s: RunCandidate) -> float:
    """A pass over prompts, and the sampler's copies of one row of logits per completion. The engine's own
    generation reads the prompts of all completions in one pass."""
    prompt = max(s.length - s.completion, 1)
    tokens = s.at_once * prompt
    if s.samples_itself:
        tokens = min(tokens // s.generations, max(PROMPT_TOKENS, prompt))
    sampled = s.at_once * SAMPLED_LOGIT_BYTES * s.shape.vocab
    return tokens * 8.0 * max(s.shape.mlp, s.shape.hidden) + sampled


@memory_part("text encoders", "alone on the GPU, in bf16")
def text_encoding(s: RunCandidate) -> float:
    """The picture trainer encodes the captions before it loads the base."""
    assert s.image is not None
    return 2.0 * s.image.facts.text_encoder_params


@memory_part("latents", lambda s: f"VAE encoding {s.image.vae_batch if s.image else 0} images at once")
def latent_work(s: RunCandidate) -> float:
    """The VAE encodes the images once, before the training, `vae_batch` at a time."""
    assert s.image is not None
    facts, image = s.image.facts, s.image
    per_image = VAE_IMAGE_BYTES * (image.resolution / 1024) ** 2
    if facts.image_type is not ImageModelType.SDXL and s.engine is not Engine.PICTURES:
        per_image /= 2  # bf16; SDXL's VAE overflows in it, and the evaluator's are in fp32
    return facts.vae_params * 4 + image.vae_batch * per_image
