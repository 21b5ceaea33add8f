"""The bases and rows of `benchmarks/text_rules.py`, all made up and told apart by a seed.

A base has read sentences in which every word has its favourite followers. Tasks build on the same words and
ask for something new that can be learned bit by bit: the words of the prompt, each replaced by another one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.text_rules.cells import Cell
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
from trainer.inputs.tokens import load_tokenizer

ERA = Era.TOURNAMENTS
#: 0.6 M parameters: so large that a step takes its time for arithmetic more than for Python.
SHAPE = {"hidden": 128, "layers": 3}
#: Rows to score on. A prompt costs hundreds of passes.
SCORED, SCORED_PROMPTS = 300, 128
#: Steps of a base's own training, and of the tuning before a continuation.
PRETRAIN, TUNING = 300, 300
#: Part of the copies that ask the very same; in the others one word is changed.
SAME = 0.7
#: Part of the words whose replacement a continuation finds changed.
CHANGED = 0.2


@dataclass(frozen=True)
class DataKind:
    """Traits that differ from kind to kind."""

    #: Rows to train on: two or three passes for the time, as validators give it. Prompts: hundreds of passes.
    rows: int
    prompts: int
    #: Words that are asked for, at least and at most.
    words: tuple[int, int] = (2, 8)
    #: Words before them in the prompt, which nothing asks for.
    before: tuple[int, int] = (0, 0)
    #: Part of the words in answers that follow no rule, and of the pairs that are the wrong way round.
    noise: float = 0.1
    #: Part of the rows that ask nearly the same as another one, which may be a row to train on for those to
    #: score on. What is random in the answers differs.
    copies: float = 0.0


KINDS = {
    "easy": DataKind(rows=4000, prompts=2000, words=(4, 7), noise=0.0),
    "noisy": DataKind(rows=5000, prompts=2000, noise=0.35),
    "few": DataKind(rows=240, prompts=160),
    "long": DataKind(rows=1500, prompts=1500, words=(3, 6), before=(24, 48)),
    "copies": DataKind(rows=5000, prompts=2000, copies=0.3),
    "altered": DataKind(rows=5000, prompts=2000),
}


class World:
    """Words, their followers and their replacements."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        chance = random.Random(f"world {seed}")
        self.followers = {word: chance.sample(tiny.WORDS, 4) for word in tiny.WORDS}
        shuffled = chance.sample(tiny.WORDS, len(tiny.WORDS))
        self.replaced = dict(zip(tiny.WORDS, shuffled, strict=True))
        self.wanted = chance.sample(tiny.WORDS, 10)

    def before(self) -> World:
        """The world that a continuation's model was tuned in."""
        other, chance = World(self.seed), random.Random(f"before {self.seed}")
        changed = chance.sample(tiny.WORDS, round(CHANGED * len(tiny.WORDS)))
        moved = [*changed[1:], changed[0]]
        other.replaced |= {word: self.replaced[instead] for word, instead in zip(changed, moved, strict=True)}
        return other

    def sentence(self, chance: random.Random, words: int) -> list[str]:
        made = [chance.choice(tiny.WORDS)]
        while len(made) < words:
            likely = chance.random() < 0.85
            made.append(chance.choice(self.followers[made[-1]] if likely else tiny.WORDS))
        return made

    def dataset(self, task: TaskType) -> DatasetType:
        match task:
            case TaskType.INSTRUCT:
                return InstructDataset(
                    field_instruction="instruct", field_input="input", field_output="output"
                )
            case TaskType.CHAT:
                return ChatDataset(chat_user_reference="human", chat_assistant_reference="gpt")
            case TaskType.DPO:
                return DpoDataset(field_prompt="prompt", field_chosen="chosen", field_rejected="rejected")
            case _:
                rewards = [
                    RewardFunction(reward_func=_WANTED.format(words=self.wanted), reward_weight=0.7),
                    RewardFunction(reward_func=_SHORT, reward_weight=0.3),
                ]
                return GrpoDataset(field_prompt="prompt", reward_functions=rewards)


