import pytest

from benchmarks.environments import run, wilson


@pytest.mark.parametrize(
    ("won", "games", "low", "high"),
    [(5, 10, 0.237, 0.763), (0, 20, 0.0, 0.161), (150, 200, 0.686, 0.805)],
)
def test_the_interval_of_a_share_is_wilsons(won: float, games: int, low: float, high: float) -> None:
    assert wilson(won, games) == pytest.approx((low, high), abs=5e-4)


def test_an_unknown_game_is_named() -> None:
    with pytest.raises(SystemExit, match="no game is called chess; there are gin_rummy, "):
        run(True, ("chess",))
