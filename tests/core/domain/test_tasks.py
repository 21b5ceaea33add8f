from random import Random
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from core.domain.tasks import (
    OFFERED_TASKS,
    TASK_TYPE_OF,
    DatasetKind,
    DatasetType,
    GrpoDataset,
    TaskType,
    dataset_kind,
)
from miner.dev.samples import sample_task
from tests.doubles.each import each

#: As validators send them: every key, nulls included.
SENT: dict[DatasetKind, dict[str, Any]] = {
    kind: {"environment_names": ["othello"]}
    if task_type is TaskType.ENVIRONMENT
    else sample_task(task_type, Random(0)).dataset_type
    for kind, task_type in TASK_TYPE_OF.items()
}
ADAPTER: TypeAdapter[DatasetType] = TypeAdapter(DatasetType)


@each("kind", list(DatasetKind))
def test_keys_decide_the_type_of_a_dataset_even_if_all_values_are_null(kind: DatasetKind) -> None:
    assert ADAPTER.validate_python(SENT[kind]).kind is kind
    assert dataset_kind(dict.fromkeys(SENT[kind])) is kind


def test_a_kind_key_in_the_request_is_ignored() -> None:
    assert ADAPTER.validate_python({**SENT[DatasetKind.CHAT], "kind": "dpo"}).kind is DatasetKind.CHAT


def test_keys_of_two_types_are_rejected_with_both_named() -> None:
    with pytest.raises(ValidationError, match="grpo and dpo"):
        ADAPTER.validate_python({**SENT[DatasetKind.DPO], **SENT[DatasetKind.GRPO]})


REWARD = {"reward_func": "x", "reward_weight": 1}


@each("functions", [[REWARD] * 65, [{**REWARD, "reward_func": "x" * 200_001}]])
def test_reward_functions_are_bounded(functions: list[object]) -> None:
    with pytest.raises(ValidationError):
        GrpoDataset.model_validate({"reward_functions": functions})


def test_a_long_list_of_wrong_elements_yields_few_problems() -> None:
    with pytest.raises(ValidationError) as error:
        ADAPTER.validate_json(b'{"environment_names": [' + b"1," * 50_000 + b"1]}")
    assert error.value.error_count() < 300


def test_every_kind_of_dataset_has_a_task_type_and_only_environments_are_never_offered() -> None:
    assert set(TASK_TYPE_OF) == set(DatasetKind)
    assert set(TaskType) - set(OFFERED_TASKS) == {TaskType.ENVIRONMENT}
