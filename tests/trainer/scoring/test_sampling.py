"""Sampling without the engine's `generate`: the tokens of transformers, whoever is sampled beside."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from transformers import LogitsProcessor, LogitsProcessorList

from tests.trainer import odd_models, tiny
from tests.trainer.sharding import adapted
from trainer.scoring import slots
from trainer.scoring.completions import AGREES, complete, may_sample
from trainer.scoring.sampling import SamplingRules, random_numbers, sample

CHANCE = random.Random(1)
PROMPTS = [[CHANCE.randint(8, 300) for _ in range(CHANCE.randint(1, 30))] for _ in range(6)]
RULES = SamplingRules(temperature=0.9, top_k=50, longest=20, ends=(3, *range(8, 360, 12)), pad=4)
GREEDY = RULES._replace(temperature=0.0)
EACH, SEED = 2, 5
KEEPS_A_STATE = {"lfm2", "falcon_h1"}


class FixedNumbers(LogitsProcessor):  # type: ignore[misc]
    """Leaves the one token that these numbers choose from transformers' own scores."""

    def __init__(self, numbers: torch.Tensor, rules: SamplingRules) -> None:
        self.numbers, self.rules, self.at = numbers.double(), rules, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = transformers.TemperatureLogitsWarper(self.rules.temperature)(input_ids, scores)
        if self.rules.top_k:
            scores = transformers.TopKLogitsWarper(self.rules.top_k)(input_ids, scores)
        sums = scores.double().softmax(-1).cumsum(-1)
        chosen = torch.searchsorted(sums, self.numbers[:, self.at : self.at + 1], right=True)
        self.at += 1
        return torch.full_like(scores, -torch.inf).scatter(1, chosen.clamp(max=scores.shape[1] - 1), 0.0)


def by_transformers(model: Any, rules: SamplingRules) -> list[list[int]]:
    """The same numbers in the loop of transformers, everything padded to the longest prompt."""
    width = max(map(len, PROMPTS))
    rows = [prompt for prompt in PROMPTS for _ in range(EACH)]
    numbers = random_numbers(SEED, range(len(PROMPTS)), EACH, rules.longest)
    named = {"logits_processor": LogitsProcessorList([FixedNumbers(numbers, rules)])}
    generated = model.generate(
        input_ids=torch.tensor([[rules.pad] * (width - len(row)) + row for row in rows]),
        attention_mask=torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
        do_sample=False,
        max_new_tokens=rules.longest,
        pad_token_id=rules.pad,
        eos_token_id=list(rules.ends),
        **named if rules.temperature else {},
    )
    completions = []
    for row in generated[:, width:].tolist():
        end = next((at + 1 for at, token in enumerate(row) if token in rules.ends), len(row))
        completions.append(row[:end])
    return completions


@pytest.mark.parametrize("rules", [RULES, RULES._replace(top_k=0, temperature=1.0), GREEDY])
@pytest.mark.parametrize("together", [None, 5, 2])
def test_the_tokens_are_those_of_transformers_with_the_same_random_numbers(
    rules: SamplingRules, together: int | None
) -> None:
    model = tiny.model("qwen")
    with torch.inference_mode():
        sampled = sample(model, PROMPTS, EACH, rules, SEED, together=together)
    assert sampled == by_transformers(model, rules)
    assert len(set(map(len, sampled))) > 2, "they end at different places"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", sorted(odd_models.KINDS.keys() - KEEPS_A_STATE))
def test_models_of_other_kinds_are_sampled_as_well(kind: str, attention: str) -> None:
    torch.manual_seed(0)
    model = odd_models.KINDS[kind]().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(4)
    model.set_attn_implementation(attention)
    assert complete(model, PROMPTS, EACH, RULES, SEED) == by_transformers(model, RULES)
    assert getattr(model, AGREES)


@pytest.mark.parametrize("kind", sorted(KEEPS_A_STATE))
def test_a_model_that_keeps_a_state_is_sampled_by_its_engine(kind: str) -> None:
    model = odd_models.KINDS[kind]().eval()
    assert not may_sample(model, 50)
    assert len(complete(model, PROMPTS, EACH, RULES, SEED)) == len(PROMPTS) * EACH
    assert not hasattr(model, AGREES)


def test_an_adapter_counts_where_it_is_switched_on() -> None:
    model = adapted()
    with_it = complete(model, PROMPTS, EACH, RULES, SEED)
    assert with_it == by_transformers(model, RULES)
    with model.disable_adapter():
        without = complete(model, PROMPTS, EACH, RULES, SEED)
        assert without == by_transformers(model, RULES)
    assert without == complete(tiny.model(), PROMPTS, EACH, RULES, SEED)
    assert with_it != without


def test_what_is_sampled_for_a_prompt_does_not_depend_on_the_others() -> None:
    model = tiny.model()
    everything = complete(model, PROMPTS, EACH, RULES, SEED)
    some = [4, 1, 5]
    alone = complete(model, [PROMPTS[at] for at in some], EACH, RULES, SEED, places=some)
    assert alone == [everything[at * EACH + number] for at in some for number in range(EACH)]
    assert complete(model, PROMPTS, EACH, RULES, SEED + 1) != everything


