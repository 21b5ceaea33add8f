"""The data entry of a text task: the rows as the validator's evaluation reads them.

Evaluation is the yardstick, not what upstream's own trainer does: it trains DPO in ChatML and is then scored
on the raw strings. Rows are expected as the trainer's adapters leave them: for GRPO a `prompt` column (and
`extra_data` where the task has it), for the others the columns that the task names; no empty preference rows,
which Axolotl refuses.
"""

from __future__ import annotations

import string
from typing import Any

from core.errors import Problem
from core.recipes.base import Config
from core.recipes.run import RecipeError, RunInputs
from core.tasks import ChatDataset, DatasetType, DpoDataset, GrpoDataset, InstructDataset

#: The names under which the adapters leave a GRPO task's columns.
GRPO_PROMPT = "prompt"
GRPO_EXTRA = "extra_data"


def dataset_keys(dataset: DatasetType, inputs: RunInputs) -> Config:
    """`datasets`, `test_datasets` and what goes with them."""
    entry, extra = _entry(dataset, inputs)
    keys: Config = {"datasets": [{"path": inputs.train_path, **entry}], **extra}
    if inputs.eval_path:
        keys["test_datasets"] = [{"path": inputs.eval_path, **entry}]
    return keys


def reward_name(place: int) -> str:
    """The function in the task's reward module for the reward at this place of the request."""
    return f"reward_{place}"


def _entry(dataset: DatasetType, inputs: RunInputs) -> tuple[Config, Config]:
    if isinstance(dataset, InstructDataset):
        return _instruct(dataset), {}
    if isinstance(dataset, ChatDataset):
        return _chat(dataset), {}
    if isinstance(dataset, DpoDataset):
        return _dpo(dataset), {}
    if isinstance(dataset, GrpoDataset):
        return _grpo(), {"trl": _rewards(dataset, inputs)}
    raise RecipeError(
        "dataset_type",
        [Problem("dataset_type", dataset.kind, "is played in tournaments, not trained from rows")],
    )


def _instruct(dataset: InstructDataset) -> Config:
    """One text of system and turn, tokenised apart from the answer, loss on the answer and its end alone."""
    common = {"ds_type": "json", "split": "train"}
    if not dataset.field_output:
        return {**common, "type": "completion", "field": dataset.field_instruction}
    # Axolotl's own defaults for the two formats end in a space, the evaluation's do not.
    turn = dataset.format or ("{instruction} {input}" if dataset.field_input else "{instruction}")
    bare = dataset.no_input_format or "{instruction}"
    fields = {
        "field_instruction": dataset.field_instruction,
        "field_input": dataset.field_input,
        "field_output": dataset.field_output,
        "field_system": dataset.field_system,
        "system_prompt": dataset.system_prompt,
        "system_format": dataset.system_format,
        "format": turn,
        "no_input_format": bare,
    }
    _check_format("format", turn, {"instruction", "input"})
    _check_format("no_input_format", bare, {"instruction"})
    _check_format("system_format", dataset.system_format or "", {"system"})
    return {**common, "type": {key: value for key, value in fields.items() if value is not None}}


def _check_format(key: str, text: str, allowed: set[str]) -> None:
    """Python formats it with these names at the first row; a stray brace ends the training there."""
    try:
        named = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
    except ValueError as reason:
        rule = f"is no Python format: {reason}; a literal brace is written twice"
        raise RecipeError("dataset_type", [Problem(key, repr(text), rule)]) from reason
    if named - allowed:
        rule = f"may name {', '.join(sorted(allowed))} in braces; a literal brace is written twice"
        raise RecipeError("dataset_type", [Problem(key, repr(text), rule)])


def _chat(dataset: ChatDataset) -> Config:
    """The task's own template, loss on the assistant's turns and the token that ends them."""
    roles: dict[str, list[str]] = {
        "user": [dataset.chat_user_reference or "user"],
        "assistant": [dataset.chat_assistant_reference or "assistant"],
    }
    properties = {
        "role": dataset.chat_role_field or "from",
        "content": dataset.chat_content_field or "value",
    }
    return {
        "ds_type": "json",
        "split": "train",
        "type": "chat_template",
        "chat_template": dataset.chat_template or "chatml",
        "field_messages": dataset.chat_column or "conversations",
        "message_property_mappings": properties,
        "roles": roles,
        "roles_to_train": ["assistant"],
        "train_on_eos": "turn",
    }


def _dpo(dataset: DpoDataset) -> Config:
    """Raw strings: formats and the system field are not applied in evaluation. TRL adds the end token."""
    fields = {
        "field_prompt": dataset.field_prompt or "prompt",
        "field_chosen": dataset.field_chosen or "chosen",
        "field_rejected": dataset.field_rejected or "rejected",
    }
    return {"split": "train", "type": fields}


def _grpo() -> Config:
    """No type: the `prompt` column is used raw, every other column reaches the reward functions."""
    return {"ds_type": "json", "split": "train"}


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
