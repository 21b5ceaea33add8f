"""Our token ids and labels beside Axolotl's own, for rows of every kind and tokenizers of every habit."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
from axolotl.prompt_strategies.completion import load as load_completion
from axolotl.prompt_strategies.user_defined import UserDefinedDatasetConfig, load
from axolotl.utils.dict import DictDefault

from core.domain.tasks import InstructDataset
from tests.trainer import tiny
from trainer.inputs.instruct import instruct_rows, split_completion

TOKENIZERS: dict[str, dict[str, Any]] = {
    "qwen": {},
    "llama": {"adds_begin": True, "end": tiny.END},
    "llama-chatml": {"adds_begin": True},
    "begin-is-end": {"adds_begin": True, "end": tiny.BEGIN},
}
DATASETS = {
    "plain": InstructDataset(field_instruction="i", field_input="c", field_output="o"),
    "no-input": InstructDataset(field_instruction="i", field_output="o"),
    "formats": InstructDataset(
        field_instruction="i",
        field_input="c",
        field_output="o",
        field_system="s",
        system_format="{system}\n",
        format="Q: {instruction}\nC: {input}\nA:",
        no_input_format="Q: {instruction} A:",
    ),
    "braces": InstructDataset(
        field_instruction="i",
        field_input="c",
        field_output="o",
        system_prompt='be {nice} "x"',
        format="{{{instruction}}}|{input}",
    ),
}
ODD = (
    "", " ", "[[x]]", "]]", "{curly}", "{", "emoji \U0001f600\u200d", "nul \0 x", "line\nbreak\n", "  lead",
    "trail  ", tiny.TURN, f"{tiny.BEGIN} hi", "日本語", "{instruction}",
)  # fmt: skip
LENGTH = 48


def texts(chance: random.Random) -> str:
    return chance.choice(ODD) if chance.random() < 0.4 else tiny.sentence(chance, chance.randint(1, 60))


def engine_fields(dataset: InstructDataset) -> dict[str, Any]:
    """As the evaluation hands a request's fields to Axolotl."""
    fields = {key: value for key, value in dataset.model_dump().items() if value is not None}
    fields.setdefault("no_input_format", "{instruction}")
    fields.setdefault("format", "{instruction} {input}" if dataset.field_input else "{instruction}")
    return fields


@pytest.mark.parametrize("habit", TOKENIZERS)
@pytest.mark.parametrize("name", DATASETS)
def test_rows_are_encoded_as_axolotl_encodes_them(habit: str, name: str) -> None:
    logging.getLogger("axolotl").setLevel(logging.ERROR)
    dataset, tokenizer, chance = (
        DATASETS[name],
        tiny.tokenizer(**TOKENIZERS[habit]),
        random.Random(name + habit),
    )
    rows = [{field: texts(chance) for field in "icos"} for _ in range(250)]
    config = DictDefault({"train_on_inputs": False, "sequence_len": LENGTH})
    engine = load(tokenizer, config, UserDefinedDatasetConfig(**engine_fields(dataset)))
    for row, ours in zip(rows, instruct_rows(dataset, rows, tokenizer, LENGTH), strict=True):
        theirs = engine.tokenize_prompt(dict(row))
        assert (list(ours.ids), list(ours.labels)) == (list(theirs["input_ids"]), list(theirs["labels"])), row


@pytest.mark.parametrize("habit", TOKENIZERS)
def test_without_an_output_all_text_is_learned_in_pieces_like_axolotls(habit: str) -> None:
    dataset, tokenizer, chance = (
        InstructDataset(field_instruction="t"),
        tiny.tokenizer(**TOKENIZERS[habit]),
        random.Random(1),
    )
    rows = [{"t": texts(chance) + tiny.sentence(chance, 20)} for _ in range(100)]
    engine = load_completion(tokenizer, DictDefault({"sequence_len": LENGTH}), {"field": "t"})
    theirs = engine.tokenize_prompt({"t": [row["t"] for row in rows]})
    ours = [
        piece
        for row in instruct_rows(dataset, rows, tokenizer, LENGTH)
        for piece in split_completion(row, LENGTH)
    ]
    # In a rest of one token nothing is foretold: its loss would be no number.
    kept = [place for place, ids in enumerate(theirs["input_ids"]) if len(ids) > 1]
    assert [list(piece.ids) for piece in ours] == [theirs["input_ids"][place] for place in kept]
    assert [list(piece.labels) for piece in ours] == [theirs["labels"][place] for place in kept]
