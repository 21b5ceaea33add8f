"""Anything that JSON can say, as a task's data: rows to train on, or a reason why not."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.domain.evaluation import Era
from core.domain.tasks import (
    ChatDataset,
    DatasetType,
    DpoDataset,
    GrpoDataset,
    InstructDataset,
    RewardFunction,
    TaskType,
)
from tests.trainer.run_specs import run_spec
from tests.trainer.words import WordTokenizer
from trainer.errors import TrainingError
from trainer.inputs.text import read_task
from trainer.inputs.tokens import IGNORED, LabelledRow, PairRow, PromptRow

pytestmark = pytest.mark.thorough


REWARD = RewardFunction(reward_func="def f(completions): ...", reward_weight=1)
DATASETS: dict[TaskType, DatasetType] = {
    TaskType.INSTRUCT: InstructDataset(field_instruction="a", field_input="b", field_output="c"),
    TaskType.CHAT: ChatDataset(chat_column="a", chat_role_field="b", chat_content_field="c"),
    TaskType.DPO: DpoDataset(field_prompt="a", field_chosen="b", field_rejected="c"),
    TaskType.GRPO: GrpoDataset(field_prompt="a", reward_functions=[REWARD], extra_column="b"),
}
TEXT = st.text(max_size=20) | st.sampled_from(
    ["user", "assistant", "system", "<end>", "{instruction}", "\ud800"]
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"b": st.sampled_from(["user", "assistant", "tool"]), "c": TEXT}), max_size=4
)
ROWS = st.lists(
    st.dictionaries(st.sampled_from("abcd"), ANYTHING | MESSAGES, max_size=4) | ANYTHING, max_size=6
)


@pytest.mark.parametrize("era", Era)
@pytest.mark.parametrize("task", DATASETS)
@given(rows=ROWS)
def test_any_data_become_rows_or_a_reason(task: TaskType, era: Era, rows: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.json").write_text('{"max_position_embeddings": 64}')
        (folder / "rows.json").write_text(json.dumps(rows))
        run = run_spec(folder, task_type=task, dataset=DATASETS[task], era=era, model_path=place)
        tokenizer: Any = WordTokenizer(adds_begin=True)
        try:
            read = read_task(run, tokenizer)
        except TrainingError:
            return
    objects = sum(isinstance(row, dict) for row in rows)
    assert len(read.rows) + sum(read.dropped.values()) == objects
    assert len(read.rows) == len(read.fingerprints) == read.facts.rows
    for row in read.rows:
        if isinstance(row, LabelledRow):
            assert len(row.ids) == len(row.labels) <= read.limit
            assert any(label != IGNORED for label in row.labels)
        elif isinstance(row, PairRow):
            assert row.chosen
            assert row.rejected
            assert list(row.chosen) != list(row.rejected)
        elif isinstance(row, PromptRow):
            assert row.prompt.strip()
