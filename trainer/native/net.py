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
from core.errors import GodMinerError
from core.plan import TrainingPlan
from trainer.native.batches import IGNORED, Batch
from trainer.native.losses import preference_losses, token_losses

log = logging.getLogger(__name__)

#: Settings of a head that is more than a matrix. Trained wrongly in silence if not asked about.
_STRANGE_HEADS = ("logit_scale", "logits_scaling", "lm_head_multiplier")


class BadModel(GodMinerError):
    """A model that cannot be loaded, or that this trainer would train wrongly."""

    code = "bad_model"


class Net(nn.Module):
    """A causal language model and the losses it is asked for."""

    def __init__(self, model: nn.Module, attention: Attention) -> None:
        super().__init__()
        self.model = model
        self.attention = attention
        config: Any = plain(model).config
        self._cap: float | None = getattr(config, "final_logit_softcapping", None)

    def forward(self, batch: Batch) -> Tensor:
        """The summed loss, to be divided by the counts of all batches of the step."""
        losses, where = self._token_losses(batch)
        return losses.sum() if batch.weights is None else (losses * batch.weights[where]).sum()

    def row_sums(self, batch: Batch) -> Tensor:
        """−log p of each row's counted tokens, summed by row: what preferences are made of."""
        losses, where = self._token_losses(batch)
        rows = where.nonzero()[:, 0]
        return torch.zeros(len(batch.ids), device=losses.device).index_add(0, rows, losses)

    def _token_losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        base: Any = plain(self.model)
        hidden = base.get_decoder()(
            input_ids=batch.ids, position_ids=batch.positions, use_cache=False, **self._mask(batch)
        ).last_hidden_state
        where = batch.targets != IGNORED
        head = base.get_output_embeddings().weight
        return token_losses(hidden[where].to(head.dtype), head, batch.targets[where], self._cap), where

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
        return {"attention_mask": same & causal}


class PreferenceNet(Net):
    """The first half of a batch was chosen, the second rejected."""

    def __init__(self, model: nn.Module, attention: Attention, beta: float) -> None:
        super().__init__(model, attention)
        self._beta = beta

    def forward(self, batch: Batch) -> Tensor:
        if batch.reference is None:
            raise ValueError("preferences are compared with the base model's, which is not there yet")
        return preference_losses(self.preferred(batch), batch.reference, self._beta).sum()

    def preferred(self, batch: Batch) -> Tensor:
        """log p(chosen) − log p(rejected) of each pair, as the model is now."""
        chosen, rejected = (-self.row_sums(batch)).chunk(2)
        return chosen - rejected


def plain(model: nn.Module) -> nn.Module:
    """The model under its adapters, which are woven into it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator,no-any-return]


def load(path: Path, plan: TrainingPlan, device: torch.device) -> tuple[nn.Module, Attention]:
    """The base model with the plan's adapters, in the plan's numbers, on the device."""
    from transformers import AutoModelForCausalLM

    attention = available_attention(plan.precision.attention, device)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=number_type(plan), attn_implementation=attention.value, local_files_only=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise BadModel(f"{path} cannot be loaded as a causal language model: {error}") from error
    strange = [name for name in _STRANGE_HEADS if getattr(model.config, name, None) not in (None, 1, 1.0)]
    if strange or getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise BadModel(f"{path}: its head has {strange or ['a bias']}, which the native trainer leaves out")
    model = model.to(device)
    if plan.precision.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if plan.adapter is None:
        return model.train(), attention
    model.enable_input_require_grads()
    return with_adapters(model, plan).train(), attention


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
