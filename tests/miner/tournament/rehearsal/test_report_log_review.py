"""What of a public log should not be there."""

from __future__ import annotations

import pytest

from miner.tournament.rehearsal.report import LogFindingKind, review_log, secret_values

TOKEN = "hf_" + "a1" * 17


@pytest.mark.parametrize(
    "line",
    [
        "{'loss': 2.1, 'grad_norm': 0.4, 'learning_rate': 2e-05, 'epoch': 0.1}",
        '    "lora_r": 32,',
        "micro_batch_size: 4",
        "INFO trainer: plan: lr 5e-5",
        "krea2:  10%|#   | 20/212 [00:03<00:30, 1.2s/it, lr: 5.0e-05 loss: 1.0e-01]",
        "network_dim = 64",
        "kohya, 1,200 steps",
        "--learning_rate=1e-4",
        "--learning-rate 1e-4",
        "max_grad_norm: 1.0",
        "num_train_epochs=3",
        "lora alpha 64",
        "Epoch 1/3: loss 2.1",
    ],
)
def test_a_setting_with_its_value_shows_competitors_the_plan(line: str) -> None:
    (found,) = review_log(["begin", line])
    assert (found.kind, found.line) == (LogFindingKind.PLAN, 2)


@pytest.mark.parametrize(
    "line",
    [
        "INFO trainer: rows are read and tokenised",
        "INFO trainer: 40 % of the time is over",
        "the learning rate is chosen",
        "Loading weights: 100%|####| 21/21 [00:00<00:00]",
        "INFO trainer: finished: a submission is in its place",
    ],
)
def test_events_without_values_are_fine(line: str) -> None:
    assert not review_log([line])


def test_a_secret_is_found_by_its_form_or_its_value_and_not_repeated() -> None:
    lines = [f"token {TOKEN}", "key correct-horse", "https://user:pass@example.com/x"]
    found = review_log(
        lines, secret_values({"WANDB_API_KEY": "correct-horse", "HOME": "/root", "A_TOKEN": "x"})
    )
    assert [one.kind for one in found] == [LogFindingKind.SECRET] * 3
    assert not any("horse" in one.text or TOKEN in one.text or "pass" in one.text for one in found)
