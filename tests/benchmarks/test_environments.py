import pytest

from benchmarks.environments import run, wilson
from benchmarks.environments_tiny import report_of


@pytest.mark.parametrize(
    ("won", "games", "low", "high"), [(5, 10, 0.237, 0.763), (0, 20, 0.0, 0.161), (150, 200, 0.686, 0.805)]
)
def test_the_interval_of_a_share_is_wilsons(won: float, games: int, low: float, high: float) -> None:
    assert wilson(won, games) == pytest.approx((low, high), abs=5e-4)


def test_an_unknown_game_is_named() -> None:
    with pytest.raises(SystemExit, match="no game is called chess; there are gin_rummy, "):
        run(True, ("chess",))


def test_a_little_model_that_forfeits_or_loses_is_pointed_out() -> None:
    def case(score: float, forfeits: int) -> dict[str, object]:
        match = {"opponent": "random", "games": 200, "score": score, "forfeits": {"no_call": forfeits}}
        said = {"game": "leduc_poker", "params": 500_000, "exit": 0, "steps": 258, "cpu": 600.0}
        return {**said, "against": [match]}

    assert report_of([case(0.75, 2)]).notes == []
    low, many = report_of([case(0.5, 50)]).notes
    assert "50% against random" in low
    assert "25% forfeited" in many
    [row] = report_of([case(0.75, 2)]).rows
    assert row[3:] == ("258", "10.0 min", "random", "75% of 200", "69% to 80%", "2")
