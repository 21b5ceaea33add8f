"""Logits of labelled positions only: the same loss and gradients, from a smaller output layer's work."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from axolotl.monkeypatch.loss import chunked
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from core.domain.tasks import TaskType
from tests.core.recipes.cases import text_plan
from tests.trainer import tiny
from trainer.axolotl.answer_logits import MULTIPLE, labelled, skip_other_logits
from trainer.axolotl.micro_batches import MicroBatchSplitter
from trainer.axolotl.patches import add_kl
from trainer.inputs.tokens import IGNORED

#: Prompt and answer of each row.
SIZES = ((9, 3), (20, 4), (14, 2))
LABELS = sum(answer for _, answer in SIZES)
CONFIG = SimpleNamespace(trainer_cls=None, liger_fused_linear_cross_entropy=None, cut_cross_entropy=None)


def rows() -> list[tuple[list[int], list[int]]]:
    """Tokens and labels."""
    chance = torch.Generator().manual_seed(3)
    made = []
    for prompt, answer in SIZES:
        ids = torch.randint(5, 300, (prompt + answer,), generator=chance).tolist()
        made.append((ids, [IGNORED] * prompt + ids[prompt:]))
    return made


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


def model_of(kind: str) -> Any:
    torch.manual_seed(5)
    if kind == "gpt2":
        shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 320, "n_positions": 64}
        return GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    model = tiny.model("llama")
    if kind == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    return model


def step(trainer: Any, inputs: dict[str, Tensor], count: Any) -> tuple[float, list[Tensor], list[int]]:
    """Loss, gradients, and how many positions each pass through the output layer had."""
    seen = list[int]()
    model = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    hook = model.get_output_embeddings().register_forward_hook(
        lambda layer, arguments, logits: seen.append(logits.shape[0] * logits.shape[1])
    )
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, dict(inputs), num_items_in_batch=count)
    loss.backward()
    hook.remove()
    gradients = [weight.grad.clone() for weight in trainer.model.parameters() if weight.grad is not None]
    return float(loss), gradients, seen


@pytest.mark.parametrize("count", [None, torch.tensor(17)])
@pytest.mark.parametrize("inputs", [padded(), padded(left=True), packed()], ids=["right", "left", "packed"])
@pytest.mark.parametrize("kind", ["llama", "lora", "gpt2"])
def test_loss_and_gradients_are_those_of_all_logits(
    tmp_path: Path, kind: str, inputs: dict[str, Tensor], count: Any
) -> None:
    trainer = trainer_of(tmp_path, model_of(kind))
    loss, gradients, seen = step(trainer, inputs, count)
    assert seen == [inputs["labels"].numel()]
    assert skip_other_logits(trainer, CONFIG)
    same, others, fewer = step(trainer, inputs, count)
    assert fewer == [MULTIPLE], "rather than all, in batches that are larger than this one"
    assert same == pytest.approx(loss, rel=1e-5)
    assert len(others) == len(gradients)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


def positions_of(model: Any) -> list[int]:
    """How many positions each pass through the output layer has, from now on."""
    seen = list[int]()
    model.get_output_embeddings().register_forward_hook(
        lambda layer, given, logits: seen.append(logits.shape[0] * logits.shape[1])
    )
    return seen


def moved(model: Any) -> Any:
    """Away from the one that is trained."""
    chance = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=chance)
    return model.eval()


def test_the_base_reads_packed_rows_apart(tmp_path: Path) -> None:
    """With a cache it would not, and models are saved with one."""
    losses = []
    for inputs in (padded(), packed()):
        trainer, base = trainer_of(tmp_path, model_of("llama")), moved(model_of("llama"))
        assert base.config.use_cache
        add_kl(trainer, 5.0, base, lambda labels: 1.0, skip_other_logits(trainer, CONFIG))
        losses.append(step(trainer, inputs, None)[0])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_the_base_under_an_adapter_is_read_without_dropout_and_noise(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, model_of("lora"))
    add_kl(trainer, 1.0, None, lambda labels: 1.0, skip_other_logits(trainer, CONFIG))
    seen = list[bool]()
    trainer.model.get_base_model().model.register_forward_hook(
        lambda module, given, found: seen.append(module.training)
    )
    step(trainer, padded(), None)
    assert seen == [True, False]
    assert all(module.training for module in trainer.model.modules())


@pytest.mark.parametrize("count", [None, torch.tensor(17)])
@pytest.mark.parametrize("micro", [3, 1])
@pytest.mark.parametrize("inputs", [padded(), padded(left=True), packed()], ids=["right", "left", "packed"])
@pytest.mark.parametrize("kind", ["llama", "lora", "gpt2"])
def test_with_a_kl_the_labels_own_positions_are_there_too(
    tmp_path: Path, kind: str, inputs: dict[str, Tensor], micro: int, count: Any
) -> None:
    """At the labels the KL compares both models; before them the labels are predicted."""
    inputs = {**inputs, "labels": inputs["labels"].clone()}
    inputs["labels"][0, 0] = inputs["input_ids"][0, 0]  # predicted by nothing
    found = []
    for cut in (False, True):
        trainer = trainer_of(tmp_path, model_of(kind))
        base = None if kind == "lora" else moved(model_of(kind))
        read = positions_of(base) if base is not None else []
        plan = text_plan(TaskType.INSTRUCT)
        plan = plan.model_copy(update={"batch": plan.batch.model_copy(update={"micro": len(SIZES)})})
        splitter = MicroBatchSplitter(trainer, plan)
        answers = skip_other_logits(trainer, CONFIG) if cut else None
        add_kl(trainer, 0.7, base, splitter.label_share, answers)
        plain, _, seen = step(trainer, inputs, count)
        seen += read
        if len(inputs["input_ids"]) > 1:
            trainer.training_step(trainer.model, dict(inputs))
            splitter.regroup(micro)
        trainer.model.zero_grad()
        loss = float(trainer.training_step(trainer.model, dict(inputs)))
        gradients = [weight.grad.clone() for weight in trainer.model.parameters() if weight.grad is not None]
        found.append((plain, loss, gradients, seen[:2]))
    (plain, loss, gradients, seen), (same, again, others, fewer) = found
    assert seen == 2 * [inputs["labels"].numel()]
    assert fewer == [MULTIPLE, LABELS + 1], "of the model and of the base"
    assert [same, again] == pytest.approx([plain, loss], rel=1e-5)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


def test_in_smaller_passes_the_losses_still_add_up(tmp_path: Path) -> None:
    trainer, plan = trainer_of(tmp_path, model_of("llama")), text_plan(TaskType.INSTRUCT)
    plan = plan.model_copy(update={"batch": plan.batch.model_copy(update={"micro": len(SIZES)})})
    splitter = MicroBatchSplitter(trainer, plan)
    assert skip_other_logits(trainer, CONFIG)
    whole = float(trainer.training_step(trainer.model, padded()))
    assert splitter.regroup(1) == (1, "")
    assert float(trainer.training_step(trainer.model, padded())) == pytest.approx(whole, rel=1e-5)


def test_outside_of_training_all_logits_are_there(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, model_of("llama"))
    skip_other_logits(trainer, CONFIG)
    inputs = padded()
    trainer.model.eval()
    _, outputs = trainer.compute_loss(trainer.model, dict(inputs), return_outputs=True)
    assert outputs["logits"].shape[:2] == inputs["labels"].shape
    trainer.model.train()
    trainer.compute_loss(trainer.model, dict(inputs))
    free = trainer.model(input_ids=inputs["input_ids"], labels=inputs["labels"])
    assert free.logits.shape[:2] == inputs["labels"].shape, "only within the trainer's own loss"


def test_positions_are_filled_up_so_that_compiled_parts_keep_their_sizes() -> None:
    for learned, filled in ((0, 64), (1, 64), (64, 64), (65, 128)):
        labels = torch.full((3, 40), IGNORED)
        flat = [(row, column) for row in range(3) for column in range(1, 40)][:learned]
        for row, column in flat:
            labels[row, column] = 100 * row + column
        labels[:, 0] = 7  # nothing predicts it
        places, targets = labelled(labels)
        assert len(places) == len(targets) == filled
        assert places[:learned].tolist() == [40 * row + column - 1 for row, column in flat]
        assert targets[:learned].tolist() == [100 * row + column for row, column in flat]
        assert (targets[learned:] == IGNORED).all()


@pytest.mark.parametrize("answers", [0, 1, 9, 40])
def test_axolotls_loss_by_chunks_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: int
) -> None:
    """As it is computed; compiled it needs a C++ compiler."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    trainer = trainer_of(tmp_path, model_of("llama"))
    trainer.model.loss_function = chunked.get_causal_lm_loss()
    inputs = padded()
    labels = torch.full_like(inputs["labels"], IGNORED)
    labels.view(-1)[5 : 5 + answers] = inputs["input_ids"].view(-1)[5 : 5 + answers]
    losses = []
    for changed in (False, True):
        assert not changed or skip_other_logits(trainer, CONFIG)
        loss, gradients, _ = step(trainer, {**inputs, "labels": labels}, torch.tensor(17))
        losses.append((loss, [gradient.abs().sum().item() for gradient in gradients]))
    assert losses[1][0] == pytest.approx(losses[0][0], rel=1e-5)
    assert losses[1][1] == pytest.approx(losses[0][1], rel=1e-4, abs=1e-6)


