"""Instruct and chat losses: the same as the validator's loop, batched."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from tests.trainer import tiny
from trainer.inputs.tokens import IGNORED, LabelledRow
from trainer.scoring import held_out
from trainer.scoring.held_out import row_losses


def labelled(count: int, seed: int = 0, longest: int = 60) -> list[LabelledRow]:
    """Answers at the end, in the middle and in several places."""
    chance = random.Random(seed)
    rows = []
    for _ in range(count):
        ids = [chance.randrange(5, 400) for _ in range(chance.randint(2, longest))]
        labels = [one if chance.random() < 0.5 else IGNORED for one in ids]
        labels[-1] = ids[-1]
        rows.append(LabelledRow(ids, labels))
    return rows


def one_by_one(model: Any, row: LabelledRow) -> float:
    """As validators do: batch of one, the model's own loss."""
    ids, labels = torch.tensor([list(row.ids)]), torch.tensor([list(row.labels)])
    with torch.no_grad():
        return float(model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss)


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("max_tokens", [1, 64, 100_000])
def test_batched_losses_are_those_of_every_row_by_itself(kind: str, max_tokens: int) -> None:
    model, rows = tiny.model(kind), labelled(40)
    losses = row_losses(model, rows, 4, max_tokens=max_tokens).rows
    assert sorted(losses) == list(range(40))
    for place, row in enumerate(rows):
        assert losses[place] == pytest.approx(one_by_one(model, row), rel=1e-4)


def test_the_score_is_what_the_evaluations_own_trainer_reports(tmp_path: Path) -> None:
    model, rows = tiny.model(), labelled(12)
    data = Dataset.from_list([{"input_ids": list(row.ids), "labels": list(row.labels)} for row in rows])
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_eval_batch_size=1, report_to="none", use_cpu=True
    )
    theirs = Trainer(model=model, args=arguments, eval_dataset=data).evaluate()["eval_loss"]
    ours = row_losses(model, rows, 4).rows
    assert sum(ours.values()) / len(ours) == pytest.approx(theirs, rel=1e-4)


def test_a_batch_that_does_not_fit_the_memory_is_taken_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows, real, sizes = tiny.model(), labelled(13), held_out.predict, []

    def small(*arguments: Any) -> Any:
        sizes.append(len(arguments[1]))
        if sizes[-1] > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*arguments)

    whole = row_losses(model, rows, 4).rows
    monkeypatch.setattr(held_out, "predict", small)
    assert row_losses(model, rows, 4).rows == pytest.approx(whole, rel=1e-4)
    assert sizes[0] == 13


def test_a_row_that_does_not_fit_by_itself_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(held_out, "predict", never)
    with pytest.raises(torch.OutOfMemoryError):
        row_losses(tiny.model(), labelled(2), 4)


def test_the_kl_is_the_mean_over_the_labels_own_positions_and_leaves_the_losses_alone() -> None:
    model, base, rows = tiny.model(seed=1), tiny.model(seed=2), labelled(9)
    losses = row_losses(model, rows, 4, reference=base, kl=True)
    assert losses.rows == pytest.approx(row_losses(model, rows, 4).rows, rel=1e-4)
    total, tokens = 0.0, 0
    for row in rows:
        ids = torch.tensor([list(row.ids)])
        with torch.no_grad():
            mine = model(input_ids=ids).logits[0].log_softmax(-1)
            theirs = base(input_ids=ids).logits[0].log_softmax(-1)
        places = [at for at, label in enumerate(row.labels) if label != IGNORED]
        apart = (mine.exp() * (mine - theirs)).sum(-1)[places]
        total, tokens = total + float(apart.sum()), tokens + len(places)
    assert losses.kl_tokens == tokens
    assert losses.kl_total / losses.kl_tokens == pytest.approx(total / tokens, rel=1e-4)


def test_scoring_leaves_a_model_in_training_mode_as_it_was() -> None:
    model = tiny.model().train()
    row_losses(model, labelled(3), 4)
    assert model.training
    assert all(weight.requires_grad for weight in model.parameters())
