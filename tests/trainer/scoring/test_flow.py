"""The flow loss of pictures."""

from __future__ import annotations

import hashlib

import pytest
import torch

from trainer.scoring.flow import DRAWS, LEVELS, Picture, cases, flow_loss, picture_losses

LATENT = torch.linspace(-1, 1, 4 * 6 * 6).reshape(1, 4, 6, 6)
PICTURE = Picture(LATENT, "ab" * 32, "a red apple")


def test_levels_are_the_middles_of_equal_bands_and_draws_are_the_validators() -> None:
    found = list(cases(PICTURE))
    assert [case.level for case in found] == pytest.approx([(band + 0.5) / 16 for band in range(LEVELS)])
    assert all(len(case.noisy) == DRAWS for case in found)
    seed = int.from_bytes(hashlib.sha256(f"42:{'ab' * 32}:3:5".encode()).digest()[:8], "little") % (2**63 - 1)
    noise = torch.randn(LATENT.shape, generator=torch.Generator().manual_seed(seed))
    level = 3.5 / 16
    torch.testing.assert_close(found[3].noisy[5], ((1 - level) * LATENT + level * noise)[0])
    torch.testing.assert_close(found[3].target[5], (noise - LATENT)[0])


def test_a_model_that_knows_the_picture_makes_no_error() -> None:
    def knows(noisy: torch.Tensor, level: float, caption: str) -> torch.Tensor:
        return (noisy - LATENT) / level

    assert flow_loss(knows, PICTURE, "") == pytest.approx(0.0, abs=1e-8)


def test_predicting_nothing_costs_the_size_of_the_target() -> None:
    expected = torch.cat([case.target for case in cases(PICTURE)]).square().mean()
    found = flow_loss(lambda noisy, level, caption: torch.zeros_like(noisy), PICTURE, "")
    assert found == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("together", [1, 3, 16])
def test_how_many_draws_pass_together_does_not_matter(together: int) -> None:
    def half(noisy: torch.Tensor, level: float, caption: str) -> torch.Tensor:
        return noisy / 2

    assert flow_loss(half, PICTURE, "", together=together) == pytest.approx(
        flow_loss(half, PICTURE, ""), rel=1e-6
    )


def test_without_a_caption_counts_three_times_as_much() -> None:
    def needs_caption(noisy: torch.Tensor, level: float, caption: str) -> torch.Tensor:
        return (noisy - LATENT) / level if caption else torch.zeros_like(noisy)

    (found,) = picture_losses(needs_caption, [PICTURE])
    empty = flow_loss(needs_caption, PICTURE, "")
    assert found == pytest.approx(0.75 * empty, rel=1e-6)
