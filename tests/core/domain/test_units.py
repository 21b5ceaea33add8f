from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from core.domain.units import (
    Bytes,
    parse_bytes,
    parse_params,
    parse_seconds,
    show_bytes,
    show_params,
    show_seconds,
)
from tests.doubles.each import each


@each(
    ("words", "count"),
    [("75GB", 75_000_000_000), ("75GiB", 75 * 2**30), ("512 MiB", 512 * 2**20), ("0.5kB", 500), ("7b", 7)],
)
def test_sizes_are_decimal_unless_they_say_otherwise(words: str, count: int) -> None:
    assert parse_bytes(words) == count


@each(("words", "seconds"), [("90m", 5400), ("1.5h", 5400), ("1h30m", 5400), ("20s", 20), ("1d 2h", 93_600)])
def test_durations_may_have_several_parts(words: str, seconds: float) -> None:
    assert parse_seconds(words) == seconds


@pytest.mark.parametrize(("words", "count"), [("13B", 13 * 10**9), ("350M", 350 * 10**6), ("0B", 0)])
def test_parameter_counts_have_a_letter(words: str, count: int) -> None:
    assert parse_params(words) == count


@each("value", [75, 75.0, "75", "GB", "75 75GB", "75GBx", True, None, [], "-5GB", "1h30m"])
def test_a_size_without_a_clear_unit_is_rejected_with_an_example(value: object) -> None:
    with pytest.raises(ValueError, match="75GB"):
        parse_bytes(value)


def test_an_unknown_unit_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'XB'.*kb, mb, gb"):
        parse_bytes("75XB")


def test_numbers_beyond_exact_integers_are_rejected() -> None:
    with pytest.raises(ValueError, match="beyond"):
        parse_bytes("99999999999TB")


@given(st.one_of(st.text(), st.integers(), st.floats(), st.none(), st.lists(st.integers())))
def test_any_value_is_a_number_or_a_value_error(value: object) -> None:
    for parse in (parse_bytes, parse_seconds, parse_params):
        try:
            assert parse(value) >= 0
        except ValueError:
            continue


def test_a_field_of_bytes_takes_text_only() -> None:
    adapter = TypeAdapter(Bytes)
    assert adapter.validate_python("75GB") == 75 * 10**9
    with pytest.raises(ValidationError):
        adapter.validate_python(75)
    assert adapter.json_schema()["examples"] == ["75GB"]


def test_numbers_are_shown_with_their_units() -> None:
    assert show_bytes(61_234_000_000) == "61.2 GB"
    assert show_bytes(5_000_000) == "5.0 MB"
    assert show_seconds(59) == "59 s"
    assert show_seconds(125) == "2 min 05 s"
    assert show_seconds(-5400) == "-1 h 30 min"
    assert [show_params(count) for count in (8_030_261_248, 135e6, 0)] == ["8.03B", "135M", "0"]
