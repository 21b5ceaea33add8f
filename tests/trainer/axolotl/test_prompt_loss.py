"""Prompts that are learned a little: the loss by hand, of both engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import Trainer, TrainingArguments

from core.domain.choices import Attention
from core.domain.tasks import TaskType
from tests.core.recipes.cases import text_plan
from tests.trainer import tiny
from tests.trainer.native import tiny as native_tiny
from trainer.axolotl.micro_batches import MicroBatchSplitter
from trainer.axolotl.prompt_loss import PromptLoss
from trainer.inputs.tokens import IGNORED
from trainer.native.batches import BatchLayout, collate
from trainer.native.model import LossModel
from trainer.native.token_file import write_rows

WEIGHT = 0.05
#: Prompt and answer of each row.
SIZES = ((9, 3), (20, 4), (14, 2))


def rows() -> list[tuple[list[int], list[int]]]:
    """Tokens and labels."""
    chance = torch.Generator().manual_seed(3)
    made = []
    for prompt, answer in SIZES:
        ids = torch.randint(5, 300, (prompt + answer,), generator=chance).tolist()
        made.append((ids, [IGNORED] * prompt + ids[prompt:]))
    return made


def by_hand(model: Any) -> tuple[Tensor, Tensor]:
    """Of each row the summed loss of the answer, and of the prompt but for its first token."""
    answers, prompts = [], []
    for (ids, _), (prompt, _) in zip(rows(), SIZES, strict=True):
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
        prompts.append(losses[: prompt - 1].sum())
        answers.append(losses[prompt - 1 :].sum())
    return torch.stack(answers), torch.stack(prompts)


def padded(left: bool = False) -> dict[str, Tensor]:
    """As a collator without packing makes it."""
    width = max(map(sum, SIZES)) + 2

    def filled(values: list[int], filler: int) -> list[int]:
        padding = [filler] * (width - len(values))
        return padding + values if left else values + padding

    return {
        "input_ids": torch.tensor([filled(ids, 4) for ids, _ in rows()]),
        "labels": torch.tensor([filled(labels, IGNORED) for _, labels in rows()]),
        "attention_mask": torch.tensor([filled([1] * len(ids), 0) for ids, _ in rows()]),
    }


def packed() -> dict[str, Tensor]:
    """As Axolotl's collator packs: positions that begin again, padding as a row of its own, no mask."""
    ids, labels, places = [], list[int](), list[int]()
    for row, marked in [*rows(), ([4] * 5, [IGNORED] * 5)]:
        ids, labels, places = [*ids, *row], [*labels, *marked], [*places, *range(len(row))]
    return {
        "input_ids": torch.tensor([ids]),
        "labels": torch.tensor([labels]),
        "position_ids": torch.tensor([places]),
    }


def trainer_of(folder: Path, model: Any) -> Any:
    arguments = TrainingArguments(str(folder), use_cpu=True, report_to=[])
    trainer = Trainer(model, arguments)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def loss_of(trainer: Any, inputs: dict[str, Tensor], count: Any = None) -> float:
    return float(trainer.compute_loss(trainer.model, dict(inputs), num_items_in_batch=count))


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("inputs", [padded(), packed()], ids=["padded", "packed"])
def test_axolotls_loss_is_the_answers_and_a_little_of_the_prompts(
    tmp_path: Path, inputs: dict[str, Tensor], adapted: bool
) -> None:
    model = get_peft_model(tiny.model(), LoraConfig(target_modules=["q_proj"])) if adapted else tiny.model()
    with torch.no_grad():
        answers, prompts = by_hand(model)
    trainer, warnings = trainer_of(tmp_path, model), list[str]()
    learned = sum(answer for _, answer in SIZES)
    assert loss_of(trainer, inputs) == pytest.approx(float(answers.sum()) / learned, rel=1e-5)
    PromptLoss(trainer, WEIGHT, warnings.append)
    summed = float(answers.sum() + WEIGHT * prompts.sum())
    assert loss_of(trainer, inputs) == pytest.approx(summed / learned, rel=1e-5)
    assert loss_of(trainer, inputs, torch.tensor(50)) == pytest.approx(summed / 50, rel=1e-5)
    trainer.model.eval()
    assert loss_of(trainer, inputs) == pytest.approx(float(answers.sum()) / learned, rel=1e-5)
    assert not warnings


