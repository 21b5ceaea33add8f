"""Held-out rows: no near-duplicate of a training row, and of all lengths and difficulties."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.inputs.split import Split, fingerprint, hold_out, near_duplicates
from trainer.inputs.tokens import IGNORED


def rows(count: int, seed: int = 0) -> list[list[int]]:
    """Short easy rows and long difficult ones, mixed."""
    chance = random.Random(seed)
    easy = [[chance.randrange(5) for _ in range(chance.randint(3, 9))] for _ in range(count // 2)]
    hard = [[chance.randrange(5000) for _ in range(chance.randint(9, 99))] for _ in range(count - len(easy))]
    return chance.sample(easy + hard, count)


def split(answers: list[list[int]], count: int, seed: int = 1) -> Split:
    return hold_out(range(len(answers)), answers, count, seed)


def test_as_many_rows_as_wanted_are_held_out_and_the_rest_is_trained_on() -> None:
    parts = split(rows(500), 40)
    assert len(parts.held) == 40
    assert sorted(parts.train + parts.held) == list(range(500))


def test_the_same_seed_holds_out_the_same_rows() -> None:
    data = rows(300)
    assert split(data, 20) == split(data, 20)
    assert split(data, 20).held != split(data, 20, seed=2).held


def test_a_cluster_is_trained_on_or_held_out_as_a_whole_and_no_row_is_lost() -> None:
    clusters = [place - place % 3 if place < 150 else place for place in range(300)]
    parts = hold_out(clusters, rows(300), 60, 1)
    held = {clusters[place] for place in parts.held}
    assert not held & {clusters[place] for place in parts.train}
    assert len(parts.held) == 60
    assert len(parts.train) == 240
    assert 10 <= sum(place < 150 for place in parts.held) <= 50, "as many of the clusters as there are"


def test_rows_of_large_clusters_go_both_ways_so_that_all_clusters_are_held_out() -> None:
    """A template, or countless copies: validators' test rows are such as well."""
    for size in (40, 1000):
        clusters = [place - place % size for place in range(1000)]
        parts = hold_out(clusters, rows(1000), 100, 1)
        assert (len(parts.held), len(parts.train)) == (100, 900)
        assert len({clusters[place] for place in parts.held}) >= min(1000 // size, 15)


def test_the_held_out_rows_have_the_datas_mix() -> None:
    """Random splits differ much more in what their rows are like."""
    data = rows(2000)
    lengths = np.array([len(row) for row in data])
    largest = np.array([max(row) for row in data])
    chance = np.random.default_rng(0)
    parts = [np.array(split(data, 100, seed).held) for seed in range(20)]
    mixed = [chance.permutation(2000)[:100] for _ in range(20)]
    for numbers in (lengths, largest > 5):
        ours, randoms = (np.std([numbers[part].mean() for part in some]) for some in (parts, mixed))
        assert ours < 0.5 * randoms


def test_labels_that_are_ignored_do_not_count() -> None:
    data = rows(400)
    answers = [[IGNORED] * (place % 7) + row for place, row in enumerate(data)]
    assert split(answers, 30) == split(data, 30)


def test_most_rows_are_trained_on_however_many_are_wanted() -> None:
    assert len(split(rows(50), 1000).held) == 10
    for count in range(5):
        assert split(rows(count), 3) == Split(list(range(count)), [])


@given(st.lists(st.integers(0, 20), max_size=60), st.integers(0, 20))
def test_every_row_is_in_exactly_one_part(clusters: list[int], count: int) -> None:
    first = [clusters.index(cluster) for cluster in clusters]
    parts = hold_out(first, [[cluster] * cluster for cluster in clusters], count, 0)
    assert sorted([*parts.train, *parts.held]) == list(range(len(clusters)))
    assert len(parts.held) <= count


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
    monkeypatch.setattr("trainer.inputs.split._CHUNK", 37)
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
