"""The moving average of weights that two processes share."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.trainer import tiny
from tests.trainer.forks import ForkServer
from tests.trainer.sharding import split, together
from trainer.session.ema import MovingAverage, drop_gathered

IDS = torch.arange(5, 45).reshape(2, 20)


def average_of(model: Any) -> MovingAverage:
    drop_gathered(model)
    return MovingAverage(dict(model.named_parameters()), 0.5, drop_gathered=partial(drop_gathered, model))


def trained(model: Any, average: MovingAverage, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(1, steps + 1):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.stepped(step)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


def averages_of_parts_are_the_parts_of_the_average(rank: int) -> None:
    whole, parts = tiny.model(), split(tiny.model(), registered=False)
    # What a pass has gathered stays gathered: after a swap these would be weights of before.
    parts.set_reshard_after_forward(False)
    ours, theirs = average_of(whole), average_of(parts)
    trained(whole, ours, 3)
    trained(parts, theirs, 3)
    before = logits(parts)
    assert torch.allclose(before, logits(whole), atol=1e-4)
    with ours.applied(), theirs.applied():
        inside = logits(parts)
        assert torch.allclose(inside, logits(whole), atol=1e-4)
    assert not torch.allclose(inside, before, atol=1e-3)
    assert torch.equal(logits(parts), before)

    sizes = sum(mean.numel() for mean in theirs.state().values())
    assert sizes < 0.6 * sum(mean.numel() for mean in ours.state().values())
    again = average_of(parts)
    again.restore(theirs.state(), theirs.updates)
    with again.applied():
        assert torch.equal(logits(parts), inside)


def test_two_ranks_average_their_own_parts(forks: ForkServer, tmp_path: Path) -> None:
    assert together(forks, tmp_path, averages_of_parts_are_the_parts_of_the_average)
