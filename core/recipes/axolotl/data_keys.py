"""The dataset keys of a text task: tables of rows that the trainer encoded as the evaluation does.

The evaluation decides, not upstream's own trainer, which trains DPO in ChatML and is then scored on the raw
strings. Axolotl's own dataset types come close but differ where it matters: a stray brace in a format ends
the training, TRL encodes preferences and prompts differently from one generation of the evaluation, and
every rank would encode again. So the rows come encoded: Axolotl takes labelled ones as they are, and for
pairs and prompts `trainer_cls` names our subclass of its trainer (`trainer/axolotl/trainers.py`).
"""

from __future__ import annotations

from typing import Any

from core.domain.evaluation import Era
from core.domain.tasks import DatasetType, DpoDataset, GrpoDataset
from core.recipes.base import EngineConfig, RunInputs

#: The columns of a GRPO task's encoded table.
GRPO_PROMPT = "prompt"
GRPO_EXTRA = "extra_data"
#: Where Axolotl finds our subclasses of its trainers.
PAIR_TRAINER = "trainer.axolotl.trainers.PairTrainer"
PROMPT_TRAINER = "trainer.axolotl.trainers.PromptTrainer"
RAW_PROMPT_TRAINER = "trainer.axolotl.trainers.RawPromptTrainer"


def dataset_keys(dataset: DatasetType, inputs: RunInputs) -> EngineConfig:
    """`datasets`, `test_datasets` and what goes with them."""
    keys: EngineConfig = {"datasets": [{"path": inputs.train_path}]}
    if inputs.eval_path:
        keys["test_datasets"] = [{"path": inputs.eval_path}]
    if isinstance(dataset, DpoDataset):
        # Preparing would check and cut the rows as text, which they do not have.
        return {**keys, "skip_prepare_dataset": True, "trainer_cls": PAIR_TRAINER}
    if isinstance(dataset, GrpoDataset):
        trainer = RAW_PROMPT_TRAINER if inputs.era is Era.OFFERS else PROMPT_TRAINER
        return {**keys, "trainer_cls": trainer, "trl": _rewards(dataset, inputs)}
    return keys


def reward_name(index: int) -> str:
    """The function in the task's reward module for the reward of this index in the request."""
    return f"reward_{index}"


def _rewards(dataset: GrpoDataset, inputs: RunInputs) -> dict[str, Any]:
    indexes = range(len(dataset.reward_functions))
    return {
        "reward_funcs": [f"{inputs.reward_module}.{reward_name(index)}" for index in indexes],
        "reward_weights": reward_weights(dataset),
    }


def reward_weights(dataset: GrpoDataset) -> list[float]:
    """The weights as validators take them: their sum is one. If all are zero, all count the same."""
    weights = [float(reward.reward_weight) for reward in dataset.reward_functions]
    total = sum(weights)
    if not 0 < total < float("inf"):
        return [1.0 / len(weights)] * len(weights)
    return [weight / total for weight in weights]