@pytest.mark.parametrize("counted", [True, False])
def test_the_parts_of_a_batch_add_up_to_the_whole(tmp_path: Path, counted: bool) -> None:
    trainer, plan = trainer_of(tmp_path, tiny.model()), text_plan(TaskType.INSTRUCT)
    plan = plan.model_copy(update={"batch": plan.batch.model_copy(update={"micro": len(SIZES)})})
    trainer.model_accepts_loss_kwargs = counted
    count = torch.tensor(9) if counted else None
    splitter = MicroBatchSplitter(trainer, plan)
    PromptLoss(trainer, WEIGHT, pytest.fail)
    whole = float(trainer.training_step(trainer.model, padded(), count))
    assert splitter.regroup(1) == (1, "")
    assert float(trainer.training_step(trainer.model, padded(), count)) == pytest.approx(whole, rel=1e-5)


def test_a_first_token_after_padding_is_not_learned(tmp_path: Path) -> None:
    """From the padding before it."""
    losses = []
    for inputs in (padded(), padded(left=True)):
        trainer = trainer_of(tmp_path, tiny.model())
        PromptLoss(trainer, WEIGHT, pytest.fail)
        places = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        losses.append(loss_of(trainer, inputs if not losses else inputs | {"position_ids": places}))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_model_with_a_loss_of_its_own_is_said_once(tmp_path: Path) -> None:
    trainer, warnings = trainer_of(tmp_path, tiny.model()), list[str]()
    own = type(trainer.model).forward

    def forward(*arguments: Any, labels: Any = None, **named: Any) -> Any:
        outputs = own(trainer.model, *arguments, **named)
        outputs["loss"] = outputs.logits.mean()
        return outputs

    trainer.model.forward = forward
    PromptLoss(trainer, WEIGHT, warnings.append)
    for _ in range(2):
        loss_of(trainer, padded())
    assert len(warnings) == 1


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("by_row", [False, True])
def test_the_native_loss_is_the_same_by_tokens_or_by_rows(
    tmp_path: Path, by_row: bool, together: bool
) -> None:
    model = tiny.model()
    file = write_rows(
        tmp_path / "rows", 300, [(ids, [label != IGNORED for label in labels]) for ids, labels in rows()]
    )
    micro = ((0, 1), (2,)) if together else ((0,), (1,), (2,))
    layout = BatchLayout(packed=together, by_row=by_row, prompt_weight=WEIGHT)
    with torch.no_grad():
        answers, prompts = by_hand(model)
        batch = collate(file, micro, layout)
        loss = float(LossModel(model, Attention.SDPA)(batch))
    lengths = torch.tensor([answer for _, answer in SIZES]) if by_row else 1
    expected = float(((answers + WEIGHT * prompts) / lengths).sum())
    assert loss == pytest.approx(expected, rel=1e-5)
    assert batch.count == (3 if by_row else 9)
    assert batch.learned == 9, "tokens to take the KL at"


def test_what_is_learned_anyway_keeps_its_weight(tmp_path: Path) -> None:
    rows_of = native_tiny.rows(tmp_path / "rows", 8)
    plain = collate(rows_of, ((0,), (1,)), BatchLayout(by_row=True))
    weighed = collate(rows_of, ((0,), (1,)), BatchLayout(by_row=True, prompt_weight=WEIGHT))
    learned = plain.targets != IGNORED
    assert (weighed.targets != IGNORED).sum() > learned.sum()
    assert plain.weights is not None
    assert weighed.weights is not None
    torch.testing.assert_close(weighed.weights[learned], plain.weights[learned])
