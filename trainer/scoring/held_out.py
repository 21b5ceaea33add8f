"""The held-out rows of a run and the score of a model on them, in the validator's own metric.

held = HeldOut.open(spec, files, tokenizer)
base = held.remember_base(model)             # before training; with several ranks see `HeldOutSums.merged`
now = held.score(model)                      # at every evaluation

Losses are row means for instruct and chat (with KL to the base if asked). DPO: minus the log sigmoid of beta
times how much more the model has learned to prefer the chosen answer. GRPO: `generation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from core.domain.evaluation import DPO_BETA, UNTRAINED_DPO, RewardScore, evaluation_rules
from core.runs.run_files import RunSpec
from trainer.handoff import PreparedRows
from trainer.inputs.tables import read_table
from trainer.inputs.tokens import IGNORED, LabelledRow, PairRow, PromptRow, Row, Tokenizer, model_window
from trainer.rewards.sandbox import Rewards
from trainer.rewards.source import REWARD_TABLE
from trainer.scoring.forward import (
    Predicted,
    batch_tokens,
    by_row,
    divergence,
    in_halves,
    label_logits,
    log_probs,
    predict,
    predict_and_label,
    rank_share,
    scoring_mode,
    unwrapped,
    vocabulary,
    without_adapter,
)
from trainer.scoring.generation import PROMPTS, SampledCompletions, sample_completions

#: Prompts that are answered at an evaluation: generating takes hundreds of passes each.
MAX_PROMPTS = 64

#: Of a loss: sums in another order.
_EQUAL = 1e-9

RewardFormula = Callable[[Sequence[float]], float]


@dataclass(frozen=True)
class HeldOutSums:
    """A score of some of the rows. Ranks each measure their part; the sums of all make the value of all."""

    metric: str
    lower_is_better: bool
    sums: tuple[float, ...]
    formula: RewardFormula
    #: By the places of the rows measured here: the loss of each. GRPO has none.
    rows: Mapping[int, float] = field(default_factory=dict)

    @property
    def value(self) -> float:
        return self.formula(self.sums)

    def rewards(self) -> tuple[tuple[float, ...], float]:
        """GRPO: the mean of each reward function, and the KL to the base on the prompts."""
        *totals, count, kl, prompts = self.sums
        return tuple(total / max(count, 1) for total in totals), kl / prompts if prompts else 0.0

    def merged(self, sums: Sequence[float]) -> HeldOutSums:
        """The score of all ranks, from the elementwise sum of their `sums`."""
        return replace(self, sums=tuple(sums))


class HeldOut:
    """The held-out rows; open it once and call `score` at every evaluation."""

    def __init__(
        self,
        spec: RunSpec,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        rewards: Rewards | None = None,
        *,
        max_prompts: int = MAX_PROMPTS,
        together: int = PROMPTS,
        other: Sequence[Row] = (),
    ) -> None:
        """GRPO: `max_prompts` are answered, `together` at once. DPO: `other` are the rows by the other era's
        rules."""
        self._spec, self._tokenizer, self._rewards = spec, tokenizer, rewards
        self._pad, self._prompts = tokenizer.pad_token_id or 0, together
        self.rows = rows[:max_prompts] if spec.task_type.generates else rows
        self._log_probs: dict[int, LogProbs] = {}
        self._other = _pairs(other)
        self._other_log_probs: dict[int, LogProbs] = {}
        #: The untrained model's score, of all ranks; GRPO measures gains over it.
        self.base: HeldOutSums | None = None

    @classmethod
    def open(
        cls, spec: RunSpec, files: PreparedRows, tokenizer: Tokenizer, *, together: int = PROMPTS
    ) -> HeldOut:
        """Open the prepared rows; `ValueError` when none were held out."""
        if files.eval_path is None:
            raise ValueError("no rows were held out, so there is nothing to score on")
        rewards = Rewards.open(files.rewards_dir / REWARD_TABLE) if files.rewards_dir is not None else None
        other = read_table(files.other_path) if files.other_path is not None else ()
        return cls(spec, read_table(files.eval_path), tokenizer, rewards, together=together, other=other)

    def remember_base(self, model: Any, *, rank: int = 0, world: int = 1) -> HeldOutSums:
        """The untrained model's score, and what later scores need of it.

        With several ranks `base` is then to be set to the merged one.
        """
        if self._spec.task_type.has_pairs:
            self._log_probs, self._other_log_probs = self._both(model, rank, world)
            measured = self._preferences(self._log_probs, self._other_log_probs)
        elif self._spec.task_type.generates:
            measured = self._generation(model, model, rank, world)
        else:
            losses = row_losses(model, self._labelled(), self._pad, rank=rank, world=world)
            measured = self._losses(losses.rows, 0.0, 0)
        self.base = measured
        return measured

    def score(self, model: Any, *, reference: Any = None, rank: int = 0, world: int = 1) -> HeldOutSums:
        """The model's score on this rank's share of the rows.

        `reference` is the base model where a score needs more of it than `remember_base` kept: GRPO's KL and
        tasks with a KL term. None: the model's own adapter, switched off.
        """
        if self._spec.task_type.has_pairs:
            policy, other = self._both(model, rank, world)
            known = self._log_probs.keys() >= policy.keys()
            if not (known and self._other_log_probs.keys() >= other.keys()):
                base, base_other = self._reference_log_probs(model, reference, rank, world)
                self._log_probs |= base
                self._other_log_probs |= base_other
            return self._preferences(policy, other)
        if self._spec.task_type.generates:
            return self._generation(model, reference, rank, world)
        losses = row_losses(
            model,
            self._labelled(),
            self._pad,
            reference=reference,
            kl=bool(self._spec.kl_coefficient),
            rank=rank,
            world=world,
        )
        return self._losses(losses.rows, losses.kl_total, losses.kl_tokens)

    def _labelled(self) -> list[LabelledRow]:
        return [row for row in self.rows if isinstance(row, LabelledRow)]

    def _losses(self, rows: Mapping[int, float], kl_total: float, kl_tokens: int) -> HeldOutSums:
        coefficient = self._spec.kl_coefficient or 0.0

        def value(sums: Sequence[float]) -> float:
            kl = sums[2] / sums[3] if sums[3] else 0.0
            return _mean(sums) + coefficient * kl

        sums = (sum(rows.values()), float(len(rows)), kl_total, float(kl_tokens))
        return HeldOutSums("eval_loss+kl" if coefficient else "eval_loss", True, sums, value, rows)

    def _both(self, model: Any, rank: int, world: int) -> tuple[dict[int, LogProbs], dict[int, LogProbs]]:
        """Log probabilities by the rules of this era, and of the other."""
        share, own = {"rank": rank, "world": world}, _pairs(self.rows)
        other = pair_log_probs(model, self._other, self._pad, **share) if self._other else {}
        return pair_log_probs(model, own, self._pad, **share), other

    def _preferences(self, policy: Mapping[int, LogProbs], other: Mapping[int, LogProbs]) -> HeldOutSums:
        rows, others = pair_losses(policy, self._log_probs), pair_losses(other, self._other_log_probs)
        sums = (sum(rows.values()), float(len(rows)), sum(others.values()), float(len(others)))
        return HeldOutSums("dpo_loss", True, sums, _not_worse_by_the_other, rows)

    def _reference_log_probs(
        self, model: Any, reference: Any, rank: int, world: int
    ) -> tuple[dict[int, LogProbs], dict[int, LogProbs]]:
        if reference is not None:
            return self._both(reference, rank, world)
        with scoring_mode(model), without_adapter(model) as base:
            return self._both(base, rank, world)

    def _generation(self, model: Any, reference: Any, rank: int, world: int) -> HeldOutSums:
        assert self._rewards is not None, "a GRPO task has rewards"
        prompts = [row for row in self.rows if isinstance(row, PromptRow)]
        sampled = sample_completions(
            model,
            prompts,
            self._tokenizer,
            self._rewards,
            evaluation_rules(self._spec.era),
            reference=reference,
            rank=rank,
            world=world,
            window=model_window(self._spec.model_path),
            together=self._prompts,
        )
        return HeldOutSums("reward-margin", False, _reward_sums(sampled), self._margin)

    def rewarded(self, measured: HeldOutSums) -> RewardScore | None:
        """The parts of a score of all ranks; None where it is a loss, or not finite."""
        if self._rewards is None:
            return None
        means, kl = measured.rewards()
        base = (self.base or measured).rewards()[0]
        if not all(map(math.isfinite, (*means, *base, kl))):
            return None
        return RewardScore(means=means, base=base, weights=tuple(self._rewards.weights), kl=kl)

    def _margin(self, sums: Sequence[float]) -> float:
        """The gain over the base by the validators' rule; 0 for the base itself."""
        if self.base is None:
            raise ValueError("GRPO is scored against the base: remember_base comes first")
        rewarded = self.rewarded(replace(self.base, sums=tuple(sums)))
        return math.nan if rewarded is None else rewarded.margin


