"""Passes without gradients: the held-out loss, and what the base model prefers (DPO)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainer.native.batches import MicroBatch, TokenBatch, TokenRows, collate
from trainer.native.distributed import NativeCommunicator
from trainer.native.model import DpoLossModel, LossModel
from trainer.session.session import Scorer


class HeldOutLoss(Scorer):
    """The validators' loss on the held-out rows: each row, or pair, counts the same."""

    lower_is_better = True
    rewarded = None

    def __init__(self, net: LossModel, rows: TokenRows, ranks: NativeCommunicator, micro: int) -> None:
        self._net, self._rows, self._ranks, self._micro = net, rows, ranks, micro
        self._share, self.pass_seconds = 1.0, 0.0
        self.metric = "eval_loss+kl" if net.kl else "eval_loss"

    def score_base(self, budget_s: float, untouched: bool) -> float:
        """Measure a few rows, and from that decide how many each evaluation can afford."""
        self._share = self._least()
        value = self._timed()
        per_share = self.pass_seconds / self._share
        affordable = self._ranks.from_first([budget_s / max(per_share, 1e-9)])[0]
        if affordable > self._share and self._share < 1:
            self._share = min(affordable, 1.0)
            value = self._timed()
        return value

    def _timed(self) -> float:
        began = time.monotonic()
        value = self.score()
        self.pass_seconds = time.monotonic() - began
        return value

    @torch.no_grad()
    def score(self) -> float:
        """The mean loss of rows or pairs, each rank's part added up, of an even sample if there are many."""
        net, ranks = self._net, self._ranks
        sums, count, learned = torch.zeros(2, dtype=torch.float64), 0.0, 0.0
        with _evaluating(net):
            for _, batch in _eval_batches(self._rows, ranks, self._micro, self._share):
                losses = net(batch.to(ranks.device)).double().cpu()
                sums[: len(losses)] += losses * bool(batch.count)
                count, learned = count + batch.count, learned + batch.learned
                ranks.heartbeat()
        *totals, count, learned = ranks.sum(*sums.tolist(), count, learned)
        shares = net.shares(count, learned, torch.device("cpu"))
        return sum(total * float(share) for total, share in zip(totals, shares, strict=False))

    def _least(self) -> float:
        return min(8 * self._ranks.world * self._micro / max(len(self._rows.tokens), 1), 1.0)


@torch.no_grad()
def base_preferences(net: DpoLossModel, rows: TokenRows, ranks: NativeCommunicator, micro: int) -> Tensor:
    """Return how much the model, as it is now, prefers the chosen answer of each pair."""
    preferences = torch.zeros(len(rows.tokens) // 2, dtype=torch.float64)
    with _evaluating(net):
        for pairs, batch in _eval_batches(rows, ranks, micro):
            values = net.preferred(batch.to(ranks.device)).double().cpu()
            preferences[list(pairs)] = values * bool(batch.count)
            ranks.heartbeat()
    if ranks.world > 1:
        everywhere = preferences.to(ranks.device)
        torch.distributed.all_reduce(everywhere)
        preferences = everywhere.cpu()
    return preferences.float()


def with_base_preferences(
    net: DpoLossModel,
    rows: TokenRows,
    ranks: NativeCommunicator,
    micro: int,
    folder: Path,
    *,
    resumed: bool,
) -> TokenRows:
    """Add the base model's preferences to the rows: computed before the first step, and read from disk in a
    resumed run."""
    path = folder / f"reference-{rows.tokens.fingerprint()[-1]:08x}.pt"
    if resumed and path.exists():
        reference = torch.load(path, weights_only=True)
    else:
        reference = base_preferences(net, rows, ranks, micro)
        if ranks.rank == 0:
            torch.save(reference, half := path.with_suffix(".half"))
            half.replace(path)
    return TokenRows(rows.tokens, rows.layout, reference)


def even_sample(count: int, share: float) -> NDArray[np.int64]:
    """Return the places of an even sample of `count` rows."""
    taken = max(round(count * share), 1)
    return (np.arange(taken) * count) // taken


@contextmanager
def _evaluating(net: nn.Module) -> Iterator[None]:
    was_training = net.training
    net.eval()
    try:
        yield
    finally:
        net.train(was_training)


def _eval_batches(
    rows: TokenRows, ranks: NativeCommunicator, micro: int, share: float = 1.0
) -> Iterator[tuple[tuple[int, ...], TokenBatch]]:
    """This rank's part, long ones first, so that memory runs out early or never. A sharded model runs on all
    ranks together, so each has as many batches as the others: one with fewer repeats its first, uncounted."""
    lengths = rows.lengths
    sample = even_sample(len(lengths), share)
    longest_first = sample[(-lengths[sample]).argsort(kind="stable")].tolist()
    own = longest_first[ranks.rank :: ranks.world]
    rounds = -(-len(longest_first) // ranks.world)
    layout = replace(rows.layout, packed=False, length=None)
    for start in range(0, rounds, micro):
        indices = tuple(own[start : start + micro])
        single: MicroBatch = tuple((row,) for row in indices or longest_first[:1])
        batch = collate(rows.tokens, single, layout, rows.reference)
        yield indices, batch if indices else replace(batch, count=0.0, learned=0)
