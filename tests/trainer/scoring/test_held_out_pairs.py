"""DPO losses: TRL's own, batched."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from core.domain.evaluation import Era, evaluation_rules
from core.domain.tasks import DpoDataset
from tests.trainer import tiny
from trainer.axolotl.trainers import PairTrainer
from trainer.inputs.dpo_grpo import cut_pair, pair_rows
from trainer.inputs.tables import PAIR_COLUMNS
from trainer.inputs.tokens import PairRow
from trainer.scoring.held_out import pair_log_probs, pair_losses

DATASET = DpoDataset(field_prompt="prompt", field_chosen="chosen", field_rejected="rejected")


def pairs(count: int, seed: int = 0) -> list[PairRow]:
    chance = random.Random(seed)

    def some(most: int) -> list[int]:
        return [chance.randrange(5, 400) for _ in range(chance.randint(1, most))]

    return [PairRow(some(20), some(30), some(30)) for _ in range(count)]


def one_by_one(model: Any, prompt: Any, answer: Any) -> float:
    ids = torch.tensor([[*prompt, *answer]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits.float().log_softmax(-1)[0]
    return sum(float(logits[at - 1, ids[0, at]]) for at in range(len(prompt), ids.shape[1]))


@pytest.mark.parametrize("max_tokens", [1, 128, 100_000])
def test_batched_log_probs_are_those_of_every_answer_by_itself(max_tokens: int) -> None:
    model, rows = tiny.model(), pairs(15)
    log_probs = pair_log_probs(model, rows, 4, max_tokens=max_tokens)
    for place, row in enumerate(rows):
        assert log_probs[place].chosen == pytest.approx(one_by_one(model, row.prompt, row.chosen), rel=1e-4)
        assert log_probs[place].rejected == pytest.approx(
            one_by_one(model, row.prompt, row.rejected), rel=1e-4
        )


def arguments(folder: Path) -> DPOConfig:
    return DPOConfig(
        output_dir=str(folder),
        per_device_eval_batch_size=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        beta=0.1,
        max_length=512,
    )


def test_the_score_is_what_trl_reports_for_the_same_rows(tmp_path: Path) -> None:
    """The evaluation of tournaments: strings in, TRL's own loss out."""
    folder = tiny.save(tmp_path / "model")
    tokenizer, data = tiny.tokenizer(adds_begin=True), tiny.pair_rows(12)
    model, base = tiny.model(seed=5), tiny.load(folder)
    theirs = DPOTrainer(
        model=model,
        ref_model=base,
        args=arguments(tmp_path),
        train_dataset=Dataset.from_list(data[:2]),
        eval_dataset=Dataset.from_list(data),
        processing_class=tokenizer,
    ).evaluate()["eval_loss"]
    rows = list(pair_rows(DATASET, data, tokenizer, evaluation_rules(Era.TOURNAMENTS)))
    losses = pair_losses(pair_log_probs(model, rows, 4), pair_log_probs(base, rows, 4))
    assert sum(losses.values()) / len(losses) == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("era", Era)
def test_axolotls_trainer_scores_the_encoded_rows_alike(tmp_path: Path, era: Era) -> None:
    """What training sees during its own evaluations is what we score."""
    folder, rules = tiny.save(tmp_path / "model"), evaluation_rules(era)
    tokenizer, data = tiny.tokenizer(adds_begin=True), tiny.pair_rows(10, length=30)
    rows = [row for one in pair_rows(DATASET, data, tokenizer, rules) if (row := cut_pair(one, rules, 40))]
    table = Dataset.from_list([dict(zip(PAIR_COLUMNS, map(list, row), strict=True)) for row in rows])
    model, base = tiny.model(seed=5), tiny.load(folder)
    theirs = PairTrainer(
        model=model,
        ref_model=base,
        args=arguments(tmp_path),
        train_dataset=table,
        eval_dataset=table,
        processing_class=tokenizer,
    ).evaluate()["eval_loss"]
    losses = pair_losses(pair_log_probs(model, rows, 4), pair_log_probs(base, rows, 4))
    assert sum(losses.values()) / len(losses) == pytest.approx(theirs, rel=1e-4)


def test_a_model_that_learned_nothing_has_a_loss_of_ln_2() -> None:
    log_probs = pair_log_probs(tiny.model(), pairs(4), 4)
    assert list(pair_losses(log_probs, log_probs).values()) == pytest.approx([math.log(2)] * 4)


def test_answers_are_summed_and_not_averaged() -> None:
    model = tiny.model()
    short = PairRow([7, 8], [9], [10])
    long = PairRow([7, 8], [9, 9, 9, 9], [10])
    log_probs = pair_log_probs(model, [short, long], 4)
    assert log_probs[1].chosen < log_probs[0].chosen
