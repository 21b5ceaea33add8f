"""The contents of Axolotl's micro-batches.

Pairs of a step that are of like length pass together. While Axolotl trains, passes can become smaller: each
micro-batch of its loader is cut into parts whose losses add up to the whole's, between rows or, in a row of
several packed sequences, between documents. They can also become larger: the loader's micro-batches of a step
are held back, joined, and shared out over fewer passes. Loader, accumulation,
optimizer and schedule do not notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

from core.planning.plan import TrainingPlan
from core.runs.run_files import even_micro
from trainer.inputs.tables import PAIR_COLUMNS
from trainer.inputs.tokens import IGNORED
from trainer.session.control import MicroChange, release_memory
from trainer.session.failures import is_oom
from trainer.session.step_order import StepOrder

#: TRL's losses of preferences that look at more than one pair at a time.
_WHOLE_BATCH_LOSSES = {"aot", "aot_unpaired", "bco_pair", "sft"}
#: Tokens of a filler pass, which does not count.
_FILLER = 8


class MicroBatchSplitter:
    def __init__(self, trainer: Any, plan: TrainingPlan) -> None:
        """From now on the trainer's steps go through here. To be made before anything else wraps its loss."""
        self._trainer, self._plan = trainer, plan
        self._pairs = plan.task.task_type.has_pairs
        self._planned = self._most = plan.batch.micro
        #: Of the loader's largest micro-batch so far.
        self._rows = 0
        #: Micro-batches of this step that wait for its last one, if passes are larger than planned.
        self._held: list[Mapping[str, Any]] = []
        #: The batch whose parts are being computed: one micro-batch, or several joined.
        self._whole: Mapping[str, Any] | None = None
        self._joined = 1
        self._is_filler = False
        #: Called with the size of a pass after memory ran out in a larger one.
        self.on_undone: Callable[[int], None] = lambda micro: None
        self._step, self._loss = trainer.training_step, trainer.compute_loss
        trainer.training_step, trainer.compute_loss = self._split_step, self._partial_loss

    def regroup(self, micro: int | None) -> MicroChange:
        wanted = self._planned if micro is None else micro
        refusal = self._refusal(wanted) if wanted != self._most else ""
        if not refusal:
            step = self._planned * (self._plan.batch.accumulation if wanted > self._planned else 1)
            self._most = even_micro(step, wanted)
        return MicroChange(self._most, refusal)

    def _refusal(self, wanted: int) -> str:
        planned, trainer = self._planned, self._trainer
        if self._plan.task.task_type.generates:
            return "rewards are compared within a whole micro-batch, which cannot be split while it runs"
        if self._rows < planned:
            return f"{planned} sequences come in {self._rows} row, without the places where they begin"
        if getattr(trainer.model.config, "output_router_logits", False):
            return "the experts' balance is part of the loss, and measured by micro-batch"
        if not _WHOLE_BATCH_LOSSES.isdisjoint(getattr(trainer, "loss_types", ())):
            return f"the loss {', '.join(trainer.loss_types)} is one of whole micro-batches"
        return self._growth_refusal(wanted) if wanted > planned else ""

    def _growth_refusal(self, wanted: int) -> str:
        planned, step = self._planned, self._planned * self._plan.batch.accumulation
        if even_micro(step, wanted) <= planned:
            return f"a step's {step} sequences take {step // planned} passes of {planned} either way"
        if self._plan.task.kl_coefficient:
            return "the divergence from the base is measured by micro-batch"
        if not (self._pairs or self._plan.sequence.packing or self._trainer.model_accepts_loss_kwargs):
            return "the loss is a mean over each micro-batch, and unpacked ones differ in their labels"
        return ""

    def _split_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self._rows = max(self._rows, self._count(inputs))
        if self._most > self._planned:
            return self._joined_step(model, inputs, num_items_in_batch)
        return self._in_parts(model, [inputs], num_items_in_batch)

    def _joined_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        """Hold micro-batches back until the step's last one. If memory runs out, nothing of the step counts
        yet: it is repeated in passes as planned. With several processes the others would wait for ever."""
        import torch

        self._held.append(inputs)
        if not self._trainer.accelerator.sync_gradients:
            return torch.zeros((), device=self._trainer.args.device)
        held, self._held = self._held, []
        try:
            return self._in_parts(model, held, num_items_in_batch)
        except (RuntimeError, MemoryError) as error:
            if self._trainer.args.world_size > 1 or not is_oom(error):
                raise
        model.zero_grad()
        release_memory()
        self._most = self._planned
        self.on_undone(self._most)
        return sum(self._in_parts(model, [batch], num_items_in_batch) for batch in held)

    def _in_parts(self, model: Any, batches: Sequence[Any], num_items_in_batch: Any) -> Any:
        rows = sum(map(self._count, batches))
        passes = -(-rows // self._most)
        if passes <= 1 and len(batches) == 1:
            return self._step(model, batches[0], num_items_in_batch)
        total: Any = 0.0
        self._whole, self._joined = self._join(batches), len(batches)
        try:
            for number, part in enumerate(self._parts(self._whole, rows, passes), start=1):
                with self._unsynced(model) if number < passes else nullcontext():
                    total = total + self._step(model, part, num_items_in_batch)
        finally:
            self._whole, self._joined, self._is_filler = None, 1, False
        return total

    def _count(self, inputs: Any) -> int:
        """Count sequences, or pairs. GRPO has a list of prompts, which is left alone."""
        if not isinstance(inputs, Mapping) or self._plan.task.task_type.generates:
            return 0
        if self._is_packed(inputs):
            return self._planned
        rows = len(inputs["input_ids"])
        return rows // 2 if self._pairs else rows

    def _is_packed(self, inputs: Mapping[str, Any]) -> bool:
        """Return True if all sequences of the micro-batch are one row, as for attention of variable
        lengths."""
        positions = inputs.get("position_ids")
        if self._pairs or positions is None or "labels" not in inputs:
            return False
        return len(inputs["input_ids"]) == 1 and positions.ndim == 2 and self._plan.sequence.packing

    def _join(self, batches: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        import torch

        if len(batches) == 1:
            return batches[0]
        if self._is_packed(batches[0]):
            # A row's first token is not predicted, least of all by the row before it.
            for batch in batches[1:]:
                batch["labels"][:, 0] = IGNORED
            keys = [key for key, value in batches[0].items() if _is_row(value)]
            return dict(batches[0]) | {key: torch.cat([batch[key] for batch in batches], 1) for key in keys}
        return {
            key: self._stacked(key, [batch[key] for batch in batches], len(batches[0]["input_ids"]))
            for key in batches[0]
        }

    def _stacked(self, key: str, values: Sequence[Any], rows: int) -> Any:
        """Join rows of several micro-batches, padded to the widest. `rows` are the first one's."""
        import torch

        if not isinstance(values[0], torch.Tensor) or not values[0].ndim:
            return values[0]
        if values[0].ndim == 2:
            widest, pad = max(value.shape[1] for value in values), IGNORED if key == "labels" else 0
            values = [
                torch.nn.functional.pad(value, (0, widest - value.shape[1]), value=pad) for value in values
            ]
            if self._pairs and len(values[0]) == rows:  # all chosen ones come first
                halves = [value.chunk(2) for value in values]
                values = [half[side] for side in (0, 1) for half in halves]
        return torch.cat(list(values))

    def _parts(self, inputs: Mapping[str, Any], rows: int, passes: int) -> Iterator[dict[str, Any]]:
        """With the whole's padding. Of pairs all chosen rows come first, then all rejected ones."""
        import torch

        if self._is_packed(inputs):
            yield from self._parts_of_row(inputs, passes)
            return

        def cut(value: Any, start: int, end: int) -> Any:
            if not isinstance(value, torch.Tensor) or not value.ndim:
                return value
            if self._pairs and len(value) == 2 * rows:
                return torch.cat([value[start:end], value[rows + start : rows + end]])
            return value[start:end]

        for start, end in pairwise(number * rows // passes for number in range(passes + 1)):
            yield {key: cut(value, start, end) for key, value in inputs.items()}

    def _parts_of_row(self, inputs: Mapping[str, Any], passes: int) -> Iterator[dict[str, Any]]:
        """Cut a packed row into parts of like length, of whole documents. If there are too few, filler passes
        follow, which do not count: ranks that share a model must all make the same number."""
        places = cut_places(_borders(inputs), inputs["input_ids"].shape[1], passes)
        for start, end in pairwise(places):
            yield {key: value[:, start:end] if _is_row(value) else value for key, value in inputs.items()}
        self._is_filler = True
        filler = {key: value[:, :_FILLER] if _is_row(value) else value for key, value in inputs.items()}
        for _ in range(passes + 1 - len(places)):
            # A mean over no labels would be NaN.
            yield {**filler, "labels": filler["input_ids"]}

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
        """Return the factor of a part's loss: 1 if the engine divides a sum by all labels of the step. Else
        it divides each micro-batch's mean by their number; joined ones count as one mean over all their
        labels."""
        assert self._whole is not None
        if self._is_filler:
            return 0.0
        if self._pairs:
            return self._joined * len(inputs["input_ids"]) / len(self._whole["input_ids"])
        if self._trainer.model_accepts_loss_kwargs and num_items_in_batch is not None:
            return 1.0
        # A position's label is the next one's: the first is never learned.
        part, whole = _learned(inputs["labels"][:, 1:]), _learned(self._whole["labels"][:, 1:])
        return self._joined * part / whole

    def label_share(self, labels: Any) -> Any:
        """Return the part's share of the micro-batch's labels; 1 if nothing is split."""
        if self._is_filler:
            return 0.0
        return 1.0 if self._whole is None else _learned(labels) / _learned(self._whole["labels"])


def _is_row(value: Any) -> bool:
    """Return True for a tensor with a value for each token of a packed row."""
    return getattr(value, "ndim", 0) == 2 and len(value) == 1


def _borders(inputs: Mapping[str, Any]) -> list[int]:
    """Return the places where a packed row's documents begin, except those whose first token is learned: a
    cut would lose it. Padding, which has no labels, goes with the document before it: a mean over it would be
    NaN."""
    import torch

    begins, learned = inputs["position_ids"][0] == 0, inputs["labels"][0] != IGNORED
    document = begins.cumsum(0)
    begins = begins & ~learned & torch.isin(document, document[learned])
    return [int(place) for place in begins.nonzero().flatten().tolist() if place]


def cut_places(borders: Sequence[int], length: int, passes: int) -> list[int]:
    """Return cuts from 0 to `length`, at the borders nearest to equal shares; fewer if borders are too
    few."""
    places = [0]
    for number in range(1, passes):
        later = [border for border in borders if border > places[-1]]
        if later:
            places.append(min(later, key=lambda border: abs(border - number * length / passes)))
    return [*places, length]


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
        lengths = _pair_lengths(trainer.train_dataset)
        return StepOrder(
            lengths, micro, passes, args.world_size, plan.targets.seed, lambda: int(trainer.state.epoch or 0)
        )

    trainer._get_train_sampler = sampler


def _pair_lengths(pairs: Any) -> Any:
    """Return the length of each pair's longer side."""
    import numpy as np
    from pyarrow import compute

    def counted(name: str) -> Any:
        column = pairs.select_columns([name]).with_format("arrow")[:][name]
        return compute.list_value_length(column).to_numpy().astype(np.int64)

    prompts, chosen, rejected = map(counted, PAIR_COLUMNS)
    return prompts + np.maximum(chosen, rejected)


def _learned(labels: Any) -> Any:
    return (labels != IGNORED).sum().clamp(min=1)
