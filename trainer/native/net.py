"""The model, dressed for training: adapters, attention, checkpointing, and the loss inside the forward pass.

The loss belongs inside because FSDP gathers the head's weights only for as long as the forward pass of the
whole lasts, and DDP counts gradients from there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from core.choices import Attention
from core.plan import TrainingPlan
from core.recipes.native import settings_of
from trainer.errors import BadModel
from trainer.loading import forbid_code, with_attention
from trainer.native.batches import IGNORED, Batch
from trainer.native.losses import divergence, preference_losses, token_losses

log = logging.getLogger(__name__)

#: Settings of a head that is more than a matrix. Trained wrongly in silence if not asked about.
_STRANGE_HEADS = ("logit_scale", "logits_scaling", "lm_head_multiplier")


class Net(nn.Module):
    """A causal language model and the losses it is asked for."""

    #: What a nat of divergence from the base costs.
    kl = 0.0

    def __init__(self, model: nn.Module, attention: Attention) -> None:
        super().__init__()
        self.model = model
        self.attention = attention
        config: Any = plain(model).config
        self._cap: float | None = getattr(config, "final_logit_softcapping", None)

    def forward(self, batch: Batch) -> Tensor:
        """The batch's sums, of which `shares` makes the step's loss."""
        hidden, where = self._hidden(batch)
        return self._summed(hidden, where, batch).reshape(1)

    def shares(self, count: float, learned: float, device: torch.device) -> Tensor:
        """What each sum counts in the loss of batches with so many rows (or pairs, or tokens) and so many
        predictions that are learned."""
        return torch.tensor([1 / max(count, 1.0)], device=device)

    def row_sums(self, batch: Batch) -> Tensor:
        """−log p of each row's counted tokens, summed by row: what preferences are made of."""
        hidden, where = self._hidden(batch)
        rows = where.nonzero()[:, 0]
        losses = self._token_losses(hidden, where, batch)
        return torch.zeros(len(batch.ids), device=losses.device).index_add(0, rows, losses)

    def _hidden(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Of the tokens whose next one counts; and where those are."""
        where = batch.targets != IGNORED
        return self._at(self._states(self.model, batch), where), where

    def _at(self, states: Tensor, where: Tensor) -> Tensor:
        return states[where].to(self._head.dtype)

    def _states(self, model: nn.Module, batch: Batch) -> Tensor:
        decoder: Any = plain(model)
        states: Tensor = decoder.get_decoder()(
            input_ids=batch.ids, position_ids=batch.positions, use_cache=False, **self._mask(batch)
        ).last_hidden_state
        return states

    @property
    def _head(self) -> Tensor:
        return head_of(self.model)

    def _token_losses(self, hidden: Tensor, where: Tensor, batch: Batch) -> Tensor:
        return token_losses(hidden, self._head, batch.targets[where], self._cap)

    def _summed(self, hidden: Tensor, where: Tensor, batch: Batch) -> Tensor:
        losses = self._token_losses(hidden, where, batch)
        return losses.sum() if batch.weights is None else (losses * batch.weights[where]).sum()

    def _mask(self, batch: Batch) -> Mapping[str, Any]:
        """No mask at all where every document has its own row: what is after the end is never looked at, and
        plain causal attention has the fastest kernels."""
        if batch.documents is None:
            return {"attention_mask": None}
        if self.attention in (Attention.FLASH_2, Attention.FLASH_3):
            return {"attention_mask": None}  # told apart by the positions' restarts
        if self.attention is Attention.FLEX:
            return {"attention_mask": _block_mask(batch.documents)}
        same = batch.documents[:, None, :, None] == batch.documents[:, None, None, :]
        length = batch.documents.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=same.device).tril()
        seen = same & causal
        if self.attention is Attention.EAGER:  # adds its mask to the scores
            numbers = self._head.dtype
            return {"attention_mask": torch.zeros_like(seen, dtype=numbers).masked_fill(~seen, -torch.inf)}
        return {"attention_mask": seen}


class AnchoredNet(Net):
    """Tied to its base: loss + coefficient · KL(model || base), as tournaments with a KL term score.

    The base is the model without its adapters, or a frozen copy beside a full fine-tune."""

    def __init__(self, model: nn.Module, attention: Attention, kl: float, base: nn.Module | None) -> None:
        super().__init__(model, attention)
        self.kl, self.base = kl, base

    def forward(self, batch: Batch) -> Tensor:
        there = self._base_hidden(batch)
        states, where = self._states(self.model, batch), batch.targets != IGNORED
        head = self._head if self.base is None else head_of(self.base)
        apart = divergence(self._at(states, batch.labelled), self._head, there, head, self._cap)
        return torch.stack([self._summed(self._at(states, where), where, batch), apart])

    def shares(self, count: float, learned: float, device: torch.device) -> Tensor:
        """Rows weigh the same in the loss, tokens in the divergence."""
        return torch.tensor([1 / max(count, 1.0), self.kl / max(learned, 1.0)], device=device)

    @torch.no_grad()
    def _base_hidden(self, batch: Batch) -> Tensor:
        where = batch.labelled
        if self.base is not None:
            return self._states(self.base, batch)[where].to(head_of(self.base).dtype)
        was_training, dressed = self.model.training, self.model
        dressed.eval()  # the base has no dropout to be blurred by
        try:
            with dressed.disable_adapter():  # type: ignore[operator]
                return self._states(dressed, batch)[where].to(self._head.dtype)
        finally:
            dressed.train(was_training)


class PreferenceNet(Net):
    """The first half of a batch was chosen, the second rejected."""

    def __init__(self, model: nn.Module, attention: Attention, beta: float) -> None:
        super().__init__(model, attention)
        self._beta = beta

    def forward(self, batch: Batch) -> Tensor:
        if batch.reference is None:
            raise ValueError("preferences are compared with the base model's, which is not there yet")
        return preference_losses(self.preferred(batch), batch.reference, self._beta).sum().reshape(1)

    def preferred(self, batch: Batch) -> Tensor:
        """log p(chosen) − log p(rejected) of each pair, as the model is now."""
        chosen, rejected = (-self.row_sums(batch)).chunk(2)
        return chosen - rejected


def head_of(model: nn.Module) -> Tensor:
    base: Any = plain(model)
    head: Tensor = base.get_output_embeddings().weight
    return head


def plain(model: nn.Module) -> nn.Module:
    """The model under its adapters, which are woven into it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator,no-any-return]


