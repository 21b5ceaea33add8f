"""Completions of prompts by whoever makes them fastest here: our sampling, or the engine's own `generate`.

The engine's is for models whose layers keep a window or a state instead of all keys and values, for those of
which a GPU has only a part, and for any on which ours disagrees with a plain pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from trainer.scoring.forward import PREPARED, WHOLE, is_sharded
from trainer.scoring.sampling import Finished, SamplingRules, sample
from trainer.scoring.slots import EAGER, attention_of, keeps_all, takes_wide_masks

log = logging.getLogger(__name__)

#: On a model: whether ours agrees with a plain pass.
AGREES = "_god_miner_agrees"
#: Prompts of that comparison, completions of each, and tokens of both.
_PROMPTS, _EACH, _PROMPT_TOKENS, _NEW_TOKENS = 4, 2, 256, 8
#: How far the log probabilities of a completion's tokens may be apart, in the mean: in bf16, and in fp32. In
#: bf16 products in another order differ by so much, more where an expert is chosen otherwise; a position or a
#: mask that is wrong by far more.
_MOST_APART = (0.15, 1e-3)


def complete(
    model: Any,
    prompts: Sequence[Sequence[int]],
    each: int,
    rules: SamplingRules,
    seed: int,
    *,
    places: Sequence[int] | None = None,
    together: int | None = None,
    finished: Finished | None = None,
) -> list[list[int]]:
    """Sample as `sampling.sample` does, by either generator; in evaluation mode and without gradients."""
    model = getattr(model, "_orig_mod", model)  # compiled, every length would be compiled again
    prepared: Callable[[], AbstractContextManager[None]] = getattr(model, PREPARED, nullcontext)
    was_training = model.training
    model.eval()
    try:
        ours = bool(prompts) and may_sample(model, max(map(len, prompts)) + rules.longest)
        if _on_all_ranks(model, ours):
            with prepared(), _without_gradients(model):
                if _agrees(model, prompts, rules):
                    return sample(
                        model, prompts, each, rules, seed, places=places, together=together, finished=finished
                    )
        with torch.no_grad():
            return _by_engine(model, prompts, each, rules, seed, together)
    finally:
        model.train(was_training)


def _without_gradients(model: Any) -> AbstractContextManager[Any]:
    """Inference mode forbids to train later with what is made in it, as FSDP gathers weights and quantised
    layers may keep what they unpack."""
    kept = is_sharded(model) or getattr(model.config, "quantization_config", None) is not None
    return torch.no_grad() if kept else torch.inference_mode()


def may_sample(model: Any, places: int) -> bool:
    """Return True if our sampling is made for the model, with this many tokens in a row."""
    attention = attention_of(model)
    if not (takes_wide_masks(attention) or attention == EAGER) or not keeps_all(model, places):
        return False
    return not is_sharded(model) or getattr(model, WHOLE, False)


def _agrees(model: Any, prompts: Sequence[Sequence[int]], rules: SamplingRules) -> bool:
    """Once for each model: whether our sampling finds the probabilities of a plain pass. An unknown
    architecture may do something else with positions or masks."""
    known: bool | None = getattr(model, AGREES, None)
    if known is None:
        known = _on_all_ranks(model, _compare(model, prompts, rules))
        setattr(model, AGREES, known)
        if not known:
            log.warning("the engine's own generate is used: our sampling does not suit %s", type(model))
    return known


def _on_all_ranks(model: Any, ours: bool) -> bool:
    """Ranks of a sharded model gather its weights together, each way at another moment: all go the same."""
    if not getattr(model, WHOLE, False) or not torch.distributed.is_initialized() or not is_sharded(model):
        return ours
    lowest = torch.tensor(int(ours), device=next(model.parameters()).device)
    torch.distributed.all_reduce(lowest, torch.distributed.ReduceOp.MIN)
    return bool(lowest)


def _compare(model: Any, prompts: Sequence[Sequence[int]], rules: SamplingRules) -> bool:
    """Some of the prompts, from the shortest to the longest, as they will be sampled: of unlike length in one
    pass, with rows that end early and make room for others."""
    by_length = sorted(prompts, key=len)
    places = sorted({(len(prompts) - 1) * part // (_PROMPTS - 1) for part in range(_PROMPTS)})
    ids = [list(by_length[place])[-_PROMPT_TOKENS:] or [rules.pad] for place in places]
    try:
        # Sampled even where the likeliest are wanted: the completions of a prompt are to differ.
        all_long = rules._replace(temperature=rules.temperature or 1.0, longest=_NEW_TOKENS, ends=())
        some_short = all_long._replace(ends=_second_tokens(sample(model, ids, _EACH, all_long, 0)))
        return all(_same_probabilities(model, ids, one) for one in (all_long, some_short))
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        log.warning("our sampling failed: %s", error)
        return False


def _second_tokens(completions: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the second tokens of the first completions: as end tokens they stop only these."""
    return tuple(tokens[1] for tokens in completions[::_EACH])


