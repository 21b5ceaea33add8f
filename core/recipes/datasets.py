"""The data entry of a text task: tables that the trainer's adapters made, in the tokens of the evaluation.

Evaluation is the yardstick, not what upstream's own trainer does: it trains DPO in ChatML and is then
scored on the raw strings. Axolotl's own dataset types come close, and differ where it hurts: a stray brace
in a format ends the training, TRL encodes preferences and prompts in another way than one generation of
evaluation does, and every rank would encode again. So rows come encoded: Axolotl takes labelled ones as
they are, and for pairs and prompts `trainer_cls` names our subclass of its trainer
(`trainer/axolotl_trainers.py`).
"""

from __future__ import annotations

from typing import Any

from core.errors import Problem
from core.evaluation import Era
from core.recipes.base import Config
from core.recipes.run import RecipeError, RunInputs
from core.tasks import DatasetType, DpoDataset, EnvironmentDataset, GrpoDataset

#: The names under which the adapters leave a GRPO task's columns.
GRPO_PROMPT = "prompt"
GRPO_EXTRA = "extra_data"
#: Where Axolotl finds our subclasses of its trainers.
PAIR_TRAINER = "trainer.axolotl_trainers.PairTrainer"
RAW_PROMPT_TRAINER = "trainer.axolotl_trainers.RawPromptTrainer"


def dataset_keys(dataset: DatasetType, inputs: RunInputs) -> Config:
    """`datasets`, `test_datasets` and what goes with them."""
    if isinstance(dataset, EnvironmentDataset):
        raise RecipeError(
            "dataset_type",
            [Problem("dataset_type", dataset.kind, "is played in tournaments, not trained from rows")],
        )
    keys: Config = {"datasets": [{"path": inputs.train_path}]}
    if inputs.eval_path:
        keys["test_datasets"] = [{"path": inputs.eval_path}]
    if isinstance(dataset, DpoDataset):
        # Prepared means: checked and cut as text, which there is none of.
        return {**keys, "skip_prepare_dataset": True, "trainer_cls": PAIR_TRAINER}
    if isinstance(dataset, GrpoDataset):
        raw = {"trainer_cls": RAW_PROMPT_TRAINER} if inputs.era is Era.OFFERS else {}
        return {**keys, **raw, "trl": _rewards(dataset, inputs)}
    return keys


def reward_name(place: int) -> str:
    """The function in the task's reward module for the reward at this place of the request."""
    return f"reward_{place}"


def _rewards(dataset: GrpoDataset, inputs: RunInputs) -> dict[str, Any]:
    places = range(len(dataset.reward_functions))
    return {
        "reward_funcs": [f"{inputs.reward_module}.{reward_name(place)}" for place in places],
        "reward_weights": reward_weights(dataset),
    }


def reward_weights(dataset: GrpoDataset) -> list[float]:
    """As validators weigh: they sum to one. Weights that are all zero say nothing, so all count alike."""
    given = [float(one.reward_weight) for one in dataset.reward_functions]
    total = sum(given)
    if not 0 < total < float("inf"):
        return [1.0 / len(given)] * len(given)
    return [one / total for one in given]