def _mean(sums: Sequence[float]) -> float:
    return sums[0] / sums[1] if sums[1] else float("nan")


def _pairs(rows: Sequence[Row]) -> list[PairRow]:
    return [row for row in rows if isinstance(row, PairRow)]


def _not_worse_by_the_other(sums: Sequence[float]) -> float:
    """The loss by this era's rules, for a model that is no worse than the base by the other's either. One
    that is has the greater of the two, which the base beats: validators of both eras are about."""
    own, other = _mean(sums), _mean(sums[2:]) if sums[3] else -math.inf
    return own if other <= UNTRAINED_DPO + _EQUAL else max(own, other)


def _reward_sums(sampled: SampledCompletions) -> tuple[float, ...]:
    """The sum of each function, the number of completions, the KL and the number of its prompts."""
    count = float(len(sampled.rewards[0])) if sampled.rewards else 0.0
    return (
        *(sum(numbers) for numbers in sampled.rewards),
        count,
        sampled.kl_total,
        float(sampled.kl_prompts),
    )


@dataclass
class RowLosses:
    """Losses of some of the rows, by their indices."""

    rows: dict[int, float] = field(default_factory=dict)
    kl_total: float = 0.0
    kl_tokens: int = 0


def row_losses(
    model: Any,
    rows: Sequence[LabelledRow],
    pad: int,
    *,
    reference: Any = None,
    kl: bool = False,
    rank: int = 0,
    world: int = 1,
    max_tokens: int | None = None,
) -> RowLosses:
    """The loss of each row of this rank. `reference` (None: the model without its adapter) is for the KL
    only."""
    model, result = unwrapped(model), RowLosses()
    limit = max_tokens or batch_tokens(vocabulary(model))

    def compute(places: list[int]) -> tuple[list[float], torch.Tensor | None]:
        ids, labels = [rows[place].ids for place in places], [rows[place].labels for place in places]
        divergences = None
        if kl:
            predicted, labelled = predict_and_label(model, ids, labels, pad)
            divergences = divergence(labelled, _base_logits(model, reference, ids, labels, pad))
        else:
            predicted = predict(model, ids, labels, pad)
        sums, tokens = by_row(-log_probs(predicted), predicted, len(places))
        return (sums / tokens).tolist(), divergences

    with scoring_mode(model):
        for batch, counts in rank_share([len(row.ids) for row in rows], limit, rank, world):
            for places, (losses, divergences) in in_halves(model, batch, compute):
                if not counts:
                    continue
                result.rows |= dict(zip(places, losses, strict=True))
                if divergences is not None:
                    result.kl_total += float(divergences.double().sum())
                    result.kl_tokens += int(divergences.numel())
    return result


