"""Our token ids and labels of conversations beside Axolotl's own, for many templates and tokenizers."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
from axolotl.prompt_strategies import chat_template
from axolotl.utils.dict import DictDefault

from core.domain.tasks import ChatDataset
from tests.trainer import tiny
from tests.trainer.inputs.test_instruct_in_axolotl import TOKENIZERS, texts
from trainer.inputs.chat import chat_rows
from trainer.inputs.tokens import IGNORED

TEMPLATES = (
    "chatml", "llama3", "gemma", "gemma3", "phi_3", "phi_35", "phi_4", "qwen_25", "qwen3", "alpaca",
    "mistral_v3_tekken", "mistral_v7_tekken", "deepseek_v2", "deepseek_v3", "cohere", "exaone", "llama4",
    "metharme", "jamba",
)  # fmt: skip


def talk(chance: random.Random) -> list[dict[str, str]]:
    """Turns of unknown roles and in odd orders now and then."""
    turns = [{"from": "system", "value": texts(chance)}] if chance.random() < 0.3 else []
    for _ in range(chance.randint(1, 4)):
        turns.append({"from": "human", "value": texts(chance)})
        turns.append({"from": chance.choice(["gpt"] * 9 + ["assistant", "tool"]), "value": texts(chance)})
    return turns


def engine(name: str, tokenizer: Any) -> Any:
    logging.getLogger("axolotl").setLevel(logging.ERROR)
    entry = {
        "type": "chat_template",
        "chat_template": name,
        "field_messages": "conversations",
        "roles": {"assistant": ["gpt"], "user": ["human"]},
        "message_property_mappings": {"role": "from", "content": "value"},
    }
    config = DictDefault({"train_on_inputs": False, "sequence_len": 4096})
    return chat_template.load(tokenizer, config, entry)


@pytest.mark.parametrize("habit", TOKENIZERS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_are_encoded_as_axolotl_encodes_them(habit: str, name: str) -> None:
    tokenizer, chance = tiny.tokenizer(**TOKENIZERS[habit]), random.Random(name + habit)
    dataset = ChatDataset(chat_template=name, chat_user_reference="human", chat_assistant_reference="gpt")
    rows = [{"conversations": talk(chance)} for _ in range(200 if name == "chatml" else 25)]
    theirs = engine(name, tokenizer)
    for row, ours in zip(rows, chat_rows(dataset, rows, tokenizer), strict=True):
        try:
            expected = theirs.tokenize_prompt({"conversations": [dict(one) for one in row["conversations"]]})
        except Exception:
            assert ours is None, "the template refuses this row"
            continue
        if ours is None:
            assert set(expected["labels"]) == {IGNORED}, row
        else:
            assert (list(ours.ids), list(ours.labels)) == (expected["input_ids"], expected["labels"]), row
