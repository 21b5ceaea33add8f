"""Prompts and answers of instruct tasks."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from core.domain.tasks import InstructDataset
from tests.doubles.each import each
from tests.trainer.words import BEGIN, END, WordTokenizer
from trainer.errors import BadData
from trainer.inputs.instruct import InstructText, count_learned, fill_format, instruct_rows, split_completion
from trainer.inputs.tokens import IGNORED

PLAIN = InstructDataset(field_instruction="q", field_input="c", field_output="a")


def encoded(dataset: InstructDataset, row: dict[str, Any], *, limit: int = 100, **habits: Any) -> Any:
    return next(iter(instruct_rows(dataset, [row], WordTokenizer(**habits), limit)))


def test_prompt_and_answer_are_encoded_apart_with_nothing_between_and_the_end_after() -> None:
    tokenizer = WordTokenizer(adds_begin=True)
    row = next(iter(instruct_rows(PLAIN, [{"q": "why not", "c": "", "a": "so it is"}], tokenizer, 100)))
    assert tokenizer.decode(row.ids) == "<begin>why notso it is<end>"
    assert tokenizer.decode([one for one in row.labels if one != IGNORED]) == "so it is<end>"
    assert row.ids[0] == BEGIN
    assert list(row.ids).count(BEGIN) == 1


@each(
    ("dataset", "row", "prompt"),
    [
        (PLAIN, {"q": "Q", "c": "C"}, "Q C"),
        (PLAIN, {"q": "Q", "c": ""}, "Q"),
        (PLAIN, {"q": "Q", "c": None}, "Q"),
        (PLAIN, {"q": None}, ""),
        (InstructDataset(field_instruction="q", field_output="a", system_prompt="S"), {"q": "Q"}, "SQ"),
        (
            InstructDataset(field_instruction="q", field_output="a", field_system="s"),
            {"q": "Q", "s": "S"},
            "SQ",
        ),
        (
            InstructDataset(
                field_instruction="q", field_output="a", field_system="s", system_format="{system}: "
            ),
            {"q": "Q", "s": ""},
            "Q",
        ),
        (
            InstructDataset(
                field_instruction="q", field_input="c", field_output="a", format="[{input}|{instruction}]"
            ),
            {"q": "Q", "c": "C"},
            "[C|Q]",
        ),
        (
            InstructDataset(field_instruction="q", field_output="a", no_input_format="{instruction}?"),
            {"q": "Q"},
            "Q?",
        ),
    ],
)
def test_the_prompt_is_what_the_request_makes_of_a_row(
    dataset: InstructDataset, row: dict[str, Any], prompt: str
) -> None:
    assert InstructText(dataset, frozenset(row)).prompt(row) == prompt


def test_a_system_column_of_some_rows_takes_the_place_of_the_prompt_in_all() -> None:
    """As in a table, where a row without the column has an empty cell."""
    dataset = InstructDataset(field_instruction="q", field_output="a", field_system="s", system_prompt="P")
    text = InstructText(dataset, frozenset({"q", "a", "s"}))
    assert [text.prompt(row) for row in ({"q": "Q", "s": "S"}, {"q": "Q"})] == ["SQ", "Q"]


@each(
    ("form", "filled"),
    [
        ("{instruction} {input}", "I C"),
        ("{{{instruction}}}", "{I}"),
        ("{instruction} {", "I {"),
        ("} {input}", "} C"),
        ('{"q": {instruction}}', '{"q": I}'),
        ("{other} {input}", "{other} C"),
        ("{} {input}", "{} C"),
        ("{instruction.__class__}{input}", "{instruction.__class__}C"),
        ("{instruction:>99999999999}{input}", "{instruction:>99999999999}C"),
        ("{instruction!r}{input}", "{instruction!r}C"),
        ("{instruction[0]}", "{instruction[0]}"),
        ("", ""),
    ],
)
def test_formats_are_filled_as_python_does_and_stray_braces_survive(form: str, filled: str) -> None:
    assert fill_format(form, {"instruction": "I", "input": "C"}) == filled


def test_a_value_that_looks_like_a_name_is_not_filled_again() -> None:
    assert fill_format("{instruction} {input} {", {"instruction": "{input}", "input": "{instruction}"}) == (
        "{input} {instruction} {"
    )


@given(st.text(max_size=40), st.text(max_size=10))
def test_any_format_can_be_filled(form: str, value: str) -> None:
    filled = fill_format(form, {"instruction": value, "input": "C"})
    if "{instruction}" in form and "{{" not in form and "}}" not in form:
        assert value in filled


def test_a_row_without_an_answer_has_nothing_to_learn_not_even_an_end() -> None:
    row = encoded(PLAIN, {"q": "Q", "c": "", "a": None})
    assert count_learned(row.labels) == 0
    assert END not in row.ids


def test_an_answer_that_ends_with_the_end_token_gets_no_second_one() -> None:
    assert list(encoded(PLAIN, {"q": "Q", "a": "yes<end>"}).ids).count(END) == 1


def test_pieces_are_cut_at_the_limit_each_and_a_full_answer_has_no_room_for_an_end() -> None:
    row = encoded(PLAIN, {"q": "a b c d e", "a": "1 2 3 4 5"}, limit=4)
    assert len(row.ids) == 8
    assert count_learned(row.labels) == 4
    assert END not in row.ids


def test_without_an_output_column_everything_is_learned_in_pieces() -> None:
    dataset = InstructDataset(field_instruction="t")
    row = encoded(dataset, {"t": "1 2 3 4 5 6 7"}, limit=3)
    cut = list(split_completion(row, 3))
    assert [len(piece.ids) for piece in cut] == [3, 3, 2]
    assert [list(piece.labels) for piece in cut] == [list(piece.ids) for piece in cut]
    assert cut[-1].ids[-1] == END


def test_a_last_piece_of_one_token_is_left_out_because_nothing_predicts_it() -> None:
    """Its loss is 0 / 0, and one of those made the whole held-out score a NaN."""
    row = encoded(InstructDataset(field_instruction="t"), {"t": "1 2 3 4 5 6"}, limit=3)
    assert [len(piece.ids) for piece in split_completion(row, 3)] == [3, 3]


@given(
    st.lists(
        st.dictionaries(st.sampled_from("qcas"), st.none() | st.text(max_size=30) | st.integers()),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 12),
)
def test_whatever_rows_hold_each_becomes_a_row_of_tokens(rows: list[dict[str, Any]], limit: int) -> None:
    try:
        encoded_rows = list(instruct_rows(PLAIN, rows, WordTokenizer(adds_begin=True), limit))
    except BadData:
        return
    assert len(encoded_rows) == len(rows)
    for row in encoded_rows:
        assert len(row.ids) == len(row.labels) <= 2 * limit
        assert all(label in (IGNORED, one) for one, label in zip(row.ids, row.labels, strict=True))
