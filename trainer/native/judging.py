"""What the model scores on held-out rows, and what a base model prefers: passes without gradients."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from trainer.callbacks.session import Judge
from trainer.native.batches import Batch, Rows, collate
from trainer.native.net import Net, PreferenceNet
from trainer.native.order import Micro
from trainer.native.ranks import Ranks


class HeldOutLoss(Judge):
    """The validators' loss on the held-out rows: each row, or pair, counts the same."""

    lower_is_better = True
    rewarded = None

    def __init__(self, net: Net, rows: Rows, ranks: Ranks, micro: int) -> None:
        self._net, self._rows, self._ranks, self._micro = net, rows, ranks, micro
        self._share, self.pass_s = 1.0, 0.0
        self.metric = "eval_loss+kl" if net.kl else "eval_loss"

    def begin(self, budget_s: float, untouched: bool) -> float:
        """A few rows tell what one costs, and so how many can be afforded each time."""
        self._share = self._least()
        value = self._timed()
        per_share = self.pass_s / self._share
        affordable = self._ranks.from_first([budget_s / max(per_share, 1e-9)])[0]
        if affordable > self._share and self._share < 1:
            self._share = min(affordable, 1.0)
            value = self._timed()
        return value

    def _timed(self) -> float:
        began = time.monotonic()
        value = self.judge()
        self.pass_s = time.monotonic() - began
        return value

    def judge(self) -> float:
        return evaluate(self._net, self._rows, self._ranks, self._micro, self._share)

    def _least(self) -> float:
        return min(8 * self._ranks.world * self._micro / max(len(self._rows.tokens), 1), 1.0)


@torch.no_grad()
def evaluate(net: Net, rows: Rows, ranks: Ranks, micro: int, share: float = 1.0) -> float:
    """The mean loss of rows or pairs, each rank's part added up; of an even sample of them if `share` is less
    than all."""
    sums, count, learned = torch.zeros(2, dtype=torch.float64), 0.0, 0.0
    with _evaluating(net):
        for _, batch in _batches(rows, ranks, micro, share):
            found = net(batch.to(ranks.device)).double().cpu()
            sums[: len(found)] += found * bool(batch.count)
            count, learned = count + batch.count, learned + batch.learned
            ranks.alive()
    *totals, count, learned = ranks.total(*sums.tolist(), count, learned)
    shares = net.shares(count, learned, torch.device("cpu"))
    return sum(total * float(share) for total, share in zip(totals, shares, strict=False))


@torch.no_grad()
def preferences(net: PreferenceNet, rows: Rows, ranks: Ranks, micro: int) -> Tensor:
    """How much the model prefers what was chosen, pair by pair, as it is now."""
    found = torch.zeros(len(rows.tokens) // 2, dtype=torch.float64)
    with _evaluating(net):
        for pairs, batch in _batches(rows, ranks, micro):
            values = net.preferred(batch.to(ranks.device)).double().cpu()
            found[list(pairs)] = values * bool(batch.count)
            ranks.alive()
    if ranks.world > 1:
        everywhere = found.to(ranks.device)
        torch.distributed.all_reduce(everywhere)
        found = everywhere.cpu()
    return found.float()


@contextmanager
def _evaluating(net: nn.Module) -> Iterator[None]:
    was_training = net.training
    net.eval()
    try:
        yield
    finally:
        net.train(was_training)


def _batches(
    rows: Rows, ranks: Ranks, micro: int, share: float = 1.0
) -> Iterator[tuple[tuple[int, ...], Batch]]:
    """This rank's part, long ones first, so that memory tells early. A sharded model is computed by all ranks
    together, so each has as many batches as the others: one that has fewer computes its first again, for
    nothing."""
    lengths = rows.tokens.lengths
    if rows.layout.pairs:
        lengths = lengths.reshape(-1, 2).max(axis=1)
    taken = max(round(len(lengths) * share), 1)
    sample = (np.arange(taken) * len(lengths)) // taken
    longest_first = sample[(-lengths[sample]).argsort(kind="stable")].tolist()
    mine = longest_first[ranks.rank :: ranks.world]
    most = -(-len(longest_first) // ranks.world)
    layout = replace(rows.layout, packed=False, length=None)
    for start in range(0, most, micro):
        some = tuple(mine[start : start + micro])
        single: Micro = tuple((row,) for row in some or longest_first[:1])
        batch = collate(rows.tokens, single, layout, rows.reference)
        yield some, batch if some else replace(batch, count=0.0, learned=0)
