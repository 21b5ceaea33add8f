from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from PIL import Image

from trainer.scoring.pictures_pixels import as_input, pixel_loss, read_picture, seeded_noise


def test_a_picture_is_scaled_cut_and_read_without_transparency(tmp_path: Path) -> None:
    image = Image.new("RGBA", (500, 333), (255, 0, 51, 128))
    image.save(tmp_path / "a.png")

    picture = read_picture(str(tmp_path / "a.png"))

    assert picture.shape == (3, 672, 1024)
    assert picture[:, 100, 100].tolist() == [255, 0, 51]
    assert as_input(picture, "cpu", torch.float32)[:, 0, 0].tolist() == pytest.approx([1.0, -1.0, -0.6])


def test_the_loss_is_the_mean_square_after_a_cut_to_eight_bits() -> None:
    picture = torch.tensor([[[0, 100]]], dtype=torch.uint8)

    # (0.8 + 1) / 2 x 255 = 229.5 is saved as 229; what is out of range is saved at its end.
    loss = pixel_loss(torch.tensor([[[-3.0, 0.8]]]), picture)

    assert loss == pytest.approx((129 / 255) ** 2 / 2)
    assert pixel_loss(picture.float() / 127.5 - 1.0 + 1e-6, picture) == 0.0


def test_a_render_that_is_no_number_has_no_loss() -> None:
    loss = pixel_loss(torch.tensor([[[float("nan")]]]), torch.zeros(1, 1, 1))

    assert math.isnan(loss)


def test_the_noise_of_a_seed_is_torchs_own_on_the_cpu() -> None:
    torch.manual_seed(7)
    expected = torch.randn(1, 4, 2, 2)

    assert torch.equal(seeded_noise(torch.zeros(1, 4, 2, 2, dtype=torch.bfloat16), 7), expected)