def load(path: Path, plan: TrainingPlan, device: torch.device) -> tuple[nn.Module, Attention]:
    """The base model with the plan's adapters, in the plan's numbers, on the device."""
    model, attention = _read(path, plan, device)
    strange = [name for name in _STRANGE_HEADS if getattr(model.config, name, None) not in (None, 1, 1.0)]
    if strange or getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise BadModel(f"{path}: its head has {strange or ['a bias']}, which the native trainer leaves out")
    model = model.to(device)
    if plan.precision.gradient_checkpointing:
        recompute(model, plan)
    if plan.adapter is None:
        return model.train(), attention
    model.enable_input_require_grads()
    return with_adapters(model, plan).train(), attention


def frozen_base(path: Path, plan: TrainingPlan, device: torch.device) -> nn.Module:
    """The base once more, beside a model whose every weight is trained."""
    model: nn.Module = _read(path, plan, device)[0]
    return model.to(device).eval().requires_grad_(False)


def _read(path: Path, plan: TrainingPlan, device: torch.device) -> tuple[Any, Attention]:
    from transformers import AutoModelForCausalLM

    def load_with(attention: Attention) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            path, dtype=number_type(plan), attn_implementation=attention.value, local_files_only=True
        )

    forbid_code()
    try:
        return with_attention(load_with, available_attention(plan.precision.attention, device))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise BadModel(f"{path} cannot be loaded as a causal language model: {error}") from error


def recompute(model: Any, plan: TrainingPlan) -> None:
    """Activations are computed again in the backward pass instead of kept: those of whole layers, or of what
    is cheap in them; of every layer, or of some."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    settings = settings_of(plan)
    how: dict[str, Any] = {"use_reentrant": False}
    if settings.recompute == "cheap":
        how["context_fn"] = _selective_contexts
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
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


def with_adapters(model: nn.Module, plan: TrainingPlan) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    adapter = plan.adapter
    assert adapter is not None
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=list(adapter.target_modules) or "all-linear",
        use_rslora=adapter.rslora,
        use_dora=adapter.dora,
        bias="none",
        task_type="CAUSAL_LM",
    )
    dressed: nn.Module = get_peft_model(model, config, autocast_adapter_dtype=adapter.fp32)
    return dressed


def number_type(plan: TrainingPlan) -> torch.dtype:
    """What is computed with. A full fine-tune's fp32 weights are the optimizer's (`optimizing.Masters`)."""
    if plan.precision.bf16:
        return torch.bfloat16
    return torch.float16 if plan.precision.fp16 else torch.float32


def available_attention(wanted: Attention, device: torch.device) -> Attention:
    """The wish, or torch's own kernels, which hold a flash attention too."""
    if wanted in (Attention.FLASH_2, Attention.FLASH_3):
        from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

        there = is_flash_attn_2_available() if wanted is Attention.FLASH_2 else is_flash_attn_3_available()
        if not there:
            log.warning("%s is not installed: torch's own attention takes its place", wanted)
            return Attention.SDPA
    if wanted is Attention.FLEX and device.type != "cuda":
        log.warning("flex attention cannot train on %s: torch's own takes its place", device.type)
        return Attention.SDPA
    return wanted


def _block_mask(documents: Tensor) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def same_document(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[batch, query] == documents[batch, key])

    size, length = documents.shape
    return create_block_mask(same_document, size, None, length, length, device=str(documents.device))
