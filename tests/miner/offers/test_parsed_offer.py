from __future__ import annotations

from core.domain.tasks import ImageModelType
from core.models.facts import Family
from miner.offers.parsed_offer import estimate_size, parse_offer
from tests.doubles.each import each
from tests.miner.offers.builders import offer, picture_offer


def test_a_text_offer_is_called_by_its_type_and_sized_by_its_count() -> None:
    parsed = parse_offer(offer())
    assert (parsed.kinds, parsed.params, parsed.size.mismatch) == (("instruct",), 8_030_261_248, None)
    assert parsed.model.family is Family.LLAMA


@each(
    ("name", "count", "taken_for", "doubt"),
    [
        ("someone/tiny-1b", 70_000_000_000, 70_000_000_000, True),
        ("someone/giant-70b", 7_000_000_000, 70_000_000_000, True),
        ("someone/llama-8b", 7_000_000_000, 7_000_000_000, False),
        ("someone/no-size", 7_000_000_000, 7_000_000_000, False),
        ("someone/llama-8b", None, 8_000_000_000, False),
        ("someone/no-size", 0, None, False),
    ],
)
def test_of_two_sizes_that_contradict_each_other_the_larger_is_planned_for(
    name: str, count: int | None, taken_for: int | None, doubt: bool
) -> None:
    size = estimate_size(name, count)
    assert (size.params, size.mismatch is not None) == (taken_for, doubt)
    parsed = parse_offer(offer(model=name, model_params_count=count))
    assert parsed.planned_params == (taken_for if doubt else count)


@each(
    ("name", "count", "billions"),
    [
        ("a/llama-8b", 8_030_261_248, 8),
        ("a/llama-70b", 70_553_706_496, 40),
        ("a/llama-1b", 300_000_000, 1),
        ("a/llama-70b", None, 8),
        ("a/llama", None, 1),
    ],
)
def test_billions_are_counted_as_validators_count_them(name: str, count: int | None, billions: int) -> None:
    assert parse_offer(offer(model=name, model_params_count=count)).billions == billions


@each(
    ("name", "kinds"),
    [
        ("rayonlabs/FLUX.1-dev", ("flux", "image")),
        ("stabilityai/stable-diffusion-xl-base-1.0", ("sdxl", "image")),
        ("runwayml/stable-diffusion-v1-5", ("sd", "sdxl", "image")),
        ("someone/sd-1.5-anime", ("sd", "sdxl", "image")),
        ("someone/sd1x-lightning", ("sdxl", "image")),
        ("someone/my-sdxl-1", ("sdxl", "image")),
    ],
)
def test_an_image_offer_is_called_by_its_image_model_first(name: str, kinds: tuple[str, ...]) -> None:
    assert parse_offer(picture_offer(model=name)).kinds == kinds


def test_the_image_type_of_a_start_wins_over_the_model_s_name() -> None:
    parsed = parse_offer(picture_offer(), ImageModelType.QWEN_IMAGE)
    assert parsed.kinds == ("qwen-image", "image")
    assert parsed.model.family is Family.QWEN_IMAGE
