"""Changes to a trainer object that Axolotl has no hook for. Each is one function and says why it is
needed."""

from __future__ import annotations

import gc
import time
from types import MethodType
from typing import Any

from trainer.callbacks.kl import kl_of_labels
from trainer.callbacks.meter import Meter
from trainer.judges import frozen_base

#: Micro-steps between garbage collections in preference training.
COLLECT_EVERY = 100


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
    if not isinstance(inputs, dict):
        return 0
    return sum(value.numel() for key, value in inputs.items() if key.endswith("input_ids"))


def without_empty_cache(trainer: Any) -> None:
    """Axolotl's DPO trainer collects garbage and empties the CUDA cache after every micro-step, which costs
    more than a small step itself; the cache is what makes the next step's memory cheap."""
    from trl import DPOTrainer

    plain = MethodType(DPOTrainer.training_step, trainer)
    steps = 0

    def step(*arguments: Any, **named: Any) -> Any:
        nonlocal steps
        steps += 1
        loss = plain(*arguments, **named)
        if steps % COLLECT_EVERY == 0:
            gc.collect()
        return loss

    trainer.training_step = step


def add_kl(trainer: Any, coefficient: float, base_path: str) -> None:
    """Loss + coefficient · KL to the base model: what the task is scored by. A LoRA's base is the model with
    its adapter switched off; a full fine-tune keeps the base beside it."""
    plain = trainer.compute_loss
    model = trainer.accelerator.unwrap_model(trainer.model)
    base = None if hasattr(model, "disable_adapter") else frozen_base(base_path, model)

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
