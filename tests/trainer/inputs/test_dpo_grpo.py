"""Preferences, as each of the two evaluations encodes and cuts them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.domain.evaluation import Era, EvaluationRules, evaluation_rules
from core.domain.tasks import DpoDataset, GrpoDataset, RewardFunction
from tests.trainer.words import BEGIN, END, WordTokenizer
from trainer.inputs.dpo_grpo import (
    cut_pair,
    extra_text,
    has_equal_answers,
    pair_rows,
    prompt_rows,
    shorten_prompts,
)
from trainer.inputs.tokens import PairRow

OFFERS, TOURNAMENTS = evaluation_rules(Era.OFFERS), evaluation_rules(Era.TOURNAMENTS)
DRESSED = DpoDataset(
    field_prompt="p",
    field_system="s",
    field_chosen="c",
    field_rejected="r",
    prompt_format="<|user|>{prompt}",
    chosen_format="{chosen} dressed",
)
ROW = {"p": "why", "s": "be brief", "c": "so", "r": "no idea"}


def one(rules: EvaluationRules, row: dict[str, Any] = ROW) -> tuple[WordTokenizer, PairRow]:
    tokenizer = WordTokenizer(adds_begin=True)
    return tokenizer, next(iter(pair_rows(DRESSED, [row], tokenizer, rules)))


def test_offers_are_scored_on_raw_strings_without_a_beginning_and_with_an_end() -> None:
    tokenizer, row = one(OFFERS)
    assert [tokenizer.decode(side) for side in row] == ["why", "so<end>", "no idea<end>"]
    assert BEGIN not in [token for side in row for token in side]


def test_tournaments_are_scored_with_the_beginning_that_the_tokenizer_adds() -> None:
    tokenizer, row = one(TOURNAMENTS, {**ROW, "c": " so"})
    assert tokenizer.decode(row.prompt) == "<begin>why"
    assert tokenizer.decode(row.chosen) == " so<end>"
    assert row.prompt[0] == BEGIN
    assert row.chosen[-1] == row.rejected[-1] == END


def test_what_a_tokenizer_merges_across_the_border_is_cut_where_the_prompt_is_long() -> None:
    """Encoded as one text "why" and "so" are one word, which counts as the prompt: TRL does it so."""
    tokenizer, row = one(TOURNAMENTS)
    assert tokenizer.decode(row.chosen) == "<end>"


def test_the_end_is_appended_twice_by_the_one_evaluation_and_once_by_the_other() -> None:
    ended = {**ROW, "c": "so<end>"}
    assert list(one(OFFERS, ended)[1].chosen).count(END) == 2
    assert list(one(TOURNAMENTS, ended)[1].chosen).count(END) == 1


def reference_cut(prompt: list[int], chosen: list[int], rejected: list[int], most: int) -> list[list[int]]:
    """TRL 0.17, written down again: prompts keep 512, then the batch of both sides keeps its last columns."""
    prompt = prompt[-512:]
    sides = [[*prompt, *chosen], [*prompt, *rejected]]
    marks = [[0] * len(prompt) + [1] * len(side) for side in (chosen, rejected)]
    width = max(map(len, sides))
    padded = [side + [-1] * (width - len(side)) for side in sides]
    marked = [mark + [0] * (width - len(mark)) for mark in marks]
    kept = [[token for token in side[-most:] if token != -1] for side in padded]
    answers = [
        [token for token, mark in zip(side[-most:], line[-most:], strict=True) if mark]
        for side, line in zip(padded, marked, strict=True)
    ]
    return [kept[0], kept[1], answers[0], answers[1]]


ids = st.lists(st.integers(3, 99), max_size=30)


@given(st.lists(st.integers(3, 99), max_size=700), ids, ids, st.integers(1, 60))
def test_long_pairs_of_offers_lose_their_beginning_as_in_trl(
    prompt: list[int], chosen: list[int], rejected: list[int], most: int
) -> None:
    shorter = cut_pair(PairRow(prompt, chosen, rejected), OFFERS, most)
    first, second, good, bad = reference_cut(prompt, chosen, rejected, most)
    if shorter is None:
        assert not good or not bad
    else:
        assert [[*shorter.prompt, *shorter.chosen], [*shorter.prompt, *shorter.rejected]] == [first, second]
        assert [list(shorter.chosen), list(shorter.rejected)] == [good, bad]


@given(ids, ids, ids, st.integers(1, 60))
def test_long_pairs_of_tournaments_lose_their_end(
    prompt: list[int], chosen: list[int], rejected: list[int], most: int
) -> None:
    shorter = cut_pair(PairRow(prompt, chosen, rejected), TOURNAMENTS, most)
    wanted = [(prompt + side)[:most][len(prompt) :] for side in (chosen, rejected)]
    assert shorter is None if not all(wanted) else [list(shorter.chosen), list(shorter.rejected)] == wanted  # type: ignore[union-attr]


def test_cutting_twice_is_cutting_once() -> None:
    row = PairRow(list(range(600)), [1, 2, 3], [4])
    for rules in (OFFERS, TOURNAMENTS):
        once = cut_pair(row, rules, 100)
        if once is not None:
            assert cut_pair(once, rules, 100) == once


def test_equal_answers_teach_nothing() -> None:
    assert has_equal_answers(PairRow([1], [2], [2]))
    assert not has_equal_answers(PairRow([1], [2], [3]))


def test_columns_have_the_usual_names_where_the_task_names_none() -> None:
    rows = [{"prompt": "p", "chosen": "c", "rejected": "r"}]
    assert len(list(pair_rows(DpoDataset(), rows, WordTokenizer(), OFFERS))) == 1


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
