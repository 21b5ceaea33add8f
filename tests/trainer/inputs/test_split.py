"""Held-out rows and their doubles."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from trainer.inputs.split import MAX_LEFT_OUT, Split, fingerprint, hold_out, token_runs


def sequences(count: int, seed: int = 0, length: int = 120) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(5000) for _ in range(length)] for _ in range(count)]


def split(rows: list[list[int]], count: int, seed: int = 1) -> Split:
    return hold_out(rows, [hash(tuple(row)) for row in rows], count, seed)


def test_as_many_rows_as_wanted_are_held_out_and_the_rest_is_trained_on() -> None:
    parts = split(sequences(500), 40)
    assert len(parts.held) == 40
    assert sorted(parts.train + parts.held) == list(range(500))
    assert not parts.left_out


def test_the_same_seed_holds_out_the_same_rows() -> None:
    rows = sequences(300)
    assert split(rows, 20) == split(rows, 20)
    assert split(rows, 20).held != split(rows, 20, seed=2).held


def test_a_row_with_a_few_words_changed_is_not_on_both_sides() -> None:
    rows, chance = sequences(200), random.Random(3)
    doubles = [list(row) for row in rows[:100]]
    for row in doubles:
        for _ in range(6):
            row[chance.randrange(len(row))] = chance.randrange(5000)
    parts = split(rows + doubles, 60)
    assert len(parts.held) == 60
    trained = set(parts.train)
    for place in parts.held:
        twin = place + 200 if place < 100 else place - 200 if place >= 200 else None
        assert twin is None or twin not in trained


def test_rows_that_differ_in_case_and_punctuation_only_are_the_same() -> None:
    assert fingerprint(["Is it so?", "YES"]) == fingerprint(["is it  so", "yes!"])
    assert fingerprint(["is it so"]) != fingerprint(["is it not so"])
    rows = sequences(100)
    prints = [place // 2 for place in range(100)]  # every row has one twin in words, none in tokens
    parts = hold_out(rows, prints, 10, 1)
    assert not {prints[place] for place in parts.held} & {prints[place] for place in parts.train}


def test_a_template_that_all_rows_share_does_not_make_them_doubles() -> None:
    head = list(range(1000, 1200))
    rows = [head + row for row in sequences(300, length=40)]
    assert not split(rows, 30).left_out


def test_few_rows_are_left_out_even_where_everything_is_there_twice() -> None:
    rows = sequences(200)
    parts = split(rows + rows, 60)
    assert len(parts.left_out) <= 400 * MAX_LEFT_OUT
    assert parts.held
    places = {place % 200 for place in parts.held}
    assert not places & {place % 200 for place in parts.train}


def test_most_rows_are_trained_on_however_many_are_wanted() -> None:
    assert len(split(sequences(50), 1000).held) == 10
    for count in range(5):
        assert split(sequences(count), 3) == Split(list(range(count)), [], [])


@given(st.lists(st.lists(st.integers(0, 40), max_size=12), max_size=60), st.integers(0, 20))
def test_every_row_is_in_exactly_one_part(rows: list[list[int]], count: int) -> None:
    parts = split(rows, count)
    assert sorted([*parts.train, *parts.held, *parts.left_out]) == list(range(len(rows)))


def test_a_run_is_the_same_wherever_it_stands() -> None:
    row = sequences(1)[0]
    assert token_runs(row) & token_runs([9, 9, *row])
