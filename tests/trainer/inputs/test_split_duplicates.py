"""Clusters of near-duplicate rows."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.inputs import split
from trainer.inputs.split import fingerprint, near_duplicates


def sequences(count: int, seed: int = 0, length: int = 120) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(5000) for _ in range(length)] for _ in range(count)]


def changed(row: list[int], tokens: int, chance: random.Random) -> list[int]:
    row = list(row)
    for _ in range(tokens):
        row[chance.randrange(len(row))] = chance.randrange(5000)
    return row


def clusters(rows: list[list[int]]) -> list[int]:
    return near_duplicates(rows, [hash(tuple(row)) for row in rows])


def test_rows_with_a_few_words_changed_are_one_cluster_and_others_are_not() -> None:
    rows, chance = sequences(2000), random.Random(3)
    doubles = [changed(row, 6, chance) for row in rows[:100]] + [changed(row, 6, chance) for row in rows[:50]]
    found = clusters(rows + doubles)
    assert found == [*range(2000), *range(100), *range(50)]


def test_a_row_with_half_of_its_words_changed_is_another() -> None:
    rows, chance = sequences(200), random.Random(3)
    found = clusters(rows + [changed(row, 60, chance) for row in rows[:50]])
    assert found == list(range(250))


def test_rows_that_differ_in_case_and_punctuation_only_are_the_same() -> None:
    assert fingerprint(["Is it so?", "YES"]) == fingerprint(["is it  so", "yes!"])
    assert fingerprint(["is it so"]) != fingerprint(["is it not so"])
    rows = sequences(100)
    prints = [place // 2 for place in range(100)]  # every row has one twin in words, none in tokens
    assert near_duplicates(rows, prints) == [place - place % 2 for place in range(100)]


def test_a_template_that_all_rows_share_does_not_make_them_doubles() -> None:
    head = list(range(1000, 1200))
    rows = [head + row for row in sequences(300, length=40)]
    assert clusters(rows) == list(range(300))


def test_a_short_row_within_a_long_one_is_no_double() -> None:
    rows = sequences(100)
    assert clusters([*rows, *(row[:40] for row in rows)]) == list(range(200))


def test_where_the_run_stands_does_not_matter() -> None:
    rows = sequences(50)
    assert clusters(rows + [[9, 9, *row, 7] for row in rows]) == [*range(50), *range(50)]


def test_rows_read_in_parts_give_the_same_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, chance = sequences(300), random.Random(3)
    rows += [changed(row, 6, chance) for row in rows[:100]]
    whole = clusters(rows)
    monkeypatch.setattr(split, "_CHUNK", 37)
    assert clusters(rows) == whole


@given(st.lists(st.lists(st.integers(0, 40), max_size=12), max_size=60))
def test_every_cluster_is_named_by_its_first_row(rows: list[list[int]]) -> None:
    found = clusters(rows)
    assert all(found[first] == first <= place for place, first in enumerate(found))
    assert all(found[place] == found[rows.index(row)] for place, row in enumerate(rows)), "copies"


def test_rows_that_share_many_a_common_run_are_no_doubles() -> None:
    chance = np.random.default_rng(0)
    rows = [np.minimum(chance.pareto(1.1, 60) * 3, 30_000).astype(int).tolist() for _ in range(3000)]
    assert clusters(rows) == list(range(3000))
