"""What Axolotl's micro-batches hold.

Pairs of a step that are of like length pass together. And while Axolotl trains, passes can become smaller:
each micro-batch of its loader in parts whose losses add up to the whole's. Loader, accumulation, optimizer
and schedule do not notice; a larger pass would need another loader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

from core.planning.plan import TrainingPlan
from core.runs.control import even_micro
from trainer.inputs.tables import PAIR_COLUMNS
from trainer.session.control import MicroChange
from trainer.session.step_order import StepOrder

#: TRL's losses of preferences that look at more than one pair at a time.
_WHOLE_BATCH_LOSSES = {"aot", "aot_unpaired", "bco_pair", "sft"}


class MicroBatchSplitter:
    def __init__(self, trainer: Any, plan: TrainingPlan) -> None:
        """From now on the trainer's steps go through here. To be made before anything else wraps its loss."""
        self._trainer, self._plan = trainer, plan
        self._pairs = plan.task.task_type.has_pairs
        self._most = plan.batch.micro
        #: Of the loader's largest micro-batch so far.
        self._rows = 0
        #: The loader's micro-batch, while a part of it is computed.
        self._whole: Mapping[str, Any] | None = None
        self._step, self._loss = trainer.training_step, trainer.compute_loss
        trainer.training_step, trainer.compute_loss = self._split_step, self._partial_loss

    def regroup(self, micro: int | None) -> MicroChange:
        planned = self._plan.batch.micro
        wanted = planned if micro is None else micro
        refusal = self._refusal(wanted) if wanted != self._most else ""
        if not refusal:
            self._most = even_micro(planned, wanted)
        return MicroChange(self._most, refusal)

    def _refusal(self, wanted: int) -> str:
        planned, trainer = self._plan.batch.micro, self._trainer
        if self._plan.task.task_type.generates:
            return "rewards are compared within a whole micro-batch, which cannot be split while it runs"
        if wanted > planned:
            return f"Axolotl's loader makes micro-batches of {planned}, not of {wanted}"
        if self._rows < planned:
            return f"{planned} sequences are packed into {self._rows} row, which cannot be split"
        if getattr(trainer.model.config, "output_router_logits", False):
            return "the experts' balance is part of the loss, and measured by micro-batch"
        if not _WHOLE_BATCH_LOSSES.isdisjoint(getattr(trainer, "loss_types", ())):
            return f"the loss {', '.join(trainer.loss_types)} is one of whole micro-batches"
        return ""

    def _split_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        rows = self._count(inputs)
        self._rows = max(self._rows, rows)
        passes = -(-rows // self._most)
        if passes <= 1:
            return self._step(model, inputs, num_items_in_batch)
        total: Any = 0.0
        self._whole = inputs
        try:
            for number, part in enumerate(self._parts(inputs, rows, passes), start=1):
                with self._unsynced(model) if number < passes else nullcontext():
                    total = total + self._step(model, part, num_items_in_batch)
        finally:
            self._whole = None
        return total

    def _count(self, inputs: Any) -> int:
        """Rows, or pairs. Of rewards there is a list of prompts, which is left alone."""
        if not isinstance(inputs, Mapping) or self._plan.task.task_type.generates:
            return 0
        rows = len(inputs["input_ids"])
        return rows // 2 if self._pairs else rows

    def _parts(self, inputs: Mapping[str, Any], rows: int, passes: int) -> Iterator[dict[str, Any]]:
        """With the whole's padding. Of pairs all chosen rows come first, then all rejected ones."""
        import torch

        def cut(value: Any, start: int, end: int) -> Any:
            if not isinstance(value, torch.Tensor) or not value.ndim:
                return value
            if self._pairs and len(value) == 2 * rows:
                return torch.cat([value[start:end], value[rows + start : rows + end]])
            return value[start:end]

        for start, end in pairwise(number * rows // passes for number in range(passes + 1)):
            yield {key: cut(value, start, end) for key, value in inputs.items()}

    def _unsynced(self, model: Any) -> AbstractContextManager[None]:
        """Gradients travel with the last part. Those of a sharded model travel with each: the whole ones may
        not fit."""
        if self._trainer.is_fsdp_enabled:
            return nullcontext()
        context: AbstractContextManager[None] = self._trainer.accelerator.no_sync(model)
        return context

    def _partial_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self._whole is None:
            return self._loss(model, inputs, return_outputs, num_items_in_batch)
        share = self._loss_share(inputs, num_items_in_batch)
        loss, outputs = self._loss(model, inputs, True, num_items_in_batch)
        return (loss * share, outputs) if return_outputs else loss * share

    def _loss_share(self, inputs: Mapping[str, Any], num_items_in_batch: Any) -> Any:
        """What the part's loss is to be multiplied by: 1 where the engine divides a sum by all labels of the
        step."""
        assert self._whole is not None
        if self._pairs:
            return len(inputs["input_ids"]) / len(self._whole["input_ids"])
        if self._trainer.model_accepts_loss_kwargs and num_items_in_batch is not None:
            return 1.0
        # A position's label is the next one's: the first is never learned.
        return _learned(inputs["labels"][:, 1:]) / _learned(self._whole["labels"][:, 1:])

    def label_share(self, labels: Any) -> Any:
        """The part's share of the whole's labels; 1 where nothing is split."""
        return 1.0 if self._whole is None else _learned(labels) / _learned(self._whole["labels"])


def order_steps(trainer: Any, plan: TrainingPlan) -> None:
    """From now on pairs of a step that are of like length pass together, where the engine would take them at
    random. Not texts: Axolotl takes the mean over each pass's labels, and those of short passes would weigh
    more."""
    args = trainer.args
    passes, micro = args.gradient_accumulation_steps, args.train_batch_size
    dealt = args.accelerator_config.split_batches or args.accelerator_config.dispatch_batches
    alone = (
        _WHOLE_BATCH_LOSSES.isdisjoint(getattr(trainer, "loss_types", ())) and not trainer.aux_loss_enabled
    )
    if 1 in (passes, micro) or not alone or dealt or args.train_sampling_strategy != "random":
        return

    def sampler(dataset: Any = None) -> StepOrder:
        """Of the rows that are trained on now: in the last stretch they are others."""
        lengths = _pair_lengths(trainer.train_dataset)
        return StepOrder(
            lengths, micro, passes, args.world_size, plan.seed, lambda: int(trainer.state.epoch or 0)
        )

    trainer._get_train_sampler = sampler


def _pair_lengths(pairs: Any) -> Any:
    """Of each pair's longer side."""
    import numpy as np
    from pyarrow import compute

    def counted(name: str) -> Any:
        column = pairs.select_columns([name]).with_format("arrow")[:][name]
        return compute.list_value_length(column).to_numpy().astype(np.int64)

    prompts, chosen, rejected = map(counted, PAIR_COLUMNS)
    return prompts + np.maximum(chosen, rejected)


def _learned(labels: Any) -> Any:
    return (labels != -100).sum().clamp(min=1)
