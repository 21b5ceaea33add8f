"""The measure against numbers that were computed from its rules by other means."""

from __future__ import annotations

import hashlib

import numpy
import pytest
import torch
from PIL import Image

from trainer.pictures.measure import (
    UnusablePicture,
    case_noise,
    case_seed,
    flow_losses,
    noisy,
    picture_digest,
    prepared,
    score,
    sigma_of,
)

pytestmark = pytest.mark.small

DIGEST = hashlib.sha256(b"a picture").hexdigest()


def test_a_seed_is_made_of_the_digest_the_band_and_the_draw() -> None:
    # By sha256sum, the first 16 digits of its output from the last byte to the first, and perl's bigint.
    assert case_seed("0" * 64, 0, 0) == 4695004516045530577
    assert case_seed("0" * 64, 15, 3) == 5430265200871387492
    assert case_seed(DIGEST, 7, 15) == 4888190323157806691


def test_noise_is_drawn_for_each_case_by_a_generator_of_its_own() -> None:
    latent = torch.zeros(1, 4, 2, 3)
    noise = case_noise(latent, DIGEST, 7, 16)
    assert noise.shape == (16, 4, 2, 3)
    alone = torch.Generator().manual_seed(case_seed(DIGEST, 7, 15))
    assert torch.equal(noise[15], torch.randn(4, 2, 3, generator=alone))
    assert torch.equal(case_noise(latent, DIGEST, 7, 2), noise[:2])


def test_levels_are_the_middles_of_16_bands() -> None:
    assert [sigma_of(band) for band in (0, 1, 15)] == [0.03125, 0.09375, 0.96875]


def test_a_case_by_hand() -> None:
    latent, noise = torch.full((2, 1, 1, 2), 0.5), torch.tensor([[[[1.0, -1.0]]], [[[0.0, 2.0]]]])
    given = noisy(latent, noise, 0.25)
    assert given.flatten().tolist() == [0.625, 0.125, 0.375, 0.875]
    # It takes all for the latent's double: (0.625 - 1) / 0.25 = -1.5 where 0.5 is right, and so on.
    losses = flow_losses(given, torch.ones(2, 1, 1, 2), noise - latent, 0.25)
    assert losses.tolist() == [
        ((-1.5 - 0.5) ** 2 + (-3.5 + 1.5) ** 2) / 2,
        ((-2.5 + 0.5) ** 2 + (-0.5 - 1.5) ** 2) / 2,
    ]


def test_losses_are_those_of_numpy() -> None:
    chance = numpy.random.default_rng(1)
    latent, noise, guess = (chance.standard_normal((2, 4, 8, 8), numpy.float32) for _ in range(3))
    sigma = sigma_of(3)
    given = (1 - sigma) * latent + sigma * noise
    wanted = (((given.astype("f8") - guess) / sigma - (noise - latent)) ** 2).mean((1, 2, 3))
    tensors = (torch.from_numpy(array) for array in (latent, noise, guess))
    found = flow_losses(noisy(x := next(tensors), n := next(tensors), sigma), next(tensors), n - x, sigma)
    assert found.tolist() == pytest.approx(wanted.tolist(), rel=1e-6)


def test_captions_and_the_empty_text_count_half_each() -> None:
    assert score([1.0, 3.0], [0.5]) == 1.25


@pytest.mark.parametrize(
    ("size", "kept"),
    [
        ((1000, 500), (1024, 512)),
        ((500, 1000), (512, 1024)),
        ((777, 777), (1024, 1024)),
        ((1, 1), (1024, 1024)),
        ((3000, 1999), (1024, 672)),  # 682 pixels, of which a multiple of 16 is left
    ],
)
def test_pictures_are_brought_to_size(size: tuple[int, int], kept: tuple[int, int]) -> None:
    assert prepared(Image.new("RGB", size)).size == kept


def test_the_middle_is_kept() -> None:
    picture = Image.new("RGB", (1024, 1024 * 682 // 1024), (0, 0, 0))
    picture.paste((255, 255, 255), (0, 0, 1024, 5))
    assert picture.size == (1024, 682)
    assert prepared(picture).getpixel((0, 0)) == (0, 0, 0)  # five of ten rows are cut off above


def test_every_mode_becomes_rgb_after_its_size() -> None:
    for mode in ("L", "RGBA", "P", "CMYK"):
        assert prepared(Image.new(mode, (64, 64))).mode == "RGB"


def test_a_strip_is_unusable() -> None:
    with pytest.raises(UnusablePicture, match="1×2000"):
        prepared(Image.new("RGB", (1, 2000)))


def test_a_digest_is_of_the_bytes_and_the_size() -> None:
    picture = Image.new("RGB", (32, 16), (1, 2, 3))
    assert picture_digest(picture) == hashlib.sha256(b"\1\2\3" * 512 + b"(32, 16)").hexdigest()
    assert picture_digest(picture) != picture_digest(picture.resize((16, 32)))