#: Completions that hold many of some words are rewarded, and so are those of about six words.
_WANTED = """
WORDS = {words!r}

def wanted(completions, **kwargs):
    found = [one.split() for one in completions]
    return [sum(word in WORDS for word in words) / max(len(words), 1) for words in found]
"""
_SHORT = """
def short(completions, **kwargs):
    return [1.0 / (1.0 + abs(len(one.split()) - 6) / 6) for one in completions]
"""


#: What a row asks: one sentence, or one for each turn of a talk.
Question = list[list[str]]


class RowMaker:
    """Rows of one task and kind, in the order of a random stream."""

    def __init__(self, world: World, task: TaskType, kind: DataKind, stream: str) -> None:
        self.world, self.task, self.kind = world, task, kind
        self.chance = random.Random(f"{stream} {world.seed} {task}")
        self.made: list[Question] = []

    def make(
        self, count: int, *, copies: float = 0.0, of: Sequence[Question] | None = None
    ) -> list[dict[str, Any]]:
        """Rows, some of which are copies of what is in `of`, or of each other."""
        return [self._row(asked) for asked in self._questions(count, copies, of)]

    def _questions(self, count: int, copies: float, of: Sequence[Question] | None) -> Iterator[Question]:
        made = self.made
        copied = made if of is None else of
        for _ in range(count):
            if copied and self.chance.random() < copies:
                asked = self.chance.choice(copied)
                made.append(asked if self.chance.random() < SAME else self._changed(asked))
            else:
                made.append([self._asked() for _ in range(self._turns())])
            yield made[-1]

    def _turns(self) -> int:
        return 1 + (self.task is TaskType.CHAT and self.chance.random() < 0.3)

    def _asked(self) -> list[str]:
        return self.world.sentence(self.chance, self.chance.randint(*self.kind.words))

    def _prompt(self, asked: list[str]) -> str:
        """The words that are asked for come last."""
        before = self.chance.randint(*self.kind.before)
        return " ".join([*(self.world.sentence(self.chance, before) if before else ()), *asked])

    def _changed(self, asked: Question) -> Question:
        other = [list(words) for words in asked]
        words = self.chance.choice(other)
        words[self.chance.randrange(len(words))] = self.chance.choice(tiny.WORDS)
        return other

    def _answer(self, asked: list[str]) -> str:
        chance, noise = self.chance, self.kind.noise
        said = [self.world.replaced[word] for word in asked]
        return " ".join(
            ["answer is", *(chance.choice(tiny.WORDS) if chance.random() < noise else word for word in said)]
        )

    def _row(self, asked: Question) -> dict[str, Any]:
        question = self._prompt(asked[0])
        match self.task:
            case TaskType.INSTRUCT:
                return {"instruct": "sum of", "input": question, "output": self._answer(asked[0])}
            case TaskType.CHAT:
                talk = []
                for place, words in enumerate(asked):
                    said = question if place == 0 else self._prompt(words)
                    talk.append({"from": "human", "value": said})
                    talk.append({"from": "gpt", "value": self._answer(words)})
                return {"conversations": talk}
            case TaskType.DPO:
                return {"prompt": question, **self._pair(asked[0])}
            case _:
                return {"prompt": question}

    def _pair(self, asked: list[str]) -> dict[str, str]:
        """Both answers are of the same words: only their order tells them apart."""
        chosen = self._answer(asked)
        words = chosen.split()[2:]
        self.chance.shuffle(words)
        sides = [chosen, "answer is " + " ".join(words)]
        if self.chance.random() < self.kind.noise / 2:
            sides.reverse()
        return {"chosen": sides[0], "rejected": sides[1]}


