"""Axolotl's trainers for preferences and for GRPO, with the evaluation's tokens.

Named in the configuration as `trainer_cls`, so Axolotl builds them with everything of its own. What they
change is where tokens come from: TRL 1.9 encodes prompt and answer as one text and adds special tokens,
which is what one generation of evaluation does and the other does not (`core.domain.evaluation`).
"""

from __future__ import annotations

from typing import Any

from axolotl.core.trainers.dpo.trainer import AxolotlDPOTrainer
from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer

from trainer.inputs.tables import PAIR_COLUMNS


class PairTrainer(AxolotlDPOTrainer):  # type: ignore[misc]
    """Takes the pairs as `trainer.inputs` encoded and cut them."""

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        missing = set(PAIR_COLUMNS) - set(dataset.column_names)
        if missing:
            raise ValueError(f"the {dataset_name} data is not encoded: no {', '.join(sorted(missing))}")
        return dataset

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Skip the garbage collection and emptied cache after each micro step: both wait for the GPU."""
        return super(AxolotlDPOTrainer, self).training_step(*args, **kwargs)


class RawPromptTrainer(AxolotlGRPOTrainer):  # type: ignore[misc]
    """Encodes prompts without special tokens, as the evaluation of offers does."""

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        if not all(isinstance(prompt, str) for prompt in prompts):
            return super()._tokenize_prompts(prompts)
        ids = self.processing_class(text=prompts, add_special_tokens=False)["input_ids"]
        return ids, None, {}
