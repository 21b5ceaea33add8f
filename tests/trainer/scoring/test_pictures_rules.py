"""The noise levels come from ComfyUI's formulas in torch's single precision, not from the code under test."""

from __future__ import annotations

import pytest

from core.domain.tasks import ImageModelType
from core.models.image_families import IMAGE_FAMILIES, RenderRules
from trainer.scoring.pictures_rules import crop_box, noise_levels, scaled_size, seed_list, seeds, task_loss


def rules_of(family: str) -> RenderRules:
    rules = IMAGE_FAMILIES[ImageModelType(family)].render
    assert rules is not None
    return rules


def test_every_family_but_sdxl_which_validators_no_longer_send_can_be_scored() -> None:
    unscored = [kind for kind, record in IMAGE_FAMILIES.items() if record.render is None]
    assert unscored == [ImageModelType.SDXL]


def test_the_seeds_are_the_validators_and_a_job_takes_the_first_of_them() -> None:
    assert seeds(3) == [2746317213, 1181241943, 958682846]
    assert seed_list(rules_of("krea2"), 2) == seeds(10)[:2]
    assert len(seed_list(rules_of("krea2"), 99)) == 5
    assert len(seed_list(rules_of("z-image"), 99)) == 10


def test_flux_renders_a_picture_once_since_its_graph_has_a_noise_of_its_own() -> None:
    assert seed_list(rules_of("flux"), 10) == [18006742449132]


@pytest.mark.parametrize(
    ("size", "scaled", "box"),
    [
        ((2048, 1024), (1024, 512), (0, 0, 1024, 512)),
        ((640, 480), (1024, 768), (0, 0, 1024, 768)),
        # 700 / 1000 x 1,024 = 716.8; of 716 columns 704 remain, 6 go on each side.
        ((700, 1000), (716, 1024), (6, 0, 710, 1024)),
        # 333 / 500 x 1,024 = 681.98; 681 is 672 and 9: 4 rows go above.
        ((500, 333), (1024, 681), (0, 4, 1024, 676)),
        ((300, 300), (1024, 1024), (0, 0, 1024, 1024)),
    ],
)
def test_pictures_get_a_long_side_of_1024_and_lose_what_is_over_a_multiple_of_16(
    size: tuple[int, int], scaled: tuple[int, int], box: tuple[int, int, int, int]
) -> None:
    assert scaled_size(*size) == scaled
    assert crop_box(*scaled) == box


@pytest.mark.parametrize(
    ("family", "steps", "first", "last"),
    [
        # 10 / 0.9 = 11 steps over 1,000 entries; the first is left out: 1000 - 90, then 1000 - 909.
        ("z-image", 10, 3 * 0.910 / 2.820, 3 * 0.091 / 1.182),
        # 20 / 0.93 = 21 steps; 1000 - 47, then 1000 - 952.
        ("qwen-image", 20, 3 * 0.953 / 2.906, 3 * 0.048 / 1.096),
        # 25 / 0.8 = 31 steps over 10,000 entries, six left out; 10000 - 1935, then 10000 - 9677.
        ("krea2", 25, 0.929395, 0.095362),
        # 35 / 0.75 = 46 steps of evenly spaced times, eleven left out.
        ("flux", 35, 0.909527, 0.066469),
        # round(30 x 0.75) = 22 steps; the normal distribution at 22/30 and at 1/30.
        ("ideogram4", 22, 0.907482, 0.117512),
    ],
)
def test_the_noise_levels_are_those_of_the_validators_graph(
    family: str, steps: int, first: float, last: float
) -> None:
    levels = noise_levels(rules_of(family), 1024, 1024)

    assert len(levels) == steps + 1
    assert levels[0] == pytest.approx(first, abs=2e-6)
    assert levels[-2] == pytest.approx(last, abs=2e-6)
    assert levels[-1] == 0.0
    assert levels == sorted(levels, reverse=True)


def test_ideograms_noise_levels_rise_with_the_size_of_the_picture() -> None:
    rules = rules_of("ideogram4")

    # In the middle of 30 steps the level is the distribution's centre: 0.5, and half the logarithm of 4.
    assert noise_levels(rules, 1024, 1024)[7] == pytest.approx(0.767303, abs=2e-6)
    assert noise_levels(rules, 512, 512)[7] == pytest.approx(0.622459, abs=2e-6)


def test_the_empty_text_counts_three_times_as_much() -> None:
    assert task_loss([0.1, 0.3], [0.02, 0.06]) == pytest.approx(0.25 * 0.2 + 0.75 * 0.04)
