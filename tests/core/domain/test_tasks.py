import pytest
from pydantic import TypeAdapter, ValidationError

from core.domain.tasks import TASK_TYPE_OF, DatasetKind, DatasetType, GrpoDataset, dataset_kind
from tests.doubles.each import each

#: As validators send them: every key, nulls included.
SENT = {
    DatasetKind.INSTRUCT: {
        "field_instruction": "instruct",
        "field_input": "input",
        "field_output": "output",
        "field_system": None,
        "system_prompt": "",
        "system_format": "{system}",
        "format": None,
        "no_input_format": None,
        "field": None,
    },
    DatasetKind.CHAT: {
        "chat_template": "chatml",
        "chat_column": "conversations",
        "chat_role_field": "from",
        "chat_content_field": "value",
        "chat_user_reference": "human",
        "chat_assistant_reference": "gpt",
    },
    DatasetKind.DPO: {
        "field_prompt": "prompt",
        "field_system": None,
        "field_chosen": "chosen",
        "field_rejected": "rejected",
        "prompt_format": None,
        "chosen_format": None,
        "rejected_format": None,
    },
    DatasetKind.GRPO: {
        "field_prompt": "prompt",
        "reward_functions": [{"reward_func": "def f(completions): return [0.0]", "reward_weight": 0.6}],
        "extra_column": None,
    },
    DatasetKind.ENVIRONMENT: {"environment_names": ["othello"]},
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


def test_every_kind_but_environments_has_a_task_type() -> None:
    assert set(DatasetKind) - set(TASK_TYPE_OF) == {DatasetKind.ENVIRONMENT}
