"""The model with its adapters, attention and checkpointing, and its losses inside the forward pass.

The logits of a whole batch never exist: a token's loss is computed chunk by chunk.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from core.domain.choices import Attention
from core.planning.plan import TrainingPlan
from core.recipes.native import settings_of
from trainer.errors import BadModel
from trainer.inputs.model_loading import NEXT_ATTENTION, block_gpu_kernels, forbid_remote_code, with_attention
from trainer.inputs.state_space import use_fast_scan
from trainer.inputs.tokens import IGNORED
from trainer.native.batches import TokenBatch
from trainer.native.sharded_loading import put_stand_ins, reading_in_shards

log = logging.getLogger(__name__)

#: fp32 logits in memory at a time.
CHUNK_BYTES = 256 * 2**20
#: Bytes of logits that are kept for the backward pass, at most.
KEPT_BYTES = 128 * 2**20


def token_losses(hidden: Tensor, head: Tensor, targets: Tensor, cap: float | None = None) -> Tensor:
    """−log p of each target, fp32, differentiable in `hidden` and `head`.

    `hidden` is (tokens, width), `head` (vocabulary, width); `cap` is Gemma's soft cap on logits."""
    size = 4 * hidden.shape[0] * head.shape[0]
    if size <= KEPT_BYTES:
        return F.cross_entropy(_capped(hidden @ head.T, cap).float(), targets, reduction="none")
    losses: Tensor = _ChunkedLosses.apply(hidden, head, targets, cap)
    return losses


class _ChunkedLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, cap: float | None) -> Tensor:
        normalizer = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        losses = torch.empty_like(normalizer)
        for part in _loss_parts(len(hidden), head.shape[0]):
            logits = _capped(hidden[part] @ head.T, cap).float()
            normalizer[part] = logits.logsumexp(-1)
            losses[part] = normalizer[part] - logits.gather(-1, targets[part, None]).squeeze(-1)
        ctx.save_for_backward(hidden, head, targets, normalizer)
        ctx.cap = cap
        return losses

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, head, targets, normalizer = ctx.saved_tensors
        (weight,) = incoming
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        hidden_grad = torch.empty_like(hidden) if wants_hidden else None
        # Summed over chunks: in fp32, or the small ones are rounded away.
        head_grad = torch.zeros(head.shape, dtype=torch.float32, device=head.device) if wants_head else None
        for part in _loss_parts(len(hidden), head.shape[0]):
            raw = hidden[part] @ head.T
            logits = _capped(raw, ctx.cap).float()
            delta = (logits - normalizer[part, None]).exp_()
            delta.scatter_add_(-1, targets[part, None], -torch.ones_like(delta[:, :1]))
            delta *= weight[part, None]
            if ctx.cap is not None:
                delta *= 1 - (logits / ctx.cap) ** 2
            small = delta.to(hidden.dtype)
            if hidden_grad is not None:
                hidden_grad[part] = small @ head
            if head_grad is not None:
                head_grad += (small.T @ hidden[part]).float()
        return hidden_grad, None if head_grad is None else head_grad.to(head.dtype), None, None


def divergence(
    hidden: Tensor, head: Tensor, base_hidden: Tensor, base_head: Tensor, cap: float | None = None
) -> Tensor:
    """KL(here || there) of the next token's distribution, summed over the tokens, differentiable in what is
    here. Chunk by chunk, and the logits again in the backward pass."""
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for part in _loss_parts(len(hidden), 2 * head.shape[0]):
        chunk = checkpoint(
            _divergence_of_chunk, hidden[part], head, base_hidden[part], base_head, cap, use_reentrant=False
        )
        total = total + chunk
    return total


def _divergence_of_chunk(
    hidden: Tensor, head: Tensor, base_hidden: Tensor, base_head: Tensor, cap: float | None
) -> Tensor:
    model_log_p = _capped(hidden @ head.T, cap).float().log_softmax(-1)
    with torch.no_grad():
        base_log_p = _capped(base_hidden @ base_head.T, cap).float().log_softmax(-1)
    return F.kl_div(base_log_p, model_log_p, reduction="sum", log_target=True)


def preference_losses(preferred: Tensor, reference: Tensor, beta: float) -> Tensor:
    """DPO's sigmoid loss per pair; both are log p(chosen) − log p(rejected), the model's and the base's."""
    return -F.logsigmoid(beta * (preferred - reference))