def _same_probabilities(model: Any, ids: list[list[int]], rules: SamplingRules) -> bool:
    ours: list[list[float]] = []
    together = _EACH * max(len(ids) - 1, 1)  # one prompt waits
    completions = sample(model, ids, _EACH, rules, 0, together=together, log_probs=ours)
    weight = next(model.parameters())
    most = _MOST_APART[weight.dtype is torch.float32]
    for row, (tokens, found) in enumerate(zip(completions, ours, strict=True)):
        prompt = ids[row // _EACH]
        whole = torch.tensor([prompt + tokens], device=weight.device)
        logits = model(input_ids=whole, use_cache=False).logits[0, len(prompt) - 1 : -1]
        plain = logits.float().log_softmax(dim=-1).gather(1, whole[0, len(prompt) :, None]).squeeze(1)
        apart = (plain - torch.tensor(found, device=plain.device)).abs().mean()
        if not float(apart) <= most:
            return False
        if any(token in rules.ends for token in tokens[:-1]):
            return False
    return True


def _by_engine(
    model: Any,
    prompts: Sequence[Sequence[int]],
    each: int,
    rules: SamplingRules,
    seed: int,
    together: int | None,
) -> list[list[int]]:
    """Batch after batch, longest prompts first. Ranks with as many prompts make as many batches."""
    size = max((together or len(prompts) * each) // each, 1)
    order = sorted(range(len(prompts)), key=lambda at: -len(prompts[at]))
    device = next(model.parameters()).device
    devices = [device.index or 0] if device.type == "cuda" else []
    completions: list[list[int]] = [[] for _ in range(len(prompts) * each)]
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            generated = _generated(model, [prompts[at] for at in batch], each, rules)
            for place, at in enumerate(batch):
                own = generated[place * each : (place + 1) * each]
                completions[at * each : (at + 1) * each] = own
    return completions


def _generated(
    model: Any, prompts: Sequence[Sequence[int]], each: int, rules: SamplingRules
) -> list[list[int]]:
    width = max(max(map(len, prompts)), 1)
    device = next(model.parameters()).device
    rows = [list(ids) for ids in prompts for _ in range(each)]
    padded = [[rules.pad] * (width - len(ids)) + ids for ids in rows]
    known = [[0] * (width - len(ids)) + [1] * len(ids) for ids in rows]
    sampling = {"temperature": rules.temperature, "top_k": rules.top_k, "top_p": 1.0}
    generated = model.generate(
        input_ids=torch.tensor(padded, device=device),
        attention_mask=torch.tensor(known, device=device),
        do_sample=bool(rules.temperature),
        repetition_penalty=1.0,
        num_beams=1,
        max_new_tokens=rules.longest,
        min_new_tokens=None,
        pad_token_id=rules.pad,
        eos_token_id=list(rules.ends) or None,
        use_cache=True,
        **sampling if rules.temperature else {},
    )
    return [_until_end(row, rules.ends) for row in generated[:, width:].tolist()]


def _until_end(tokens: list[int], ends: tuple[int, ...]) -> list[int]:
    end = next((at + 1 for at, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:end]
