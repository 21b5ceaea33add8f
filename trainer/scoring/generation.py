"""GRPO: what the rewards say of the model's completions, less half of its KL to the base on the prompts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from core.evaluation import GRPO_COMPLETION, GRPO_GENERATIONS, GRPO_KL_LENGTH, Rules
from core.recipes.datasets import GRPO_EXTRA
from trainer.inputs.rows import PromptRow
from trainer.inputs.tokens import Tokenizer, encode
from trainer.sandbox import Rewards
from trainer.scoring.batches import batch_tokens, share
from trainer.scoring.forward import (
    divergence,
    in_halves,
    predicted,
    scoring,
    unwrapped,
    vocabulary,
    without_adapter,
)

#: Prompts that are answered together, each `GRPO_GENERATIONS` times.
PROMPTS = 16
#: Seed of the sampling: checkpoints are compared on the same draws.
SEED = 42


@dataclass(frozen=True)
class Sampled:
    """Completions of some of the prompts, by place, and what each reward function gave them."""

    #: One list for each function, with `GRPO_GENERATIONS` numbers for each prompt.
    rewards: list[list[float]]
    kl_total: float
    kl_prompts: int


def sampled(
    model: Any,
    rows: Sequence[PromptRow],
    tokenizer: Tokenizer,
    rewards: Rewards,
    rules: Rules,
    *,
    reference: Any = None,
    rank: int = 0,
    world: int = 1,
    window: int | None = None,
    completion: int = GRPO_COMPLETION,
    together: int = PROMPTS,
) -> Sampled:
    """Of rows rank, rank + world, …; `together` prompts are answered at once."""
    model = unwrapped(model)
    found: list[list[float]] = [[] for _ in range(len(rewards))]
    for batch, seed, counts in _rounds(rows, rank, world, together):
        prompts = [row.prompt for row in batch]

        def answered(places: list[int], prompts: list[str] = prompts, seed: int = seed) -> list[str]:
            asked = [prompts[place] for place in places]
            return completions(model, asked, tokenizer, rules, completion, seed + places[0])

        parts = in_halves(model, list(range(len(prompts))), answered)
        answers = [answer for _, part in parts for answer in part]
        if not counts:
            continue
        asked = [row for row in batch for _ in range(GRPO_GENERATIONS)]
        columns: dict[str, Any] = {"prompts": [row.prompt for row in asked]}
        if any(row.extra is not None for row in asked):
            columns[GRPO_EXTRA] = [row.extra for row in asked]
        for place, numbers in enumerate(found):
            numbers += rewards.call(place, answers, **columns)
    prompts = [row.prompt for row in rows]
    apart = list(prompt_kl(model, reference, prompts, tokenizer, window, rank, world))
    return Sampled(found, math.fsum(apart), len(apart))


def _rounds(
    rows: Sequence[PromptRow], rank: int, world: int, together: int
) -> Iterator[tuple[Sequence[PromptRow], int, bool]]:
    """Rows to answer at once, a seed, and whether they count: sharded models need as many rounds of every
    rank as the first has, who has most rows; who has none left answers its first ones in vain."""
    mine = rows[rank::world]
    for start in range(0, len(rows[::world]), together):
        batch = mine[start : start + together]
        yield batch or (mine or rows)[:together], SEED + start, bool(batch)


def completions(
    model: Any, prompts: Sequence[str], tokenizer: Tokenizer, rules: Rules, longest: int, seed: int
) -> list[str]:
    """`GRPO_GENERATIONS` for each prompt, side by side, sampled as the evaluation samples."""
    whole = encode(tokenizer, prompts, special_tokens=rules.special_tokens)
    ids = [one[-rules.grpo_prompt :] if rules.grpo_prompt else one for one in whole]
    width = max(max(len(one) for one in ids), 1)
    device = next(model.parameters()).device
    pad = tokenizer.pad_token_id or 0
    tokens = torch.tensor([[pad] * (width - len(one)) + list(one) for one in ids], device=device)
    mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in ids], device=device)
    with scoring(model), torch.random.fork_rng(devices=_devices(device)):
        torch.manual_seed(seed)
        made = model.generate(
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
    return list(decode.batch_decode(made[:, width:], skip_special_tokens=True))


def _devices(device: torch.device) -> list[int]:
    return [device.index or 0] if device.type == "cuda" else []


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
    ids = [one for one in encode(tokenizer, prompts, limit=limit) if one]
    pad = tokenizer.pad_token_id or 0
    with scoring(model):
        for places, counts in share([len(one) for one in ids], batch_tokens(vocabulary(model)), rank, world):
            # Every position counts, the last one too, which predicts nothing here: a row one token longer.
            rows = [[*ids[place], pad] for place in places]
            if reference is not None:
                with scoring(reference):
                    base = predicted(reference, rows, rows, pad)
            else:
                with without_adapter(model) as bare:
                    base = predicted(bare, rows, rows, pad)
            tuned = predicted(model, rows, rows, pad)
            if not counts:
                continue
            apart = divergence(base, tuned).double().cpu()
            for row in range(len(places)):
                yield float(apart[tuned.rows.cpu() == row].mean())
