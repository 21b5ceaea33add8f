"""GRPO prompts and what goes with them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.domain.evaluation import Era, evaluation_rules
from core.domain.tasks import GrpoDataset, RewardFunction
from tests.trainer.words import WordTokenizer
from trainer.inputs.dpo_grpo import extra_text, prompt_rows, shorten_prompts

OFFERS, TOURNAMENTS = evaluation_rules(Era.OFFERS), evaluation_rules(Era.TOURNAMENTS)


def task(**fields: Any) -> GrpoDataset:
    reward = RewardFunction(reward_func="def r(completions): ...", reward_weight=1)
    return GrpoDataset(reward_functions=[reward], **fields)


def count(text: str) -> int:
    return len(WordTokenizer()(text)["input_ids"])


@pytest.mark.parametrize(
    ("fields", "row", "expected"),
    [
        ({"field_prompt": "prompt", "extra_column": "extra"}, {"prompt": "p", "extra": "x"}, ("p", "x")),
        ({"field_prompt": "prompt", "extra_column": "extra"}, {"prompt": "p", "extra_data": "x"}, ("p", "x")),
        ({"field_prompt": "prompt"}, {"prompt": "p", "extra_data": "x"}, ("p", None)),
        ({"field_prompt": "question"}, {"prompt": "p"}, ("p", None)),
        ({"field_prompt": "question"}, {"question": "q"}, ("q", None)),
    ],
)
def test_prompt_and_extra_are_under_the_tasks_names_or_the_files(
    fields: dict[str, str], row: dict[str, str], expected: tuple[str, str | None]
) -> None:
    assert [tuple(prompt) for prompt in prompt_rows(task(**fields), [row])] == [expected]


def test_a_long_prompt_keeps_its_last_512_tokens() -> None:
    text = " ".join(f"w{number}" for number in range(600))
    (short,) = shorten_prompts([text], WordTokenizer(), OFFERS, 4096)
    assert count(short) == 512
    assert text.endswith(short)


def test_tournaments_keep_what_training_can_afford_the_beginning_counted() -> None:
    text = " ".join(f"w{number}" for number in range(600))
    (short,) = shorten_prompts([text], WordTokenizer(adds_begin=True), TOURNAMENTS, 100)
    assert count(short) == 99
    assert list(shorten_prompts([text], WordTokenizer(), TOURNAMENTS, 4096)) == [text]


@given(st.lists(st.text(max_size=60), max_size=4), st.integers(1, 20))
def test_every_prompt_is_the_end_of_itself_and_short_enough(prompts: list[str], room: int) -> None:
    for text, short in zip(prompts, shorten_prompts(prompts, WordTokenizer(), OFFERS, room), strict=True):
        assert text.endswith(short)
        assert count(short) <= room


@pytest.mark.parametrize(("value", "text"), [(None, None), ("x", "x"), ({"k": [1]}, '{"k": [1]}'), (3, "3")])
def test_anything_that_goes_along_has_a_text(value: object, text: str | None) -> None:
    assert extra_text(value) == text
