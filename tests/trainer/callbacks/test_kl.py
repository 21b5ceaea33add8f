"""The KL to the base model, against the library's own formula."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import kl_div

from trainer.callbacks import kl as kl_module
from trainer.callbacks.kl import kl_of_labels


def logits(seed: int, rows: int = 3, length: int = 9, words: int = 17) -> torch.Tensor:
    return torch.randn(rows, length, words, generator=torch.Generator().manual_seed(seed)) * 2


def labels(rows: int = 3, length: int = 9) -> torch.Tensor:
    found = torch.arange(rows * length).reshape(rows, length) % 17
    found[:, :3] = -100
    found[1, 6:] = -100
    return found


def test_it_is_the_mean_over_the_labels_own_positions_of_what_the_library_computes() -> None:
    """Not moved by one: that is where evaluation masks the logits."""
    mine, theirs, learned = logits(1), logits(2), labels()
    mask = learned != -100
    log_p = mine[mask].log_softmax(-1)
    log_q = theirs[mask].log_softmax(-1)
    expected = kl_div(log_q, log_p, log_target=True, reduction="sum") / mask.sum()
    assert kl_of_labels(mine, theirs, learned).item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_model_that_is_still_the_base_has_none() -> None:
    same = logits(1)
    assert kl_of_labels(same, same.clone(), labels()).item() == pytest.approx(0, abs=1e-6)


def test_its_gradient_reaches_the_trained_model_alone_and_points_back_to_the_base() -> None:
    mine, theirs = logits(1).requires_grad_(), logits(2)
    before = kl_of_labels(mine, theirs, labels())
    before.backward()
    assert mine.grad is not None
    closer = mine.detach() - 5.0 * mine.grad
    assert kl_of_labels(closer, theirs, labels()) < before.detach()


def test_piece_by_piece_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = kl_of_labels(logits(1), logits(2), labels())
    monkeypatch.setattr(kl_module, "CHUNK", 4)
    assert kl_of_labels(logits(1), logits(2), labels()).item() == pytest.approx(whole.item(), rel=1e-5)


def test_a_batch_with_nothing_to_learn_has_none() -> None:
    nothing = torch.full((3, 9), -100)
    assert kl_of_labels(logits(1), logits(2), nothing).item() == 0
