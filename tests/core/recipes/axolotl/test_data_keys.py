"""The data entries: tables of encoded rows, and the trainers that take them."""

from __future__ import annotations

from typing import Any

import pytest

from core.domain.evaluation import Era
from core.domain.tasks import DatasetType, GrpoDataset, RewardFunction, TaskType
from core.recipes.axolotl.data_keys import (
    PAIR_TRAINER,
    PROMPT_TRAINER,
    RAW_PROMPT_TRAINER,
    dataset_keys,
    reward_weights,
)
from tests.core.recipes.cases import DATASETS, TEXT_TASKS, inputs


def keys(dataset: DatasetType, **changes: Any) -> dict[str, Any]:
    return dataset_keys(dataset, inputs(None, **changes))


def rewarded(*weights: float) -> GrpoDataset:
    functions = [RewardFunction(reward_func="def r(): ...", reward_weight=weight) for weight in weights]
    return GrpoDataset(field_prompt="prompt", reward_functions=functions)


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_every_task_reads_the_encoded_tables(task: TaskType) -> None:
    config = keys(DATASETS[task])
    assert config["datasets"] == [{"path": "/run/data/train.json"}]
    assert config["test_datasets"] == [{"path": "/run/data/eval.json"}]


def test_without_held_out_rows_there_is_no_test_set() -> None:
    assert "test_datasets" not in keys(DATASETS[TaskType.CHAT], eval_path=None)


def test_pairs_go_to_the_trainer_that_takes_them_as_they_are() -> None:
    config = keys(DATASETS[TaskType.DPO])
    assert (config["trainer_cls"], config["skip_prepare_dataset"]) == (PAIR_TRAINER, True)


@pytest.mark.parametrize(
    ("era", "trainer"), [(Era.OFFERS, RAW_PROMPT_TRAINER), (Era.TOURNAMENTS, PROMPT_TRAINER)]
)
def test_prompts_are_encoded_as_the_evaluation_of_their_era_does(era: Era, trainer: str) -> None:
    assert keys(DATASETS[TaskType.GRPO], era=era)["trainer_cls"] == trainer


def test_the_rewards_are_named_in_the_order_of_the_request() -> None:
    config = keys(DATASETS[TaskType.GRPO], reward_module="rewards_of_this_task")
    assert config["trl"]["reward_funcs"] == ["rewards_of_this_task.reward_0", "rewards_of_this_task.reward_1"]


@pytest.mark.parametrize(
    ("given", "used"),
    [((3.0, 1.0), [0.75, 0.25]), ((0.25,), [1.0]), ((0.0, 0.0), [0.5, 0.5]), ((1e308, 1e308), [0.5, 0.5])],
)
def test_the_weights_of_rewards_sum_to_one(given: tuple[float, ...], used: list[float]) -> None:
    assert reward_weights(rewarded(*given)) == used
    assert keys(rewarded(*given))["trl"]["reward_weights"] == used