def _loss_parts(tokens: int, vocabulary: int) -> list[slice]:
    size = max(CHUNK_BYTES // (4 * vocabulary), 1)
    return [slice(start, start + size) for start in range(0, tokens, size)]


def _capped(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else cap * torch.tanh(logits / cap)


#: Settings by which logits are multiplied after the head, or divided (-1), by the architecture's first word.
_FACTORS = {
    "cohere": ("logit_scale", 1),
    "cohere2": ("logit_scale", 1),
    "falcon": ("lm_head_multiplier", 1),
    "granite": ("logits_scaling", -1),
    "granitemoe": ("logits_scaling", -1),
    "granitemoehybrid": ("logits_scaling", -1),
    "granitemoeshared": ("logits_scaling", -1),
}


def head_factor(model: nn.Module) -> float:
    """Return the factor on logits after the head. `BadModel` for a head that is more than a matrix and a
    factor: it would be trained wrongly in silence."""
    base: Any = without_adapters(model)
    known, power = _FACTORS.get(base.config.model_type.partition("_")[0], ("", 1))
    factor = float(getattr(base.config, known, None) or 1.0) ** power
    scaled = [name for name, _ in _FACTORS.values() if getattr(base.config, name, None) not in (None, 1, 1.0)]
    unknown = sorted({*scaled} - {known})
    if unknown or getattr(base.get_output_embeddings(), "bias", None) is not None:
        raise BadModel(f"its head has {', '.join(unknown) or 'a bias'}, which the native trainer leaves out")
    return factor


class LossModel(nn.Module):
    """A causal language model with its losses."""

    #: What a nat of divergence from the base costs.
    kl = 0.0

    def __init__(self, model: nn.Module, attention: Attention) -> None:
        super().__init__()
        self.model = model
        self.attention = attention
        config: Any = without_adapters(model).config
        self._cap: float | None = getattr(config, "final_logit_softcapping", None)
        self._factor = head_factor(model)

    def forward(self, batch: TokenBatch) -> Tensor:
        """The batch's sums, of which `shares` makes the step's loss."""
        hidden, where = self._hidden(batch)
        return self._summed(hidden, where, batch).reshape(1)

    def shares(self, count: float, learned: float, device: torch.device) -> Tensor:
        """Return the factor of each sum in the loss of batches with this many rows (or pairs, or tokens) and
        learned predictions."""
        return torch.tensor([1 / max(count, 1.0)], device=device)

    def row_sums(self, batch: TokenBatch) -> Tensor:
        """−log p of each row's counted tokens, summed by row: what preferences are made of."""
        hidden, where = self._hidden(batch)
        rows = where // batch.ids.shape[1]
        losses = self._token_losses(hidden, where, batch)
        return torch.zeros(len(batch.ids), device=losses.device).index_add(0, rows, losses)

    def _hidden(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return hidden states of the tokens whose next one counts, and their positions."""
        where = places(batch.targets != IGNORED)
        return self._at(self._states(self.model, batch), where), where

    def _at(self, states: Tensor, where: Tensor) -> Tensor:
        chosen = states.flatten(0, 1).index_select(0, where)
        return (chosen if self._factor == 1 else chosen * self._factor).to(self._head.dtype)

    def _states(self, model: nn.Module, batch: TokenBatch) -> Tensor:
        """No mask is made here: what is after a row's end is never looked at, and from positions that begin
        again transformers makes the masks that keep packed rows apart, with each layer's own window. Flash
        attention looks for such positions in a batch of one only."""
        ids, positions = batch.ids, batch.positions
        if positions is not None and self.attention in (Attention.FLASH_2, Attention.FLASH_3):
            ids, positions = ids.reshape(1, -1), positions.reshape(1, -1)
        decoder: Any = without_adapters(model)
        states: Tensor = decoder.get_decoder()(
            input_ids=ids, position_ids=positions, use_cache=False
        ).last_hidden_state
        return states.reshape(*batch.ids.shape, -1)

    @property
    def _head(self) -> Tensor:
        return head_of(self.model)

    def _token_losses(self, hidden: Tensor, where: Tensor, batch: TokenBatch) -> Tensor:
        return token_losses(hidden, self._head, batch.targets.flatten()[where], self._cap)

    def _summed(self, hidden: Tensor, where: Tensor, batch: TokenBatch) -> Tensor:
        losses = self._token_losses(hidden, where, batch)
        return losses.sum() if batch.weights is None else (losses * batch.weights.flatten()[where]).sum()


class KlLossModel(LossModel):
    """Tied to its base: loss + coefficient · KL(model || base), as tournaments with a KL term score.

    The base is the model without its adapters, or a frozen copy beside a full fine-tune."""

    def __init__(self, model: nn.Module, attention: Attention, kl: float, base: nn.Module | None) -> None:
        super().__init__(model, attention)
        self.kl, self.base = kl, base

    def forward(self, batch: TokenBatch) -> Tensor:
        labelled, where = places(batch.labelled), places(batch.targets != IGNORED)
        base_hidden = self._at(self._base_states(batch), labelled)
        states = self._states(self.model, batch)
        head = self._head if self.base is None else head_of(self.base)
        kl = divergence(self._at(states, labelled), self._head, base_hidden, head, self._cap)
        return torch.stack([self._summed(self._at(states, where), where, batch), kl])

    def shares(self, count: float, learned: float, device: torch.device) -> Tensor:
        """Rows weigh the same in the loss, tokens in the divergence."""
        return torch.tensor([1 / max(count, 1.0), self.kl / max(learned, 1.0)], device=device)

    @torch.no_grad()
    def _base_states(self, batch: TokenBatch) -> Tensor:
        if self.base is not None:
            return self._states(self.base, batch)
        was_training, with_adapter = self.model.training, self.model
        with_adapter.eval()  # the base has no dropout to be blurred by
        try:
            with with_adapter.disable_adapter():  # type: ignore[operator]
                return self._states(with_adapter, batch)
        finally:
            with_adapter.train(was_training)


class DpoLossModel(LossModel):
    """The first half of a batch was chosen, the second rejected."""

    def __init__(self, model: nn.Module, attention: Attention, beta: float) -> None:
        super().__init__(model, attention)
        self._beta = beta

    def forward(self, batch: TokenBatch) -> Tensor:
        if batch.reference is None:
            raise ValueError("preferences are compared with the base model's, which is not there yet")
        return preference_losses(self.preferred(batch), batch.reference, self._beta).sum().reshape(1)

    def preferred(self, batch: TokenBatch) -> Tensor:
        """log p(chosen) − log p(rejected) of each pair, as the model is now."""
        chosen, rejected = (-self.row_sums(batch)).chunk(2)
        return chosen - rejected


def places(mask: Tensor) -> Tensor:
    """Return the positions where a flattened mask is true. A GPU finishes the queued work before it says how
    many there are: call this before the model's pass."""
    return mask.flatten().nonzero()[:, 0]


def head_of(model: nn.Module) -> Tensor:
    base: Any = without_adapters(model)
    head: Tensor = base.get_output_embeddings().weight
    return head


def without_adapters(model: nn.Module) -> nn.Module:
    """The model under its adapters, which are woven into it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator,no-any-return]


class LoadedModel(NamedTuple):
    model: nn.Module
    attention: Attention


def load_model(
    path: Path, plan: TrainingPlan, device: torch.device, mesh: DeviceMesh | None = None
) -> LoadedModel:
    """Return the base model with the plan's adapters, in the plan's formats, on the device. With a `mesh`
    this process reads its shards, and `distributed.shard` must follow."""
    model, attention = _load_pretrained(path, plan, device, mesh)
    head_factor(model)
    if plan.precision.gradient_checkpointing:
        enable_checkpointing(model, plan)
    if plan.adapter is None:
        return LoadedModel(model.train(), attention)
    from trainer.native.lora import add_adapters  # PEFT takes two seconds to import

    return LoadedModel(add_adapters(model, plan).train(), attention)


def frozen_base(
    path: Path, plan: TrainingPlan, device: torch.device, mesh: DeviceMesh | None = None
) -> nn.Module:
    """The base once more, beside a model whose every weight is trained."""
    model: nn.Module = _load_pretrained(path, plan, device, mesh)[0]
    return model.eval().requires_grad_(False)


def _load_pretrained(
    path: Path, plan: TrainingPlan, device: torch.device, mesh: DeviceMesh | None
) -> tuple[Any, Attention]:
    from transformers import AutoModelForCausalLM

    def load_with(attention: Attention) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            path, dtype=compute_dtype(plan), attn_implementation=attention.value, local_files_only=True
        )

    forbid_remote_code()
    block_gpu_kernels(not plan.conditions.workarounds.no_state_kernels)
    try:
        with reading_in_shards(mesh):
            model, attention = with_attention(
                load_with, available_attention(plan.precision.attention, device)
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise BadModel(f"{path} cannot be loaded as a causal language model: {error}") from error
    use_fast_scan(model)
    if mesh is None:
        return model.to(device), attention
    put_stand_ins(model, device)
    return model, attention


def enable_checkpointing(model: Any, plan: TrainingPlan) -> None:
    """Activations are computed again in the backward pass instead of kept: those of whole layers, or of what
    is cheap in them; of every layer, or of some."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    settings = settings_of(plan)
    options: dict[str, Any] = {"use_reentrant": False}
    if settings.recompute == "cheap":
        options["context_fn"] = _selective_contexts
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = number % settings.recompute_every == 0


def _selective_contexts() -> Any:
    """Results of matrix products and of attention are kept: they are most of the time and little of the
    memory."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    kept = {
        aten.mm.default,
        aten.addmm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_mm.default,
    }

    def policy(context: Any, operation: Any, *arguments: Any, **named: Any) -> Any:
        if operation in kept:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def compute_dtype(plan: TrainingPlan) -> torch.dtype:
    """Return the format of computation. A full fine-tune's fp32 weights are the optimizer's
    (`optimizer.MasterWeights`)."""
    if plan.precision.bf16:
        return torch.bfloat16
    return torch.float16 if plan.precision.fp16 else torch.float32


def available_attention(wanted: Attention, device: torch.device) -> Attention:
    """The wish, or what comes after it: torch's own kernels in the end, which hold a flash attention too."""
    if wanted in (Attention.FLASH_2, Attention.FLASH_3):
        from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

        installed = (
            is_flash_attn_2_available() if wanted is Attention.FLASH_2 else is_flash_attn_3_available()
        )
        if not installed:
            following = NEXT_ATTENTION[wanted]
            log.warning("%s is not installed: %s takes its place", wanted, following)
            return available_attention(following, device)
    if wanted is Attention.FLEX and device.type != "cuda":
        log.warning("flex attention cannot train on %s: torch's own takes its place", device.type)
        return Attention.SDPA
    return wanted
