"""GRPO: the rewards of the model's completions, less half of its KL to the base on the prompts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from core.domain.evaluation import GRPO_COMPLETION, GRPO_GENERATIONS, GRPO_KL_LENGTH, EvaluationRules
from core.recipes.axolotl.data_keys import GRPO_EXTRA
from trainer.inputs.tokens import PromptRow, Tokenizer, encode
from trainer.rewards.calls import RewardCalls
from trainer.rewards.sandbox import Rewards
from trainer.scoring.completions import complete
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
from trainer.scoring.sampling import SamplingRules

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
    answered: list[int] = []
    answers: list[str] = []
    for places, counts in _rounds(len(rows), rank, world, together):

        def answer(places: list[int]) -> list[str]:
            prompts = [rows[place].prompt for place in places]
            return generate_completions(model, prompts, tokenizer, rules, completion, places=places)

        parts = in_halves(model, places, answer)
        if counts:
            answered += places
            answers += [answer for _, part in parts for answer in part]
    calls = RewardCalls([partial(rewards.call, place) for place in range(len(rewards))])
    _hand_in(calls, rows, answered, answers)
    prompts = [row.prompt for row in rows]
    kl = list(prompt_kl(model, reference, prompts, tokenizer, window, rank, world))
    return SampledCompletions(calls.collect(), math.fsum(kl), len(kl))


def _hand_in(calls: RewardCalls, rows: Sequence[PromptRow], places: list[int], answers: list[str]) -> None:
    """Each function is called once, with all completions in the order of their rows: its rewards may depend
    on what is beside. It works beside the KL."""
    repeated = [rows[place] for place in places for _ in range(GRPO_GENERATIONS)]
    columns: dict[str, Any] = {"prompts": [row.prompt for row in repeated]}
    if any(row.extra is not None for row in rows):
        columns[GRPO_EXTRA] = [row.extra for row in repeated]
    numbers = [place * GRPO_GENERATIONS + one for place in places for one in range(GRPO_GENERATIONS)]
    calls.hand_in(numbers, answers, columns)


def _rounds(count: int, rank: int, world: int, together: int) -> Iterator[tuple[list[int], bool]]:
    """Places of rows to answer at once, and whether they count. Ranks of a sharded model need equally many
    rounds: a rank without rows left answers its first ones again, and they do not count."""
    own = list(range(rank, count, world))
    for start in range(0, len(range(0, count, world)), together):
        places = own[start : start + together]
        yield places or (own or list(range(count)))[:together], bool(places)


def generate_completions(
    model: Any,
    prompts: Sequence[str],
    tokenizer: Tokenizer,
    rules: EvaluationRules,
    longest: int,
    seed: int = SEED,
    places: Sequence[int] | None = None,
) -> list[str]:
    """Sample `GRPO_GENERATIONS` completions for each prompt, in order, as the evaluation does. `places`: of
    the prompts among all, for their random numbers."""
    whole = encode(tokenizer, prompts, special_tokens=rules.special_tokens)
    ids = [prompt_ids[-rules.grpo_prompt :] if rules.grpo_prompt else prompt_ids for prompt_ids in whole]
    end = tokenizer.eos_token_id
    sampling = SamplingRules(
        temperature=rules.grpo_temperature,
        top_k=rules.grpo_top_k,
        longest=longest,
        ends=() if end is None else (end,),
        pad=tokenizer.pad_token_id or 0,
    )
    with scoring_mode(model):
        completions = complete(model, ids, GRPO_GENERATIONS, sampling, seed, places=places)
    decode: Any = tokenizer
    return list(decode.batch_decode(completions, skip_special_tokens=True))


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
