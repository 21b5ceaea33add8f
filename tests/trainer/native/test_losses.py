"""What a token's prediction cost."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from trainer.native import losses


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_chunks_give_the_loss_and_gradients_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, cap: float | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(37, 8, dtype=dtype), torch.randn(50, 8, dtype=dtype)
    targets, weight = torch.randint(50, (37,)), torch.rand(37)

    def gradients(kept: int) -> list[torch.Tensor]:
        monkeypatch.setattr(losses, "KEPT_BYTES", kept)
        monkeypatch.setattr(losses, "CHUNK_BYTES", 4 * 50 * 10)
        inputs = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
        found = losses.token_losses(*inputs, targets, cap)
        (found * weight).sum().backward()
        return [found.detach(), *(one.grad for one in inputs)]

    for chunked, plain in zip(gradients(0), gradients(1 << 30), strict=True):
        torch.testing.assert_close(chunked, plain, rtol=1e-4, atol=1e-5)


def test_a_frozen_head_costs_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "KEPT_BYTES", 0)
    hidden, head = torch.randn(4, 8, requires_grad=True), torch.randn(50, 8)
    losses.token_losses(hidden, head, torch.arange(4)).sum().backward()
    assert hidden.grad is not None
    assert head.grad is None


def test_preferences_are_the_papers() -> None:
    found = losses.preference_losses(torch.tensor([1.0]), torch.tensor([0.5]), beta=0.1)
    torch.testing.assert_close(found, -F.logsigmoid(torch.tensor([0.1 * (1.0 - 0.5)])))
