from __future__ import annotations

import pytest

pyspiel = pytest.importorskip("pyspiel")
np = pytest.importorskip("numpy")
pytest.importorskip("numba")

from tests.trainer.environments.games.playing import after, at_random, score  # noqa: E402
from trainer.environments.games import liars_dice as liars  # noqa: E402

ITERATIONS = 12


def _bid(quantity: int, face: int) -> int:
    return (quantity - 1) * liars.FACES + face - 1


def _dealt(one: str, other: str, *bids: int) -> pyspiel.State:
    return after("liars_dice", [int(die) - 1 for die in one + other] + list(bids))


@pytest.mark.parametrize(
    ("one", "other", "bid", "holds"),
    [
        ("12345", "12345", _bid(2, 3), True),
        ("12345", "12345", _bid(3, 3), False),
        ("12366", "12345", _bid(4, 3), True),
        ("12366", "12345", _bid(3, 6), False),
    ],
)
def test_a_bid_holds_as_the_engine_counts(one: str, other: str, bid: int, holds: bool) -> None:
    state = _dealt(one, other, bid, liars.LIAR)
    assert state.returns()[0] == (1.0 if holds else -1.0)
    hands = [liars.HANDS.index(tuple(int(die) for die in hand)) for hand in (one, other)]
    assert bool(liars.HOLDS[bid, hands[0], hands[1]]) is holds


def test_the_situation_is_what_the_prompt_shows() -> None:
    state = _dealt("31524", "66666", _bid(1, 3), _bid(2, 4), _bid(3, 1))
    assert liars.situation(state) == (1, _bid(3, 1) + 1, liars.HANDS.index((6, 6, 6, 6, 6)))


def test_chances_are_those_of_five_dice() -> None:
    assert len(liars.HANDS) == 252
    assert liars.CHANCES.sum() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("one", "other", "bids", "calls"),
    [
        ("11345", "12345", (_bid(7, 2),), True),
        ("12345", "22266", (_bid(3, 2),), False),
        ("66666", "11345", (_bid(2, 3), _bid(6, 1)), False),
    ],
)
def test_it_doubts_what_is_unlikely(one: str, other: str, bids: tuple[int, ...], calls: bool) -> None:
    player = liars.LiarsDicePlayer(ITERATIONS)
    assert (player.choose(_dealt(one, other, *bids)) == liars.LIAR) is calls


def test_labels_are_among_the_likeliest_actions() -> None:
    strategy = liars.solve(2)
    assert strategy[0].sum(axis=-1) == pytest.approx(1.0, abs=1e-4)
    chosen = liars.labels(strategy)
    likely = np.take_along_axis(strategy, chosen[..., None], axis=-1)[..., 0]
    reached = strategy.max(axis=-1) > 0
    assert (likely >= liars.NEARLY * strategy.max(axis=-1) - 1e-6)[reached].all()


def test_a_note_tells_both_bids() -> None:
    player = liars.LiarsDicePlayer(ITERATIONS)
    state = _dealt("12345", "22266", _bid(1, 2))
    bid = player.choose(state)
    text = f"{bid // 6 + 1}-{bid % 6 + 1}"
    assert player.note(state) == f"Opponent bid 1-2. I bid {text}."


def test_it_wins_against_random_moves() -> None:
    assert score("liars_dice", liars.LiarsDicePlayer(ITERATIONS).choose, at_random(1), 50) >= 0.8