def _base_logits(
    model: Any, reference: Any, ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]], pad: int
) -> Predicted:
    if reference is not None:
        with scoring_mode(reference):
            return label_logits(reference, ids, labels, pad)
    with without_adapter(model) as base:
        return label_logits(base, ids, labels, pad)


class LogProbs(NamedTuple):
    """Log p of the two answers of a pair."""

    chosen: float
    rejected: float


def pair_log_probs(
    model: Any,
    rows: Sequence[PairRow],
    pad: int,
    *,
    rank: int = 0,
    world: int = 1,
    max_tokens: int | None = None,
) -> dict[int, LogProbs]:
    """Log p by row index. Both answers are in one pass: they are about as long, and share the prompt."""
    model, result = unwrapped(model), dict[int, LogProbs]()
    lengths = [2 * (len(row.prompt) + max(len(row.chosen), len(row.rejected))) for row in rows]
    limit = max_tokens or batch_tokens(vocabulary(model))

    def compute(places: list[int]) -> list[list[float]]:
        sides = [(rows[place].prompt, rows[place].chosen) for place in places]
        sides += [(rows[place].prompt, rows[place].rejected) for place in places]
        ids = [[*prompt, *answer] for prompt, answer in sides]
        labels = [[*[IGNORED] * len(prompt), *answer] for prompt, answer in sides]
        predicted = predict(model, ids, labels, pad)
        sums, _ = by_row(log_probs(predicted), predicted, len(sides))
        pairs: list[list[float]] = sums.view(2, -1).T.tolist()
        return pairs

    with scoring_mode(model):
        for batch, counts in rank_share(lengths, limit, rank, world):
            for places, pairs in in_halves(model, batch, compute):
                if counts:
                    result |= {place: LogProbs(*pair) for place, pair in zip(places, pairs, strict=True)}
    return result


def pair_losses(policy: Mapping[int, LogProbs], reference: Mapping[int, LogProbs]) -> dict[int, float]:
    places = list(policy)
    margins = torch.tensor(
        [
            (policy[place].chosen - reference[place].chosen)
            - (policy[place].rejected - reference[place].rejected)
            for place in places
        ],
        dtype=torch.float64,
    )
    losses = -torch.nn.functional.logsigmoid(DPO_BETA * margins)
    return dict(zip(places, losses.tolist(), strict=True))
