"""Preferences by the logits of answers alone: TRL's loss, gradients and base, from a smaller output layer's
work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from trl import DPOConfig, DPOTrainer

from tests.trainer import tiny
from trainer.axolotl.trainers import PAIR_METRICS, PairTrainer

ROWS = 6


class TheirTrainer(DPOTrainer):  # type: ignore[misc]
    """TRL's, with rows that are encoded."""

    _prepare_dataset = PairTrainer._prepare_dataset


def model_of(kind: str, seed: int) -> Any:
    torch.manual_seed(seed)
    if kind == "gpt2":
        shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 320, "n_positions": 64}
        return GPT2LMHeadModel(GPT2Config(**shape))
    model = tiny.model("llama", seed=seed)
    if kind == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    return model


def trainer_of(trainer: Any, folder: Path, kind: str, **arguments: Any) -> Any:
    rows = [
        {
            "prompt_ids": [5, 6, 7] * at,
            "chosen_ids": [8 + at] * (at + 2),
            "rejected_ids": [30 + at] * (9 - at),
        }
        for at in range(ROWS)
    ]
    made = trainer(
        model=model_of(kind, 3),
        ref_model=None if kind == "lora" else model_of(kind, 5),
        args=DPOConfig(
            str(folder),
            use_cpu=True,
            bf16=False,
            report_to=[],
            per_device_train_batch_size=ROWS,
            gradient_checkpointing=False,
            **arguments,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny.tokenizer(),
    )
    if kind == "lora":  # TRL remembers the adapter as it is given
        torch.manual_seed(4)
        with torch.no_grad():
            for weight in made.model.parameters():
                if weight.requires_grad:
                    weight += 0.3 * torch.randn_like(weight)
    return made


def step(trainer: Any) -> tuple[float, list[Tensor], dict[str, float], list[int]]:
    """Loss, gradients, what is logged, and the positions that each pass through an output layer had."""
    seen = list[int]()
    hooks = [
        model.get_output_embeddings().register_forward_hook(
            lambda layer, given, logits: seen.append(logits.shape[0] * logits.shape[1])
        )
        for model in (trainer.model, trainer.ref_model)
        if model is not None
    ]
    inputs = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model.train(), inputs)
    loss.backward()
    gradients = [weight.grad for weight in trainer.model.parameters() if weight.grad is not None]
    trainer.log({})
    for hook in hooks:
        hook.remove()
    logged = trainer.state.log_history[-1]
    return float(loss), gradients, {name: logged[name] for name in PAIR_METRICS}, seen


@pytest.mark.parametrize("ready", [False, True], ids=["beside", "precomputed"])
@pytest.mark.parametrize("kind", ["llama", "lora", "gpt2"])
def test_loss_gradients_and_metrics_are_trls(tmp_path: Path, kind: str, ready: bool) -> None:
    theirs = trainer_of(TheirTrainer, tmp_path / "theirs", kind, precompute_ref_log_probs=ready)
    loss, gradients, metrics, seen = step(theirs)
    ours = trainer_of(PairTrainer, tmp_path / "ours", kind, precompute_ref_log_probs=ready)
    same, others, own, fewer = step(ours)
    # The first row has no prompt, and nothing predicts the first tokens of its answers.
    answers = sum(at + 2 + 9 - at for at in range(ROWS)) - 2
    assert seen == [seen[0]] * (1 if ready else 2)
    assert answers < seen[0]
    assert fewer == [answers] * len(seen)
    assert loss != pytest.approx(0.6931, abs=1e-3), "the model is not the base"
    assert same == pytest.approx(loss, rel=1e-5)
    assert own == pytest.approx(metrics, rel=1e-4)
    assert len(others) == len(gradients)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


def test_the_base_that_is_computed_beforehand_is_trls(tmp_path: Path) -> None:
    tables = [
        trainer_of(kind, tmp_path / kind.__name__, "llama", precompute_ref_log_probs=True).train_dataset
        for kind in (TheirTrainer, PairTrainer)
    ]
    for name in ("ref_chosen_logps", "ref_rejected_logps"):
        assert tables[1][name] == pytest.approx(list(tables[0][name]), rel=1e-5)


@pytest.mark.parametrize(
    "arguments",
    [
        {"loss_type": ["ipo"]},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
        {"ld_alpha": 0.5},
        {"use_weighting": True},
        {"f_divergence_type": "forward_kl"},
    ],
    ids=lambda arguments: next(iter(arguments)) + str(next(iter(arguments.values()))),
)
def test_what_needs_more_than_the_answers_is_left_to_trl(tmp_path: Path, arguments: dict[str, Any]) -> None:
    loss, gradients, _, seen = step(trainer_of(TheirTrainer, tmp_path / "theirs", "llama", **arguments))
    same, others, _, all_of_them = step(trainer_of(PairTrainer, tmp_path / "ours", "llama", **arguments))
    assert all_of_them[0] == seen[0]
    assert same == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(others, gradients)


def test_an_evaluation_has_all_logits(tmp_path: Path) -> None:
    trainer = trainer_of(PairTrainer, tmp_path, "llama")
    inputs = next(iter(trainer.get_train_dataloader()))
    trainer.compute_loss(trainer.model.train(), inputs)
    _, logits, _ = trainer.prediction_step(trainer.model.eval(), inputs, prediction_loss_only=False)
    assert logits.shape[:2] == inputs["input_ids"].shape