def test_rows_without_anything_to_learn_cost_nothing_and_change_nothing(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, model_of("llama"))
    skip_other_logits(trainer, CONFIG)
    inputs = {**padded(), "labels": torch.full_like(padded()["labels"], IGNORED)}
    loss, gradients, _ = step(trainer, inputs, torch.tensor(17))
    assert loss == 0.0
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("changed", ["smoothing", "own loss", "compiled", "another loss", "fused", "trainer"])
def test_whatever_else_reads_the_logits_gets_them_all(tmp_path: Path, changed: str) -> None:
    trainer, config = trainer_of(tmp_path, model_of("llama")), SimpleNamespace(**vars(CONFIG))
    if changed == "fused":
        config.liger_fused_linear_cross_entropy = True
    elif changed == "trainer":
        config.trainer_cls = "somewhere.Trainer"
    elif changed == "smoothing":
        trainer.label_smoother = object()
    elif changed == "own loss":
        trainer.compute_loss_func = lambda *arguments: 0.0
    elif changed == "compiled":
        trainer.args = SimpleNamespace(torch_compile=True)
    else:
        trainer.model.loss_function = lambda logits, labels, vocab_size, **named: logits.mean()
    compute = trainer.compute_loss
    assert not skip_other_logits(trainer, config)
    assert trainer.compute_loss == compute