def test_numbers_are_even_and_no_two_rows_have_the_same() -> None:
    numbers = random_numbers(3, range(100), 4, 64)
    assert numbers.shape == (400, 64)
    assert 0 <= float(numbers.min()) < 0.001
    assert 0.999 < float(numbers.max()) < 1
    assert float(numbers.mean()) == pytest.approx(0.5, abs=0.01)
    assert numbers.unique().numel() > 0.99 * numbers.numel()
    assert abs(float(torch.corrcoef(numbers)[0, 1:].mean())) < 0.05
    assert torch.equal(numbers[8:16], random_numbers(3, [2, 3], 4, 64))


def test_a_prompt_is_reported_when_all_of_its_completions_are_there() -> None:
    reported: dict[int, list[list[int]]] = {}
    model = tiny.model()
    sampled = complete(
        model, PROMPTS, EACH, RULES, SEED, together=4, finished=lambda at, found: reported.update({at: found})
    )
    assert reported == {at: sampled[at * EACH : (at + 1) * EACH] for at in range(len(PROMPTS))}
    assert list(reported) != sorted(reported), "in the order in which they end"


def test_an_empty_prompt_and_no_end_token() -> None:
    sampled = complete(tiny.model(), [[], [7]], 1, RULES._replace(ends=()), SEED)
    assert list(map(len, sampled)) == [RULES.longest] * 2
    assert complete(tiny.model(), [], 1, RULES, SEED) == []


@pytest.mark.parametrize("kind", ["a window", "a state"])
def test_what_does_not_keep_all_keys_is_left_to_the_engine(kind: str) -> None:
    shape = odd_models.SHAPE
    if kind == "a window":
        config = transformers.MistralConfig(**shape, sliding_window=16)
        model = transformers.MistralForCausalLM(config).eval()
    else:
        config = transformers.Lfm2Config(**shape, layer_types=["conv", "full_attention"])
        model = transformers.Lfm2ForCausalLM(config).eval()
    assert not may_sample(model, 30)
    sampled = complete(model, PROMPTS, EACH, RULES, SEED)
    assert sampled == complete(model, PROMPTS, EACH, RULES, SEED)
    assert len(sampled) == EACH * len(PROMPTS)
    assert all(0 < len(row) <= RULES.longest for row in sampled)
    greedy = complete(model, PROMPTS, EACH, GREEDY, SEED, together=4)
    assert greedy == by_transformers(model, GREEDY)


def test_a_model_that_takes_masks_in_another_way_is_left_to_the_engine() -> None:
    model = tiny.model()
    plain = model.model.forward

    def turned_round(*arguments: Any, **named: Any) -> Any:
        mask = named.get("attention_mask")
        if mask is not None and mask.ndim == 4:
            named["attention_mask"] = ~mask
        return plain(*arguments, **named)

    model.model.forward = turned_round
    sampled = complete(model, PROMPTS, EACH, GREEDY, SEED)
    assert getattr(model, AGREES) is False
    assert sampled == by_transformers(model, GREEDY)


def test_a_model_whose_positions_depend_on_the_whole_mask_is_left_to_the_engine() -> None:
    """The likeliest token stays the likeliest, its probability does not."""
    model = tiny.model()
    plain = model.model.forward

    def beside(*arguments: Any, **named: Any) -> Any:
        mask = named.get("attention_mask")
        found = plain(*arguments, **named)
        if mask is not None and mask.ndim == 4 and not bool(mask.all()):
            found.last_hidden_state.mul_(1.3)
        return found

    model.model.forward = beside
    assert complete(model, PROMPTS, EACH, GREEDY, SEED) == by_transformers(model, GREEDY)
    assert getattr(model, AGREES) is False


def test_a_model_that_goes_wrong_once_rows_have_ended_is_left_to_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows from the end take the places of those that ended: the comparison has some that do."""
    model = tiny.model()
    monkeypatch.setattr(slots.SlotLayer, "move", lambda *_: None)
    sampled = complete(model, PROMPTS, EACH, GREEDY, SEED)
    assert getattr(model, AGREES) is False
    assert sampled == by_transformers(model, GREEDY)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_in_bf16_agrees(attention: str) -> None:
    model = tiny.model().to(torch.bfloat16)
    model.set_attn_implementation(attention)
    complete(model, PROMPTS, EACH, RULES, SEED)
    assert getattr(model, AGREES)


def test_a_model_trains_after_it_has_sampled() -> None:
    model = adapted().train()
    complete(model, PROMPTS, EACH, RULES, SEED)
    assert model.training
    ids = torch.tensor([PROMPTS[0]])
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_sampling_leaves_torchs_random_numbers_alone() -> None:
    model = tiny.model()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    complete(model, PROMPTS, EACH, RULES, SEED)
    assert torch.equal(torch.rand(3), expected)
