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
from trainer.scoring import forward

ROWS = 6
#: Of attention and of the output layer itself.
ADAPTER = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
KINDS = ("llama", "gpt2", "adapter", "continued adapter")


class TheirTrainer(DPOTrainer):  # type: ignore[misc]
    """TRL's, with rows that are encoded."""

    _prepare_dataset = PairTrainer._prepare_dataset


def model_of(kind: str, seed: int) -> Any:
    torch.manual_seed(seed)
    if kind == "gpt2":
        shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 320, "n_positions": 64}
        return GPT2LMHeadModel(GPT2Config(**shape))
    model = tiny.model("llama", seed=seed)
    return get_peft_model(model, ADAPTER) if kind == "continued adapter" else model


def trainer_of(trainer: Any, folder: Path, kind: str, **arguments: Any) -> Any:
    rows = [
        {
            "prompt_ids": [5, 6, 7] * at,
            "chosen_ids": [8 + at] * (at + 2),
            "rejected_ids": [30 + at] * (9 - at),
        }
        for at in range(ROWS)
    ]
    options = {"gradient_checkpointing": False, "per_device_train_batch_size": ROWS} | arguments
    made = trainer(
        model=model_of(kind, 3),
        ref_model=None if "adapter" in kind else model_of(kind, 5),
        args=DPOConfig(str(folder), use_cpu=True, bf16=False, report_to=[], **options),
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny.tokenizer(),
        # Axolotl leaves it to TRL to add the adapter. One that is there already is trained on from.
        peft_config=ADAPTER if kind == "adapter" else None,
    )
    if "adapter" in kind:
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
@pytest.mark.parametrize("kind", KINDS)
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


def test_recomputed_layers_and_logits_in_pieces_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, gradients, _, _ = step(trainer_of(TheirTrainer, tmp_path / "theirs", "adapter"))
    monkeypatch.setattr(forward, "PIECE", 4 * 320 * 7)  # of seven tokens
    ours = trainer_of(PairTrainer, tmp_path / "ours", "adapter", gradient_checkpointing=True)
    same, others, _, _ = step(ours)
    assert same == pytest.approx(loss, rel=1e-5)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


def test_metrics_are_means_over_the_passes_since_the_last_log(tmp_path: Path) -> None:
    trainer = trainer_of(PairTrainer, tmp_path, "llama", per_device_train_batch_size=2)
    trainer.model.train()
    margins = list[float]()
    for inputs in trainer.get_train_dataloader():
        trainer.compute_loss(trainer.model, inputs)
        margins.append(float(trainer.pair_means[-1][PAIR_METRICS.index("rewards/margins")]))
    trainer.model.eval()
    trainer.log({"eval_loss": 1.0})  # an evaluation between two logs of the training
    trainer.model.train()
    trainer.log({"loss": 1.0})
    assert len(margins) == ROWS // 2
    assert trainer.state.log_history[-1]["rewards/margins"] == pytest.approx(sum(margins) / len(margins))
    assert "eval_rewards/margins" not in trainer.state.log_history[-2]


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
