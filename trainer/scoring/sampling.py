"""Completions of prompts without the engine's `generate`: the same samples, several times as fast.

A prompt is read once for all of its completions, prompts of like length together. Then all rows go on token
by token; a finished one leaves, and prompts that are waiting come in where memory does not hold all at once.

Every completion has random numbers of its own, by seed, prompt and position: what is sampled for it does not
depend on who is sampled beside it (but for rounding).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear
from transformers.cache_utils import DynamicCache

from trainer.scoring.forward import is_sharded, keeps_logits, length_batches
from trainer.scoring.slots import (
    Slots,
    attention_of,
    grouped_attention,
    slot_cache,
    takes_wide_masks,
)

# LoRA's layers without what peft does around their products, for the many small passes of a generation.


@contextlib.contextmanager
def direct_adapters(model: Any) -> Iterator[None]:
    """The same numbers. peft looks at its settings in every layer and for every token: with small models half
    of a pass."""
    replaced = [module for module in model.modules() if _is_plain(module)]
    for module in replaced:
        module.forward = _forward(module)
    try:
        yield
    finally:
        for module in replaced:
            del module.forward


def _is_plain(module: Any) -> bool:
    """Return True for a LoRA of one adapter on a linear layer, as peft made it, switched on and apart from
    its base."""
    try:
        from peft.tuners.lora.layer import Linear
    except ImportError:
        return False
    if type(module) is not Linear or "forward" in module.__dict__:
        return False
    active = [name for name in module.active_adapters if name in module.lora_A]
    return (
        type(module.base_layer) is torch.nn.Linear
        and not (module.merged or module.disable_adapters or module.lora_variant)
        and len(active) == 1
        and module.lora_B[active[0]].bias is None
    )


def _forward(module: Any) -> Callable[..., torch.Tensor]:
    (active,) = (name for name in module.active_adapters if name in module.lora_A)
    weight, bias = module.base_layer.weight, module.base_layer.bias
    down, up, scale = module.lora_A[active].weight, module.lora_B[active].weight, module.scaling[active]

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        base = linear(hidden, weight, bias)
        added = linear(linear(hidden.to(down.dtype), down), up)
        return (base + added * scale).to(base.dtype)

    return forward


#: Tokens of a pass over prompts, padding included: a larger one is no faster, and its rows differ more.
PROMPT_TOKENS = 4096
#: Finished rows go with the others until they are this part of all: making them leave copies rows.
LEAVING = 8
#: Waiting prompts come in when this part of the rows is free.
ENTERING = 4

Finished = Callable[[int, list[list[int]]], None]


class SamplingRules(NamedTuple):
    #: 0: always the likeliest token.
    temperature: float
    #: The likeliest so many tokens; 0: all.
    top_k: int
    #: Tokens at most.
    longest: int
    #: A completion ends with one of these.
    ends: tuple[int, ...]
    #: In the place of a prompt without any token.
    pad: int


def sample(
    model: Any,
    prompts: Sequence[Sequence[int]],
    each: int,
    rules: SamplingRules,
    seed: int,
    *,
    places: Sequence[int] | None = None,
    together: int | None = None,
    finished: Finished | None = None,
    log_probs: list[list[float]] | None = None,
) -> list[list[int]]:
    """Complete every prompt `each` times; the completions are in the prompts' order.

    `places`: of the prompts in the data, for their random numbers. `together`: completions at once.
    `finished` is called with a prompt's index as soon as all of its completions are there. `log_probs` gets
    those of each completion's tokens, before temperature and top-k.
    """
    if not prompts:
        return []
    direct = contextlib.nullcontext() if is_sharded(model) else direct_adapters(model)
    with grouped_attention(attention_of(model)), direct:
        sampler = _Sampler(model, prompts, each, rules, seed, places, together, finished)
        if log_probs is not None:
            sampler.log_probs = torch.zeros(sampler.results.shape, device=sampler.device)
        completions = sampler.run()
    if log_probs is not None and sampler.log_probs is not None:
        found = sampler.log_probs[:-1].tolist()
        log_probs += [own[: len(tokens)] for own, tokens in zip(found, completions, strict=True)]
    return completions


_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BITS = 64


def random_numbers(seed: int, places: Sequence[int], each: int, longest: int) -> torch.Tensor:
    """Numbers from 0 to below 1 for each completion and position: splitmix64 of seed, prompt and position."""
    rows = torch.tensor(places)[:, None] * each + torch.arange(each)
    state = _mixed(_mixed(torch.tensor(_signed(seed))) + _times(rows.flatten(), _FIRST))
    bits = _mixed(state[:, None] + _times(torch.arange(1, longest + 1), _GAMMA))
    # 24 bits: as many as a float has, so that none becomes 1.
    return (_shifted(bits, 40).double() * 2.0**-24).float()


def _signed(number: int) -> int:
    number &= (1 << _BITS) - 1
    return number - (1 << _BITS) if number >> (_BITS - 1) else number


def _times(values: torch.Tensor, factor: int) -> torch.Tensor:
    return values * _signed(factor)


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, filled up with zeros."""
    return (values >> bits) & ((1 << (_BITS - bits)) - 1)


