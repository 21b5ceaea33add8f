"""Training on held-out rows at the end, with the engine's own loader and steps; see
`trainer.session.last_stretch`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from core.planning.plan import TrainingPlan
from trainer.axolotl.host import step_of_engine
from trainer.axolotl.scorers import HeldOutScorer
from trainer.handoff import LaunchSpec
from trainer.scoring.held_out import LogProbs
from trainer.session.ranks import Communicator

#: Columns that TRL computes before the training where the reference is not computed in every step.
REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")


class HfStretcher:
    def __init__(
        self, spec: LaunchSpec, plan: TrainingPlan, trainer: Any, scorer: HeldOutScorer, ranks: Communicator
    ) -> None:
        self._spec, self._plan, self._trainer = spec, plan, trainer
        self._scorer, self._ranks = scorer, ranks
        self._steps: list[tuple[list[Any], Any]] = []

    def begin(self) -> int:
        base = self._scorer.base_log_probs()
        trained = self._scorer.keep_out(self._spec.prepared.eval_clusters, base)
        table = self._table(trained, base) if trained else ()
        if not len(table):
            return 0
        trainer = self._trainer
        batches, together = self._batches(table), trainer.args.gradient_accumulation_steps
        self._steps = [
            trainer.get_batch_samples(iter(batches[at : at + together]), together, trainer.args.device)
            for at in range(0, len(batches), together)
        ]
        return len(self._steps)

    def _table(self, trained: Sequence[int], base: Mapping[int, LogProbs]) -> Any:
        """The held-out rows that are trained on, with the columns of those before. They are as long as
        validators take them, whatever the training has room for."""
        held = importlib.import_module("datasets").load_from_disk(str(self._spec.prepared.eval_path))
        most, own = self._plan.sequence.length, getattr(self._trainer, "precompute_ref_logps", False)
        places = [place for place in trained if _tokens(held[place]) <= most and (not own or place in base)]
        table = held.select(places)
        if "position_ids" in self._trainer.train_dataset.column_names:  # for packing
            add = lambda row: {"position_ids": list(range(len(row["input_ids"])))}  # noqa: E731
            table = table.map(add, keep_in_memory=True)
        # A full fine-tune has no base any more, but the scorer knows what it gave.
        for at, name in enumerate(REFERENCE_COLUMNS if own else ()):
            table = table.add_column(name, [base[place][at] for place in places])
        return table

    def _batches(self, table: Any) -> list[Any]:
        """The engine's own micro-batches of this rank; as many on each, or some would wait for ever."""
        from accelerate.utils import send_to_device
        from transformers import set_seed

        trainer, args = self._trainer, self._trainer.args
        before = trainer.train_dataset, args.dataloader_drop_last
        # Ranks draw the order of the rows: each from a generator that has come to another place meanwhile.
        set_seed(self._plan.seed)
        try:
            # There may be fewer rows than make one batch.
            trainer.train_dataset, args.dataloader_drop_last = table, False
            # A GPU that training fills has no room for all of them; a step moves its own there.
            batches = [send_to_device(batch, "cpu") for batch in trainer.get_train_dataloader()]
        finally:
            trainer.train_dataset, args.dataloader_drop_last = before
        return batches[: int(min(self._ranks.gather([len(batches)])))]

    def score(self) -> float:
        return self._scorer.score()

    def step(self, factor: float, place: int) -> float:
        for group in self._trainer.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        return step_of_engine(self._trainer, *self._steps[place])


def _tokens(row: Mapping[str, Any]) -> int:
    """Of a row, or of the longer side of a pair."""
    if "input_ids" in row:
        return len(row["input_ids"])
    return len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"]))
