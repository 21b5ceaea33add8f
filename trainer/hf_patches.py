"""Changes to a trainer object that Axolotl has no hook for. Each is one function and says why it is
needed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from trainer.callbacks.kl import kl_of_labels
from trainer.callbacks.meter import Meter


def count_tokens(trainer: Any, meter: Meter) -> None:
    """Tokens that pass through, and the time in which there was no batch to work on."""
    step, fetch = trainer.training_step, trainer.get_batch_samples

    def counted(model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        meter.tokens += tokens_in(inputs)
        return step(model, inputs, *rest, **named)

    def timed(*arguments: Any, **named: Any) -> Any:
        began = time.monotonic()
        found = fetch(*arguments, **named)
        meter.waited += time.monotonic() - began
        return found

    trainer.training_step, trainer.get_batch_samples = counted, timed


def tokens_in(inputs: Any) -> int:
    """Padding included: it is computed like everything else."""
    if not isinstance(inputs, Mapping):
        return 0
    return sum(value.numel() for key, value in inputs.items() if key.endswith("input_ids"))


def add_kl(trainer: Any, coefficient: float, base: Any) -> None:
    """Loss + coefficient · KL to the base model: what the task is scored by. `base` None: the model itself
    with its adapter switched off."""
    plain = trainer.compute_loss

    def with_kl(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        loss, outputs = plain(model, dict(inputs), return_outputs=True, num_items_in_batch=num_items_in_batch)
        if not model.training:
            return (loss, outputs) if return_outputs else loss
        asked = {key: value for key, value in inputs.items() if key != "labels"}
        kl = kl_of_labels(outputs["logits"], _base_logits(trainer, base, asked), inputs["labels"])
        loss = loss + coefficient * kl / _share(trainer, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    trainer.compute_loss = with_kl


def _share(trainer: Any, num_items_in_batch: Any) -> float:
    """Where the engine sums the losses of a step's micro-batches instead of averaging them, so must this."""
    if trainer.model_accepts_loss_kwargs and num_items_in_batch is not None:
        return float(trainer.current_gradient_accumulation_steps)
    return 1.0


def _base_logits(trainer: Any, base: Any, inputs: dict[str, Any]) -> Any:
    import torch

    with torch.no_grad():
        if base is not None:
            return base(**inputs).logits
        model = trainer.accelerator.unwrap_model(trainer.model)
        with model.disable_adapter():
            return model(**inputs).logits
