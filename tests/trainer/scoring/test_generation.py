"""GRPO's score: sampling as validators do, rewards, KL, and their normalisation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from core.domain.evaluation import GRPO_GENERATIONS, Era, evaluation_rules
from tests.trainer import tiny
from tests.trainer.rewards.test_source import task
from trainer.inputs.tokens import PromptRow
from trainer.rewards.sandbox import Rewards
from trainer.rewards.source import REWARD_TABLE, write_rewards
from trainer.scoring import generation
from trainer.scoring.generation import generate_completions, prompt_kl, sample_completions

OFFERS = evaluation_rules(Era.OFFERS)
PROMPTS = ["sum of apples", "hello owls and the quick brown fox", "the"]


def test_prompts_are_answered_several_times_and_the_same_on_the_same_seed() -> None:
    model, tokenizer = tiny.model(), tiny.tokenizer(adds_begin=True)
    first = generate_completions(model, PROMPTS, tokenizer, OFFERS, 12, seed=1)
    assert len(first) == GRPO_GENERATIONS * len(PROMPTS)
    assert first == generate_completions(model, PROMPTS, tokenizer, OFFERS, 12, seed=1)
    assert first != generate_completions(model, PROMPTS, tokenizer, OFFERS, 12, seed=2)
    assert len(set(first)) > 1


def test_sampling_leaves_the_training_s_random_numbers_alone() -> None:
    model = tiny.model()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    generate_completions(model, PROMPTS[:1], tiny.tokenizer(), OFFERS, 4, seed=1)
    assert torch.equal(torch.rand(3), expected)


def test_the_kl_is_the_mean_over_a_prompts_positions_of_base_against_tuned() -> None:
    model, base, tokenizer = tiny.model(seed=1), tiny.model(seed=2), tiny.tokenizer(adds_begin=True)
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        with torch.no_grad():
            one = base(input_ids=ids).logits[0].log_softmax(-1)
            other = model(input_ids=ids).logits[0].log_softmax(-1)
        expected.append(float((one.exp() * (one - other)).sum(-1).mean()))
    divergences = list(prompt_kl(model, base, PROMPTS, tokenizer, None))
    assert sorted(divergences) == pytest.approx(sorted(expected), rel=1e-4)


def test_long_prompts_lose_their_end_in_the_kl_of_a_small_window() -> None:
    model, tokenizer = tiny.model(), tiny.tokenizer()
    long = "apples " * 400
    cut = tokenizer.decode(tokenizer(long)["input_ids"][:32])
    other = tiny.model(seed=3)
    assert list(prompt_kl(model, other, [long], tokenizer, 64)) == pytest.approx(
        list(prompt_kl(model, other, [cut], tokenizer, None)), rel=1e-3
    )


def test_rewards_are_called_with_every_completion_and_its_rows_data(tmp_path: Path) -> None:
    source = "def f(completions, extra_data): return [float(one) for one in extra_data]"
    rewards = Rewards.open(write_rewards(task(source), tmp_path) / REWARD_TABLE)
    rows = [PromptRow(prompt, str(place)) for place, prompt in enumerate(PROMPTS)]
    model = tiny.model()
    sampled = sample_completions(
        model, rows, tiny.tokenizer(), rewards, OFFERS, reference=model, completion=4
    )
    rewards.close()
    assert sampled.rewards == [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0]]
    assert sampled.kl_prompts == 3
    assert math.isclose(sampled.kl_total, 0.0, abs_tol=1e-4)


def test_each_function_is_called_once_with_all_completions_in_the_order_of_their_rows(tmp_path: Path) -> None:
    """What it gives may depend on what is beside, and must not on how soon it is asked."""
    source = "def f(completions): return [float(place) for place, _ in enumerate(completions)]"
    rewards = Rewards.open(write_rewards(task(source), tmp_path) / REWARD_TABLE)
    model, rows = tiny.model(), [PromptRow(prompt, None) for prompt in PROMPTS]
    for together in (1, 2, 3):
        sampled = sample_completions(
            model, rows, tiny.tokenizer(), rewards, OFFERS, reference=model, completion=4, together=together
        )
        assert sampled.rewards == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]
    rewards.close()


def test_an_evaluation_goes_on_in_halves_where_memory_does_not_hold_all_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "def f(completions, **kwargs): return [float(len(one)) for one in completions]"
    rewards = Rewards.open(write_rewards(task(source), tmp_path) / REWARD_TABLE)
    rows = [PromptRow(f"{prompt} {place}", None) for place in range(2) for prompt in PROMPTS]
    model, sizes, plain = tiny.model(), list[int](), generation.complete

    def scored() -> list[list[float]]:
        found = sample_completions(
            model, rows, tiny.tokenizer(), rewards, OFFERS, reference=model, completion=4
        )
        return found.rewards

    expected = scored()

    def complete(model: Any, prompts: list[list[int]], *arguments: Any, **named: Any) -> Any:
        sizes.append(len(prompts))
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(model, prompts, *arguments, **named)

    monkeypatch.setattr(generation, "complete", complete)
    assert scored() == expected, "a prompt's samples do not depend on those beside it"
    rewards.close()
    assert sizes == [6, 3, 1, 2, 3, 1, 2]
    assert len(expected[0]) == GRPO_GENERATIONS * len(rows)
