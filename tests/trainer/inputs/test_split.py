"""Held-out rows: no near-duplicate of a training row, and of all lengths and difficulties."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.inputs.split import Split, hold_out
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
