"""The moving average of the weights: what it averages, in which format, and that nothing is lost by
judging it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer import tiny
from tests.trainer.forks import ForkServer
from tests.trainer.sharding import split, together
from trainer.session.ema import MovingAverage, drop_gathered


def weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"one": torch.zeros(4096, dtype=dtype, requires_grad=True)}


def run(average: MovingAverage, weight: torch.Tensor, steps: int, gain: float = 1.0) -> None:
    for step in range(1, steps + 1):
        weight.data += gain
        average.stepped(step)


def test_it_follows_the_weights_with_the_decay_that_was_asked_for() -> None:
    trained = weights()
    average = MovingAverage(trained, decay=0.9)
    expected, value = 0.0, 0.0
    for step in range(1, 301):
        value += 1.0
        trained["one"].data.fill_(value)
        average.stepped(step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * value
    with average.applied():
        assert trained["one"][0].item() == pytest.approx(expected, rel=1e-4)
    assert 300 - expected == pytest.approx(9, rel=0.01)  # decay / (1 - decay) steps behind


def test_a_short_training_is_not_scored_by_the_weights_it_began_with() -> None:
    trained = weights()
    average = MovingAverage(trained, decay=0.9999)
    run(average, trained["one"], 20)
    with average.applied():
        assert trained["one"][0].item() > 8


def test_only_every_so_many_steps_count() -> None:
    trained = weights()
    average = MovingAverage(trained, decay=0.5, every=4)
    run(average, trained["one"], 11)
    assert average.updates == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_are_back_as_they_were_afterwards(dtype: torch.dtype) -> None:
    trained = weights(dtype)
    average = MovingAverage(trained, decay=0.5)
    run(average, trained["one"], 3)
    before = trained["one"].detach().clone()
    with average.applied():
        inside = trained["one"].detach().clone()
    assert torch.equal(trained["one"], before)
    assert not torch.equal(inside, before)
    with average.applied():
        assert torch.equal(trained["one"], inside)


def test_they_are_back_also_when_the_evaluation_fails() -> None:
    trained = weights()
    average = MovingAverage(trained, decay=0.5)
    run(average, trained["one"], 3)
    before = trained["one"].detach().clone()
    with pytest.raises(RuntimeError, match="evaluation"), average.applied():
        raise RuntimeError("the evaluation failed")
    assert torch.equal(trained["one"], before)


def test_in_bf16_parts_too_small_for_the_format_are_kept_in_the_mean() -> None:
    """Plain rounding would leave every weight at 1 for ever: a thousandth of the way is below the last
    digit."""
    torch.manual_seed(0)
    trained = {"one": torch.ones(20_000, dtype=torch.bfloat16, requires_grad=True)}
    average = MovingAverage(trained, decay=0.999)
    average.updates = 100_000
    trained["one"].data.fill_(1.5)
    for step in range(1, 201):
        average.stepped(step)
    with average.applied():
        mean = trained["one"].float().mean().item()
    assert mean == pytest.approx(1.5 - 0.5 * 0.999**200, abs=0.005)
    naive = torch.ones(1, dtype=torch.bfloat16).float().lerp(torch.tensor([1.5]), 0.001).to(torch.bfloat16)
    assert naive.item() == 1.0


def test_another_process_resumes_with_the_same_average() -> None:
    trained = weights()
    average = MovingAverage(trained, decay=0.9)
    run(average, trained["one"], 50)
    saved = {name: tensor.clone() for name, tensor in average.state().items()}
    again = MovingAverage(trained, decay=0.9)
    again.restore(saved, average.updates)
    for one in (average, again):
        one.stepped(51)
    assert torch.equal(average.state()["one"], again.state()["one"])
    assert again.updates == 51


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
