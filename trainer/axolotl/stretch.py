"""Training on held-out rows at the end, with the engine's own loader and steps; see
`trainer.session.last_stretch`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from core.planning.plan import TrainingPlan
from trainer.axolotl.host import step_of_engine
from trainer.axolotl.scorers import HeldOutScorer
from trainer.handoff import LaunchSpec
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
        out = self._scorer.keep_out()
        table = self._table(out) if out else None
        if table is None or not len(table):
            return 0
        trainer = self._trainer
        batches, together = self._batches(table), trainer.args.gradient_accumulation_steps
        self._steps = [
            trainer.get_batch_samples(iter(batches[at : at + together]), together, trainer.args.device)
            for at in range(0, len(batches), together)
        ]
        return len(self._steps)

    def _table(self, out: set[int]) -> Any:
        """The held-out rows that are trained on, with the columns of those before. They are as long as
        validators take them, whatever the training has room for."""
        held = importlib.import_module("datasets").load_from_disk(str(self._spec.prepared.eval_path))
        most, reference = self._plan.sequence.length, self._reference()
        places = [
            place
            for place, row in enumerate(held)
            if place not in out and _tokens(row) <= most and (reference is None or place in reference)
        ]
        table = held.select(places)
        if "position_ids" in self._trainer.train_dataset.column_names:  # for packing
            table = table.map(lambda row: {"position_ids": list(range(len(row["input_ids"])))})
        for at, name in enumerate(REFERENCE_COLUMNS if reference is not None else ()):
            assert reference is not None
            table = table.add_column(name, [reference[place][at] for place in places])
        return table

    def _reference(self) -> Mapping[int, tuple[float, float]] | None:
        """DPO: what the base gives to both answers of a pair, where the engine does not compute it itself. A
        full fine-tune has no base any more, but the scorer knows."""
        if not getattr(self._trainer, "precompute_ref_logps", False):
            return None
        own = self._scorer.base_log_probs
        numbers = self._ranks.gather([number for place, pair in own.items() for number in (place, *pair)])
        triples = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
        return {int(place): (chosen, rejected) for place, chosen, rejected in triples}

    def _batches(self, table: Any) -> list[Any]:
        """The engine's own micro-batches of this rank; as many on each, or some would wait for ever."""
        from transformers import set_seed

        trainer, args = self._trainer, self._trainer.args
        before = trainer.train_dataset, args.dataloader_drop_last
        # Ranks draw the order of the rows: each from a generator that has come to another place meanwhile.
        set_seed(self._plan.seed)
        try:
            # There may be fewer rows than make one batch.
            trainer.train_dataset, args.dataloader_drop_last = table, False
            batches = list(trainer.get_train_dataloader())
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