def rows_of(cell: Cell) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows to train on and those to score on, which are like them. Where the first have copies, these are
    copies of them, too, but never of each other."""
    world, kind = World(cell.seed), KINDS[cell.kind]
    count, scored = (kind.prompts, SCORED_PROMPTS) if cell.task.generates else (kind.rows, SCORED)
    maker = RowMaker(world, cell.task, kind, f"train {cell.name}")
    train = maker.make(count, copies=kind.copies)
    test = RowMaker(world, cell.task, kind, f"test {cell.name}")
    return train, test.make(scored, copies=kind.copies, of=maker.made)


# — bases


def base_model(folder: Path, family: str, seed: int) -> Path:
    """A little model that has read its world's sentences for a while."""
    if folder.exists():
        return folder
    world, chance = World(seed), random.Random(f"base {seed}")
    tokenizer, model = tiny.tokenizer(adds_begin=family == "llama"), tiny.model(family, seed=seed, **SHAPE)
    if family == "qwen":
        # transformers gives it this token, and upstream a row for it, which evaluation refuses.
        tokenizer.add_tokens(["<|endoftext|>"], special_tokens=True)
        model.resize_token_embeddings(len(tokenizer))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.div_(4)  # tiny models have opinions; this one is to form its own

    def batch() -> list[str]:
        said = [" ".join(world.sentence(chance, chance.randint(3, 12))) for _ in range(32)]
        return [one + tokenizer.eos_token for one in said]

    train_on_texts(model, tokenizer, batch, PRETRAIN)
    return _saved(model, tokenizer, folder)


def train_on_texts(model: Any, tokenizer: Any, batch: Callable[[], list[str]], steps: int) -> None:
    """Every token is learned. Some evaluations give no beginning token: a model that never missed it would be
    lost without."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for number in range(steps):
        special = number % 2 == 0
        encoded = tokenizer(batch(), return_tensors="pt", padding=True, add_special_tokens=special)
        mask = encoded["attention_mask"]
        labels = encoded["input_ids"].masked_fill(mask == 0, -100)
        model(input_ids=encoded["input_ids"], attention_mask=mask, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def tuned_model(folder: Path, base: Path, cell: Cell) -> Path:
    """The base after an earlier task of the same kind: what a continuation begins with."""
    tokenizer, model = load_tokenizer(str(base)), tiny.load(base)
    maker = RowMaker(World(cell.seed).before(), cell.task, KINDS[cell.kind], f"earlier {cell.name}")

    def batch() -> list[str]:
        return [_as_chatml(row["conversations"]) for row in maker.make(32)]

    train_on_texts(model, tokenizer, batch, TUNING)
    return _saved(model, tokenizer, folder)


def _as_chatml(talk: list[dict[str, str]]) -> str:
    roles = {"human": "user", "gpt": "assistant"}
    turns = [f"<|im_start|>{roles[turn['from']]}\n{turn['value']}<|im_end|>\n" for turn in talk]
    return "".join(turns)


def altered_model(folder: Path, base: Path, alteration: str, seed: int) -> Path:
    """The base as validators alter one: half of the layers' matrices, never norms or embeddings."""
    model, chance = tiny.load(base), random.Random(f"{alteration} {seed}")
    generator = torch.Generator().manual_seed(seed)
    matrices = [
        weight
        for name, weight in model.named_parameters()
        if weight.dim() == 2 and "embed" not in name and "lm_head" not in name
    ]
    with torch.no_grad():
        for weight in chance.sample(matrices, len(matrices) // 2):
            _alter(weight, alteration, chance, generator)
    return _saved(model, load_tokenizer(str(base)), folder)


def _alter(weight: Any, alteration: str, chance: random.Random, generator: Any) -> None:
    def noise() -> Any:
        return torch.randn(weight.shape, generator=generator) * weight.std()

    match alteration:
        case "noise":
            weight.add_(chance.uniform(0.15, 0.3) * noise())
        case "scaling":
            weight.mul_(chance.uniform(0.5, 1.5))
        case "pruning":
            quantile = torch.quantile(weight.abs(), chance.uniform(0.25, 0.5))
            weight.masked_fill_(weight.abs() < quantile, 0.0)
        case _:
            chosen = torch.rand(weight.shape, generator=generator) < chance.uniform(0.05, 0.1)
            weight.copy_(torch.where(chosen, noise(), weight))


def _saved(model: Any, tokenizer: Any, folder: Path) -> Path:
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def model_of(cell: Cell, folder: Path, bases: Path) -> Path:
    """The model that the cell's task begins with."""
    base = base_model(bases / f"{cell.family}-{cell.seed}", cell.family, cell.seed)
    if cell.type == "continuous":
        base = tuned_model(folder / "tuned", base, cell)
    if cell.alteration is not None:
        return altered_model(folder / "altered", base, cell.alteration, cell.seed)
    return base
