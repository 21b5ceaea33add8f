"""GRPO's loss with the evaluation's own KL, on prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from core.recipes.axolotl.recipe import BASE_ONLY
from tests.trainer import tiny
from tests.trainer.axolotl.test_trainers_prompts import ROWS, gradients_of, made, words
from tests.trainer.forks import ForkServer
from tests.trainer.sharding import together
from trainer.axolotl.prompt_kl import add_prompt_kl, left_aligned, prompt_counts, prompt_kl
from trainer.axolotl.trainers import PromptTrainer
from trainer.scoring import generation


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model") / "tiny")


def changed(trainer: Any) -> Any:
    """The trainer, its model moved away from the base."""
    torch.manual_seed(4)
    with torch.no_grad():
        for weight in trainer.model.parameters():
            if weight.requires_grad:
                weight.add_(0.05 * torch.randn_like(weight))
    return trainer


def encoded(prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """As TRL hands prompts over: padded at their beginning."""
    tokens = tiny.tokenizer()(prompts, padding=True, padding_side="left", return_tensors="pt")
    return tokens["input_ids"], tokens["attention_mask"]


@pytest.mark.parametrize("adapter", [False, True])
def test_it_is_what_the_evaluation_takes_off(folder: Path, adapter: bool) -> None:
    trainer = changed(made(PromptTrainer, folder, [words], adapter=adapter))
    base = None if adapter else tiny.load(folder).eval()
    prompts = [str(row["prompt"]) for row in ROWS[:5]]
    with torch.no_grad():
        found = prompt_kl(trainer, trainer.model, base, *encoded([*prompts, *prompts, prompts[0]]))
        each = [
            *generation.prompt_kl(trainer.model, base, prompts, tiny.tokenizer(), None),
            *generation.prompt_kl(trainer.model, base, [*prompts, prompts[0]], tiny.tokenizer(), None),
        ]
    assert sum(each) > 0.01
    assert float(found) == pytest.approx(sum(each) / len(each), rel=1e-4)


def test_only_the_tokens_that_evaluation_reads_count() -> None:
    ids = torch.cat([torch.zeros(1, 3, dtype=torch.long), torch.arange(1, 601)[None]], dim=1)
    mask = (ids > 0).long()
    first, known = left_aligned(ids, mask)
    assert first.tolist() == [list(range(1, 513))]
    assert known.sum() == 512


def test_an_empty_prompt_leaves_the_loss_a_number(folder: Path) -> None:
    trainer = changed(made(PromptTrainer, folder, [words]))
    ids, mask = encoded([str(row["prompt"]) for row in ROWS[:2]])
    mask[0] = 0
    found = prompt_kl(trainer, trainer.model, tiny.load(folder).eval(), ids, mask)
    assert 0 < float(found.detach()) < 10
    found.backward()
    assert all(bool(weight.grad.isfinite().all()) for weight in trainer.model.parameters())


def test_its_gradient_comes_beside_the_others_by_its_weight(folder: Path) -> None:
    def gradients(weight: float) -> dict[str, torch.Tensor]:
        trainer = changed(made(PromptTrainer, folder, [words]))
        if weight:
            add_prompt_kl(trainer, weight)
        return gradients_of(trainer)

    without, once, twice = gradients(0.0), gradients(1.0), gradients(2.0)
    moved = sum(float((once[name] - without[name]).norm()) for name in without)
    assert moved > 1e-3
    for name, plain in without.items():
        torch.testing.assert_close(twice[name] - plain, 2 * (once[name] - plain), rtol=1e-3, atol=1e-6)


def test_a_models_distance_on_prompts_shrinks(folder: Path) -> None:
    trainer = changed(made(PromptTrainer, folder, [words], learning_rate=1e-2, max_steps=8))
    base = tiny.load(folder).eval()
    prompts = encoded([str(row["prompt"]) for row in ROWS])
    before = float(prompt_kl(trainer, trainer.model, base, *prompts).detach())
    add_prompt_kl(trainer, 20.0)
    trainer.train()
    assert float(prompt_kl(trainer, trainer.model, base, *prompts).detach()) < before / 2


def on_two_ranks(rank: int) -> None:
    """Each reads its own prompts; the gradient is the mean of both."""

    def gradients(weight: float) -> dict[str, torch.Tensor]:
        trainer = changed(made(PromptTrainer, Path("tiny").absolute(), [words]))
        if weight:
            add_prompt_kl(trainer, weight)
        return gradients_of(trainer)

    plain, with_kl = gradients(0.0), gradients(3.0)
    terms = [with_kl[name] - one for name, one in plain.items()]
    assert sum(float(term.norm()) for term in terms) > 1e-3
    for term in terms:
        first = term.clone()
        torch.distributed.broadcast(first, 0)
        torch.testing.assert_close(term, first)


def test_two_ranks_take_the_same_step(forks: ForkServer, tmp_path: Path) -> None:
    tiny.save(tmp_path / "tiny")
    assert together(forks, tmp_path, on_two_ranks)


@pytest.mark.parametrize("adapter", [False, True])
def test_a_prompt_is_read_once_in_a_step_of_several_passes(folder: Path, adapter: bool) -> None:
    """Four completions in two passes; with the same gradients as when each pass reads its prompt."""
    read: list[int] = []

    def gradients(counted: bool) -> dict[str, torch.Tensor]:
        options: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
        options |= {"num_generations": 4, "beta": 0.0 if adapter else BASE_ONLY}
        trainer = changed(made(PromptTrainer, folder, [words], adapter=adapter, **options))
        add_prompt_kl(trainer, 2.0)
        trainer.with_prompt_kl = counted
        trainer.model.register_forward_pre_hook(
            lambda module, given, named: (
                read.append(int(named["attention_mask"].sum()))
                if torch.is_grad_enabled() and "logits_to_keep" not in named
                else None
            ),
            with_kwargs=True,
        )
        return gradients_of(trainer)

    by_pass = gradients(counted=False)
    repeated = sum(read)
    read.clear()
    once = gradients(counted=True)
    assert len(read) == 4, "every pass goes through the model"
    assert sum(read) < repeated
    for name, gradient in by_pass.items():
        torch.testing.assert_close(once[name], gradient, rtol=1e-4, atol=1e-6)


def test_prompts_are_read_where_their_completions_are_shortest_and_equal_ones_of_the_data_together() -> None:
    ids = torch.tensor([[0, 7], [0, 8], [0, 7], [0, 8], [0, 7]])
    order = torch.tensor([3, 0, 4, 2, 1])  # rows, longest first
    assert prompt_counts(ids, (ids > 0).long(), order).tolist() == [0, 2, 3, 0, 0]


def test_a_pass_in_which_no_prompt_counts_still_goes_through_the_model(folder: Path) -> None:
    trainer = changed(made(PromptTrainer, folder, [words]))
    nothing = torch.zeros(2, dtype=torch.long)
    prompts = encoded([str(row["prompt"]) for row in ROWS[:2]])
    found = prompt_kl(trainer, trainer.model, tiny.load(folder).eval(), *prompts, nothing)
    found.backward()
    assert float(found.detach()) == 0.0
    assert all(weight.grad is not None for weight in trainer.model.parameters())


@pytest.mark.parametrize("beta", [BASE_ONLY, 0.04])
def test_trls_own_term_is_computed_only_where_it_is_asked_for(folder: Path, beta: float) -> None:
    trainer = changed(made(PromptTrainer, folder, [words], beta=beta))
    add_prompt_kl(trainer, 1.0)
    seen: list[bool] = []
    trainer.ref_model.register_forward_pre_hook(
        lambda module, given, named: seen.append("logits_to_keep" in named), with_kwargs=True
    )
    gradients_of(trainer)
    assert any(seen) == (beta != BASE_ONLY)
    assert seen.count(False) > 0, "the base reads the prompts"
