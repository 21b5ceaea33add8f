"""Pairs and prompts in the real trainers of Axolotl and TRL."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from trl import DPOTrainer

from core.domain.evaluation import Era, evaluation_rules
from core.domain.tasks import DpoDataset
from tests.trainer import tiny
from tests.trainer.inputs.test_instruct_in_axolotl import TOKENIZERS, texts
from trainer.axolotl.trainers import PairTrainer, RawPromptTrainer
from trainer.inputs.dpo_grpo import cut_pair, pair_rows
from trainer.inputs.tables import PAIR_COLUMNS

DATASET = DpoDataset(field_prompt="prompt", field_chosen="chosen", field_rejected="rejected")
LENGTH = 40


def rows(count: int, seed: int) -> list[dict[str, str]]:
    chance = random.Random(seed)
    return [{name: texts(chance) for name in ("prompt", "chosen", "rejected")} for _ in range(count)]


@pytest.mark.parametrize("habit", TOKENIZERS)
def test_pairs_of_tournaments_are_encoded_and_cut_as_trl_does(habit: str) -> None:
    tokenizer, rules = tiny.tokenizer(**TOKENIZERS[habit]), evaluation_rules(Era.TOURNAMENTS)
    data = rows(300, 3)
    stand_in: Any = SimpleNamespace(_tokenizer=tokenizer)
    arguments = SimpleNamespace(dataset_num_proc=None, max_length=None, truncation_mode="keep_start")
    theirs = DPOTrainer._prepare_dataset(stand_in, Dataset.from_list(data), tokenizer, arguments, "train")
    for ours, theirs_row in zip(pair_rows(DATASET, data, tokenizer, rules), theirs, strict=True):
        assert [list(side) for side in ours] == [theirs_row[name] for name in PAIR_COLUMNS]
        shorter, room = cut_pair(ours, rules, LENGTH), max(LENGTH - len(theirs_row["prompt_ids"]), 0)
        if not room:
            assert shorter is None
        elif shorter is not None:
            kept = [
                theirs_row["prompt_ids"],
                theirs_row["chosen_ids"][:room],
                theirs_row["rejected_ids"][:room],
            ]
            assert [list(side) for side in shorter] == kept


def test_encoded_pairs_pass_through_the_trainer_unchanged() -> None:
    encoded = Dataset.from_list([{"prompt_ids": [5], "chosen_ids": [6, 3], "rejected_ids": [7, 3]}])
    nothing: Any = None
    assert PairTrainer._prepare_dataset(nothing, encoded, nothing, nothing, "train") is encoded


def test_pairs_that_are_not_encoded_are_refused_instead_of_encoded_in_another_way() -> None:
    nothing: Any = None
    with pytest.raises(ValueError, match="not encoded"):
        PairTrainer._prepare_dataset(nothing, Dataset.from_list(rows(2, 1)), nothing, nothing, "train")


def test_prompts_of_offers_have_no_token_for_the_beginning() -> None:
    tokenizer = tiny.tokenizer(adds_begin=True)
    stand_in: Any = SimpleNamespace(processing_class=tokenizer)
    ids, images, more = RawPromptTrainer._tokenize_prompts(stand_in, ["sum of apples", "hello"])
    assert ids == tokenizer(["sum of apples", "hello"], add_special_tokens=False)["input_ids"]
    assert tokenizer.bos_token_id not in ids[0]
    assert (images, more) == (None, {})