def _mixed(values: torch.Tensor) -> torch.Tensor:
    values = _times(values ^ _shifted(values, 30), _FIRST)
    values = _times(values ^ _shifted(values, 27), _SECOND)
    return values ^ _shifted(values, 31)


def choose(logits: torch.Tensor, numbers: torch.Tensor, rules: SamplingRules) -> torch.Tensor:
    """The token of each row at which the summed probabilities, in the vocabulary's order, pass its number."""
    if not rules.temperature:
        return logits.argmax(dim=-1)
    scores = logits.float() / rules.temperature
    if 0 < rules.top_k < scores.shape[1]:
        # Those that equal the last of them count too, as transformers has it.
        least = scores.topk(rules.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    sums = scores.softmax(dim=-1).cumsum(dim=-1)
    passed = torch.searchsorted(sums, numbers[:, None] * sums[:, -1:], right=True)
    return passed.squeeze(1).clamp_(max=sums.shape[1] - 1)


@dataclass
class _Rows:
    """The state of each row on the device; the first `used` rows are in use."""

    #: Row of the results; finished ones write into one more.
    result: torch.Tensor
    #: The token that is read next, and how many are in the cache before it.
    token: torch.Tensor
    length: torch.Tensor
    #: Tokens sampled so far.
    sampled: torch.Tensor
    alive: torch.Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> _Rows:
        result, token, length, sampled = torch.zeros((4, rows), dtype=torch.long, device=device)
        return cls(result, token, length, sampled, torch.zeros(rows, dtype=torch.bool, device=device))

    def move(self, places: torch.Tensor, to: torch.Tensor) -> None:
        for values in (self.result, self.token, self.length, self.sampled, self.alive):
            values[to] = values[places]


@dataclass
class _Slot:
    """The same on the host."""

    prompt: int
    result: int
    #: The step at which it would have been empty: what it holds is the current step less this.
    since: int
    alive: bool = True


@dataclass
class _Sampler:
    model: Any
    prompts: Sequence[Sequence[int]]
    each: int
    rules: SamplingRules
    seed: int
    places: Sequence[int] | None
    together: int | None
    finished: Finished | None
    #: Log probabilities of each result's tokens, if requested.
    log_probs: torch.Tensor | None = None
    slots: list[_Slot] = field(default_factory=list)
    step: int = 0
    dead: int = 0

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        self.ids = [list(prompt) or [self.rules.pad] for prompt in self.prompts]
        count, longest = len(self.ids) * self.each, max(map(len, self.ids))
        most = max(self.together or count, self.each)
        self.most = min(most // self.each * self.each, count)
        #: Longest first: memory runs out at once or never.
        self.waiting = sorted(range(len(self.ids)), key=lambda at: -len(self.ids[at]))
        self.memory = Slots(self.most, longest + self.rules.longest - 1, self.device)
        self.cache = slot_cache(self.model, self.memory)
        self.rows = _Rows.empty(self.most, self.device)
        places = range(len(self.ids)) if self.places is None else self.places
        numbers = random_numbers(self.seed, list(places), self.each, self.rules.longest)
        self.numbers = torch.cat([numbers, numbers[:1]]).to(self.device)
        self.results = torch.zeros((count + 1, self.rules.longest), dtype=torch.long, device=self.device)
        self.lengths = [0] * count
        self.left = [self.each] * len(self.ids)
        self.ends = torch.tensor(self.rules.ends, device=self.device)
        self.wide = takes_wide_masks(attention_of(self.model))
        self.fewest_logits = {"logits_to_keep": 1} if keeps_logits(self.model) else {}

    def run(self) -> list[list[int]]:
        while self.waiting or self.slots:
            self._let_in()
            self._next_token()
            self._let_out()
        tokens = self.results[:-1].tolist()
        return [row[:length] for row, length in zip(tokens, self.lengths, strict=True)]

    def _let_in(self) -> None:
        free = (self.most - len(self.slots)) // self.each
        if not self.waiting or not free or (self.slots and free * self.each * ENTERING < self.most):
            return
        entering, self.waiting = self.waiting[:free], self.waiting[free:]
        for batch in length_batches([len(self.ids[at]) for at in entering], PROMPT_TOKENS):
            self._read([entering[place] for place in batch])

    def _read(self, prompts: list[int]) -> None:
        """All of these prompts but their last tokens, which are read as each completion's first."""
        first = len(self.slots)
        known = [self.ids[at][:-1] for at in prompts]
        if width := max(map(len, known)):
            tokens = torch.tensor([ids + [self.rules.pad] * (width - len(ids)) for ids in known])
            cache = DynamicCache()
            # What follows a prompt is nothing that it sees: no mask is needed.
            self.model(
                input_ids=tokens.to(self.device), past_key_values=cache, use_cache=True, **self.fewest_logits
            )
            for layer, read in zip(self.cache.layers, cache.layers, strict=True):
                layer.fill(first, read, self.each)
        for at in prompts:
            before = len(self.ids[at]) - 1
            for number in range(self.each):
                self.slots.append(_Slot(at, at * self.each + number, self.step - before))
        new = slice(first, len(self.slots))
        self._set(self.rows.result, new, [slot.result for slot in self.slots[new]])
        self._set(self.rows.token, new, [self.ids[slot.prompt][-1] for slot in self.slots[new]])
        self._set(self.rows.length, new, [self.step - slot.since for slot in self.slots[new]])
        self.rows.sampled[new] = 0
        self.rows.alive[new] = True

    def _set(self, values: torch.Tensor, rows: slice, to: list[int]) -> None:
        values[rows] = torch.tensor(to, device=self.device)

    def _next_token(self) -> None:
        used, rows = len(self.slots), self.rows
        width = self.step + 1 - min(slot.since for slot in self.slots if slot.alive)
        length = rows.length[:used]
        mask = self.memory.point(used, width, length)
        logits = self.model(
            input_ids=rows.token[:used, None],
            attention_mask=mask[:, None, None] if self.wide else mask.long(),
            position_ids=length[:, None],
            past_key_values=self.cache,
            use_cache=True,
        ).logits[:, -1]
        sampled, result, alive = rows.sampled[:used], rows.result[:used], rows.alive[:used]
        token = choose(logits, self.numbers[result, sampled], self.rules)
        self.results[result, sampled] = token
        if self.log_probs is not None:
            every = logits.float().log_softmax(dim=-1)
            self.log_probs[result, sampled] = every.gather(1, token[:, None]).squeeze(1)
        rows.token[:used] = token
        over = torch.isin(token, self.ends) | (sampled + 1 >= self.rules.longest)
        ended = (over & alive).nonzero().squeeze(1)
        alive[ended] = False
        result[ended] = len(self.lengths)
        # A finished row writes the same place again and again.
        length += alive
        sampled += alive
        self.step += 1
        for at in ended.tolist():
            self._end(self.slots[at])

    def _end(self, slot: _Slot) -> None:
        slot.alive = False
        self.dead += 1
        before = len(self.ids[slot.prompt]) - 1
        self.lengths[slot.result] = self.step - slot.since - before
        self.left[slot.prompt] -= 1
        if self.finished is not None and not self.left[slot.prompt]:
            rows = range(slot.prompt * self.each, (slot.prompt + 1) * self.each)
            tokens = self.results[rows.start : rows.stop].tolist()
            self.finished(
                slot.prompt, [row[: self.lengths[at]] for row, at in zip(tokens, rows, strict=True)]
            )

    def _let_out(self) -> None:
        """Rows from the end take the places of finished ones, which are free then."""
        if self.dead * LEAVING < len(self.slots):
            return
        alive = [at for at, slot in enumerate(self.slots) if slot.alive]
        used = len(alive)
        holes = [at for at in range(used) if not self.slots[at].alive]
        moved = alive[used - len(holes) :]
        if holes:
            to, places = torch.tensor(holes, device=self.device), torch.tensor(moved, device=self.device)
            for layer in self.cache.layers:
                layer.move(places, to)
            self.rows.move(places, to)
            for at, place in zip(holes, moved, strict=True):
                self.slots[at] = self.slots[place]
        del self.slots[used:]
        self.dead = 0
