"""GRPO: the rewards of the model's completions, less half of its KL to the base on the prompts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from core.domain.evaluation import GRPO_COMPLETION, GRPO_GENERATIONS, GRPO_KL_LENGTH, EvaluationRules
from core.engines.axolotl.data_keys import GRPO_EXTRA
from trainer.inputs.tokens import PromptRow, Tokenizer, encode
from trainer.rewards.sandbox import Rewards
from trainer.scoring.forward import (
    batch_tokens,
    divergence,
    in_halves,
    predict,
    rank_share,
    scoring_mode,
    unwrapped,
    vocabulary,
    without_adapter,
)

#: Prompts that are answered together, each `GRPO_GENERATIONS` times.
PROMPTS = 16
#: Seed of the sampling: checkpoints are compared on the same draws.
SEED = 42


@dataclass(frozen=True)
class SampledCompletions:
    """Completions of some of the prompts, by place, and what each reward function gave them."""

    #: One list for each function, with `GRPO_GENERATIONS` numbers for each prompt.
    rewards: list[list[float]]
    kl_total: float
    kl_prompts: int


def sample_completions(
    model: Any,
    rows: Sequence[PromptRow],
    tokenizer: Tokenizer,
    rewards: Rewards,
    rules: EvaluationRules,
    *,
    reference: Any = None,
    rank: int = 0,
    world: int = 1,
    window: int | None = None,
    completion: int = GRPO_COMPLETION,
    together: int = PROMPTS,
) -> SampledCompletions:
    """Sample for the rows rank, rank + world, …; `together` prompts are answered at once."""
    model = unwrapped(model)
    reward_lists: list[list[float]] = [[] for _ in range(len(rewards))]
    for batch, seed, counts in _rounds(rows, rank, world, together):
        prompts = [row.prompt for row in batch]

        def answer(places: list[int], prompts: list[str] = prompts, seed: int = seed) -> list[str]:
            chosen = [prompts[place] for place in places]
            return generate_completions(model, chosen, tokenizer, rules, completion, seed + places[0])

        parts = in_halves(model, list(range(len(prompts))), answer)
        answers = [answer for _, part in parts for answer in part]
        if not counts:
            continue
        repeated = [row for row in batch for _ in range(GRPO_GENERATIONS)]
        columns: dict[str, Any] = {"prompts": [row.prompt for row in repeated]}
        if any(row.extra is not None for row in repeated):
            columns[GRPO_EXTRA] = [row.extra for row in repeated]
        for place, numbers in enumerate(reward_lists):
            numbers += rewards.call(place, answers, **columns)
    prompts = [row.prompt for row in rows]
    kl = list(prompt_kl(model, reference, prompts, tokenizer, window, rank, world))
    return SampledCompletions(reward_lists, math.fsum(kl), len(kl))


def _rounds(
    rows: Sequence[PromptRow], rank: int, world: int, together: int
) -> Iterator[tuple[Sequence[PromptRow], int, bool]]:
    """Rows to answer at once, a seed, and whether they count. Ranks of a sharded model need equally many
    rounds: a rank without rows left answers its first ones again, and they do not count."""
    own = rows[rank::world]
    for start in range(0, len(rows[::world]), together):
        batch = own[start : start + together]
        yield batch or (own or rows)[:together], SEED + start, bool(batch)


def generate_completions(
    model: Any, prompts: Sequence[str], tokenizer: Tokenizer, rules: EvaluationRules, longest: int, seed: int
) -> list[str]:
    """Sample `GRPO_GENERATIONS` completions for each prompt, in order, as the evaluation does."""
    whole = encode(tokenizer, prompts, special_tokens=rules.special_tokens)
    ids = [prompt_ids[-rules.grpo_prompt :] if rules.grpo_prompt else prompt_ids for prompt_ids in whole]
    width = max(max(len(prompt_ids) for prompt_ids in ids), 1)
    device = next(model.parameters()).device
    devices = [device.index or 0] if device.type == "cuda" else []
    pad = tokenizer.pad_token_id or 0
    tokens = torch.tensor(
        [[pad] * (width - len(prompt_ids)) + list(prompt_ids) for prompt_ids in ids], device=device
    )
    mask = torch.tensor(
        [[0] * (width - len(prompt_ids)) + [1] * len(prompt_ids) for prompt_ids in ids], device=device
    )
    with scoring_mode(model), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        generated = model.generate(
            input_ids=tokens,
            attention_mask=mask,
            do_sample=True,
            temperature=rules.grpo_temperature,
            top_k=rules.grpo_top_k,
            top_p=1.0,
            repetition_penalty=1.0,
            num_beams=1,
            num_return_sequences=GRPO_GENERATIONS,
            max_new_tokens=longest,
            min_new_tokens=None,
            pad_token_id=pad,
            eos_token_id=tokenizer.eos_token_id,
            use_cache=True,
        )
    decode: Any = tokenizer
    return list(decode.batch_decode(generated[:, width:], skip_special_tokens=True))


def prompt_kl(
    model: Any,
    reference: Any,
    prompts: Sequence[str],
    tokenizer: Tokenizer,
    window: int | None,
    rank: int = 0,
    world: int = 1,
) -> Iterator[float]:
    """KL(base || fine-tuned) on each of the rank's prompts, the mean over its positions; long prompts lose
    their end."""
    limit = GRPO_KL_LENGTH if window is None or window >= 2 * GRPO_KL_LENGTH else math.ceil(window / 2)
    ids = [prompt_ids for prompt_ids in encode(tokenizer, prompts, limit=limit) if prompt_ids]
    pad = tokenizer.pad_token_id or 0
    with scoring_mode(model):
        for places, counts in rank_share(
            [len(prompt_ids) for prompt_ids in ids], batch_tokens(vocabulary(model)), rank, world
        ):
            # Every position counts, the last one too, which predicts nothing here: a row one token longer.
            rows = [[*ids[place], pad] for place in places]
            if reference is not None:
                with scoring_mode(reference):
                    base = predict(reference, rows, rows, pad)
            else:
                with without_adapter(model) as bare:
                    base = predict(bare, rows, rows, pad)
            tuned = predict(model, rows, rows, pad)
            if not counts:
                continue
            kl = divergence(base, tuned).double().cpu()
            for row in range(len(places)):
                yield float(kl[tuned.rows.cpu() == row].mean())
