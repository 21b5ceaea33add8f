"""The base model and the tasks of `benchmarks/training.py`, all made up and told apart by a seed.

The base has read sentences in which every word has its favourite followers. Tasks build on the same words and
ask for something new that can be learned bit by bit: the words of the prompt, each replaced by another one.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

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
from tests.trainer import tiny

ERA = Era.OFFERS
#: Part of the words in answers that follow no rule, so that no model can know everything.
NOISE = 0.1
#: Completions that hold many of these words are rewarded, and so are those of about six words.
WANTED = tiny.WORDS[:10]
REWARDS = (
    f"""
WANTED = {WANTED!r}

def wanted(completions, **kwargs):
    found = [one.split() for one in completions]
    return [sum(word in WANTED for word in words) / max(len(words), 1) for words in found]
""",
    """
def short(completions, **kwargs):
    return [1.0 / (1.0 + abs(len(one.split()) - 6) / 6) for one in completions]
""",
)
DATASETS: dict[TaskType, DatasetType] = {
    TaskType.INSTRUCT: InstructDataset(
        field_instruction="instruct", field_input="input", field_output="output"
    ),
    TaskType.CHAT: ChatDataset(chat_user_reference="human", chat_assistant_reference="gpt"),
    TaskType.DPO: DpoDataset(field_prompt="prompt", field_chosen="chosen", field_rejected="rejected"),
    TaskType.GRPO: GrpoDataset(
        field_prompt="prompt",
        reward_functions=[
            RewardFunction(reward_func=REWARDS[0], reward_weight=0.7),
            RewardFunction(reward_func=REWARDS[1], reward_weight=0.3),
        ],
    ),
}
#: Rows to train on (about an epoch of upstream's in the time), and to score on. Prompts cost hundreds of
#: passes each.
ROWS = dict.fromkeys(DATASETS, (6000, 300)) | {TaskType.GRPO: (1000, 160)}


class World:
    """Words, their followers and their replacements."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.followers = {word: self.chance.sample(tiny.WORDS, 4) for word in tiny.WORDS}
        shuffled = self.chance.sample(tiny.WORDS, len(tiny.WORDS))
        self.replaced = dict(zip(tiny.WORDS, shuffled, strict=True))

    def sentence(self, words: int) -> list[str]:
        made = [self.chance.choice(tiny.WORDS)]
        while len(made) < words:
            likely = self.chance.random() < 0.85
            made.append(self.chance.choice(self.followers[made[-1]] if likely else tiny.WORDS))
        return made

    def answer(self, asked: list[str]) -> str:
        said = [self.replaced[word] for word in asked]
        noisy = [self.chance.choice(tiny.WORDS) if self.chance.random() < NOISE else word for word in said]
        return "answer is " + " ".join(noisy)

    def rows(self, task: TaskType, count: int) -> list[dict[str, Any]]:
        return [getattr(self, f"_{task.name.lower()}")() for _ in range(count)]

    def _asked(self) -> list[str]:
        return self.sentence(self.chance.randint(2, 8))

    def _instruct(self) -> dict[str, Any]:
        asked = self._asked()
        return {"instruct": "sum of", "input": " ".join(asked), "output": self.answer(asked)}

    def _chat(self) -> dict[str, Any]:
        talk = []
        for _ in range(1 + (self.chance.random() < 0.3)):
            asked = self._asked()
            talk.append({"from": "human", "value": " ".join(asked)})
            talk.append({"from": "gpt", "value": self.answer(asked)})
        return {"conversations": talk}

    def _dpo(self) -> dict[str, Any]:
        """Both answers are of the same words: only their order tells them apart."""
        asked = self._asked()
        chosen = self.answer(asked)
        words = chosen.split()[2:]
        self.chance.shuffle(words)
        return {"prompt": " ".join(asked), "chosen": chosen, "rejected": "answer is " + " ".join(words)}

    def _grpo(self) -> dict[str, Any]:
        return {"prompt": " ".join(self._asked())}


def base_model(folder: Path, world: World, steps: int, seed: int) -> Path:
    """A little Llama that has read this world's sentences for a while."""
    tokenizer, model = tiny.tokenizer(adds_begin=True), tiny.model("llama", seed=seed).train()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.div_(4)  # tiny models have opinions; this one is to form its own
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for number in range(steps):
        texts = [" ".join(world.sentence(world.chance.randint(3, 12))) for _ in range(32)]
        texts = [text + tokenizer.eos_token for text in texts]
        # Some evaluations give no beginning token: a model that never missed it would be lost without.
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=number % 2 == 0)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
