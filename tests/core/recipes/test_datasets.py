"""The data entry of each task, against what the validator's evaluation does with the rows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.recipes.datasets import dataset_keys
from core.recipes.run import RecipeError
from core.tasks import ChatDataset, DpoDataset, EnvironmentDataset, InstructDataset, TaskType
from tests.core.recipes.cases import DATASETS, inputs


def entry(dataset: Any, **changes: Any) -> dict[str, Any]:
    keys = dataset_keys(dataset, inputs(None, **changes))
    return dict(keys["datasets"][0])


def test_the_held_out_file_is_read_like_the_training_file() -> None:
    for task, dataset in DATASETS.items():
        keys = dataset_keys(dataset, inputs(task))
        train, test = keys["datasets"][0], keys["test_datasets"][0]
        assert train.pop("path") == "/run/data/train.json"
        assert test.pop("path") == "/run/data/eval.json"
        assert train == test


def test_without_a_held_out_file_there_is_no_entry_for_it() -> None:
    assert "test_datasets" not in dataset_keys(DATASETS[TaskType.CHAT], inputs(None, eval_path=None))


def test_an_instruct_prompt_has_no_separator_and_no_trailing_space() -> None:
    kind = entry(DATASETS[TaskType.INSTRUCT])["type"]
    assert (kind["format"], kind["no_input_format"]) == ("{instruction} {input}", "{instruction}")
    assert (kind["system_format"], kind["system_prompt"]) == ("{system}", "")


def test_without_an_input_field_the_prompt_is_the_instruction() -> None:
    kind = entry(InstructDataset(field_instruction="q", field_output="a"))["type"]
    assert kind["format"] == "{instruction}"
    assert "field_input" not in kind


def test_an_instruct_task_may_bring_its_own_formats() -> None:
    own = InstructDataset(
        field_instruction="q",
        field_input="ctx",
        field_output="a",
        field_system="sys",
        system_prompt="be brief",
        system_format="{system}\n",
        format="Q: {instruction}\nC: {input}\nA:",
        no_input_format="Q: {instruction}\nA:",
    )
    kind = entry(own)["type"]
    assert kind["format"] == "Q: {instruction}\nC: {input}\nA:"
    assert (kind["field_system"], kind["system_format"]) == ("sys", "{system}\n")


def test_without_an_output_field_all_text_is_trained() -> None:
    made = entry(InstructDataset(field_instruction="text"))
    assert (made["type"], made["field"]) == ("completion", "text")


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("format", '{"instruction": {instruction}}'),
        ("format", "{instruction} {context}"),
        ("format", "{instruction} {"),
        ("format", "{0}"),
        ("no_input_format", "{input}"),
        ("system_format", "{instruction}"),
    ],
)
def test_a_format_that_would_end_the_training_at_the_first_row_is_refused(field: str, text: str) -> None:
    values = {"field_instruction": "q", "field_input": "i", "field_output": "a", field: text}
    with pytest.raises(RecipeError, match=field):
        entry(InstructDataset(**values))


@given(st.text(max_size=40))
def test_a_format_that_is_let_through_can_be_filled_in(text: str) -> None:
    dataset = InstructDataset(field_instruction="q", field_input="i", field_output="a", format=text)
    try:
        kind = entry(dataset)["type"]
    except RecipeError:
        return
    kind["format"].format(instruction="x", input="y")


def test_a_chat_is_trained_on_the_assistants_turns_and_their_end() -> None:
    made = entry(DATASETS[TaskType.CHAT])
    assert made["type"] == "chat_template"
    assert made["chat_template"] == "chatml"
    assert made["field_messages"] == "conversations"
    assert made["message_property_mappings"] == {"role": "from", "content": "value"}
    assert made["roles"] == {"user": ["human"], "assistant": ["gpt"]}
    assert (made["roles_to_train"], made["train_on_eos"]) == (["assistant"], "turn")


def test_nulls_in_a_chat_request_mean_the_protocols_defaults() -> None:
    names = ("chat_template", "chat_column", "chat_role_field", "chat_content_field")
    sent = ChatDataset(**dict.fromkeys(names), chat_user_reference=None, chat_assistant_reference=None)
    made = entry(sent)
    assert (made["chat_template"], made["field_messages"]) == ("chatml", "conversations")
    assert made["roles"] == {"user": ["user"], "assistant": ["assistant"]}


def test_preferences_are_trained_raw_as_they_are_evaluated() -> None:
    dressed = DpoDataset(
        field_prompt="q",
        field_system="s",
        field_chosen="good",
        field_rejected="bad",
        prompt_format="<|user|>{prompt}",
        chosen_format="{chosen}<|end|>",
    )
    made = entry(dressed)
    assert made["type"] == {"field_prompt": "q", "field_chosen": "good", "field_rejected": "bad"}


def test_a_grpo_row_is_its_prompt_and_what_the_rewards_ask_for() -> None:
    keys = dataset_keys(DATASETS[TaskType.GRPO], inputs(None, reward_module="rewards_of_this_task"))
    assert "type" not in keys["datasets"][0]
    assert keys["trl"]["reward_funcs"] == ["rewards_of_this_task.reward_0", "rewards_of_this_task.reward_1"]


def test_an_environment_is_not_trained_from_rows() -> None:
    with pytest.raises(RecipeError, match="tournaments"):
        entry(EnvironmentDataset(environment_names=["gin_rummy"]))
