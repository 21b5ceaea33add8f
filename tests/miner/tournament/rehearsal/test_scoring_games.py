"""What the model that trained on an environment task is asked to play in its image, and what it earned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miner.tournament.rehearsal.scoring import CannotScore, FolderScore, ImageScorer, score_games
from miner.tournament.rules import TASKS
from tests.miner.tournament.rehearsal.test_scoring import CLIENT, Image


def match(game: str, against: str, score: float | None, **forfeits: int) -> dict[str, Any]:
    return {
        "game": game, "names": ["ours", against], "score": score,
        "wins": 9, "draws": 1, "losses": 10, "forfeits": [forfeits, {}],
    }  # fmt: skip


def shells(**rewards: float | None) -> list[dict[str, Any]]:
    """None: it played nothing."""
    questions = ("How many?", "How large?")
    return [
        {
            "name": name, "reward": reward, "submitted": 1, "ended": "all tasks played",
            "tasks": [{"question": one, "reward": reward} for one in questions if reward is not None],
        }
        for name, reward in rewards.items()
    ]  # fmt: skip


def scored(
    tmp_path: Path, against: Path | None = None, names: tuple[str, ...] = ("othello", "intercode")
) -> FolderScore | None:
    task = replace(TASKS["environment"], dataset={"environment_names": list(names)})
    scorer = ImageScorer(CLIENT, "image", task, tmp_path / "scratch", Path("/r"), against)
    return score_games(scorer, base=Path("/b"))


def test_ours_plays_the_base_and_the_champion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = {
        "matches": [match("othello", "base", 0.9, no_call=2), match("othello", "against", 0.4)],
        "shell_tasks": shells(ours=0.5, base=0.3, against=0.8),
    }
    image = Image(monkeypatch, lambda folder: json.dumps(report))
    found = scored(tmp_path, against=Path("/champion"))
    assert found is not None
    assert (found.ours, found.base, found.beats_base) == (pytest.approx(0.7), pytest.approx(0.2), True)
    assert (found.against, found.wins) == (pytest.approx(0.7), False)
    assert image.seen == {Path("/b"): "/base", Path("/r"): "/ours", Path("/champion"): "/against"}
    command = image.commands[0]
    assert "trainer.environments.play /ours --json --base /base" in command
    assert "--against /base --against /against --game othello --game intercode" in command
    assert "othello against base: 9 won, 1 drawn, 10 lost; forfeited 2 no_call" in found.summary()
    assert "intercode, ours: reward 0.50, 1 of 2 tasks submitted" in found.summary()


@pytest.mark.parametrize(
    ("othello", "clobber", "shell", "wins"),
    [
        # A clear loss of one counts no more than a narrow win of another.
        (0.1, 0.6, 0.52, True),
        (0.4, 0.4, 0.9, False),
        # Shell tasks have to be at least as good, and have to be played.
        (0.9, 0.9, 0.4, False),
        (0.9, 0.9, None, None),
    ],
)
def test_environments_are_won_one_by_one(
    othello: float,
    clobber: float,
    shell: float | None,
    wins: bool | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    matches = [match("othello", "against", othello), match("clobber", "against", clobber)]
    matches.append(match("othello", "base", 0.5))
    report = {"matches": matches, "shell_tasks": shells(ours=shell, base=0.5, against=0.5)}
    Image(monkeypatch, lambda folder: json.dumps(report))
    found = scored(tmp_path, against=Path("/champion"), names=("othello", "clobber", "intercode"))
    assert found is not None
    assert found.wins is wins
    assert f"intercode, ours: reward {'none' if shell is None else f'{shell:.2f}'}" in found.summary()


def test_shell_tasks_are_compared_where_both_played_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours, base = shells(ours=0.6, base=0.5)
    ours["tasks"].append({"question": "One more?", "reward": 0.0})
    Image(monkeypatch, lambda folder: json.dumps({"matches": [], "shell_tasks": [ours, base]}))
    found = scored(tmp_path, names=("intercode",))
    assert found is not None
    assert (found.ours, found.base) == (pytest.approx(0.6), pytest.approx(0.5))


def test_what_ended_a_score_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = {"matches": [match("othello", "base", None)], "failure": "CUDA out of memory"}
    Image(monkeypatch, lambda folder: json.dumps(report), code=1)
    with pytest.raises(CannotScore, match="CUDA out of memory"):
        scored(tmp_path)


def test_a_part_of_a_score_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = {"matches": [match("othello", "base", 0.9)], "failure": "no shell here"}
    Image(monkeypatch, lambda folder: json.dumps(report), code=1)
    found = scored(tmp_path)
    assert found is not None
    assert "not everything was played: no shell here" in found.summary()


def test_what_is_not_played_here_has_no_score(tmp_path: Path) -> None:
    assert scored(tmp_path, names=("swe_infinite", "chess")) is None


def test_a_match_without_a_game_is_no_score(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Image(monkeypatch, lambda folder: json.dumps({"matches": [match("othello", "base", None)]}))
    with pytest.raises(CannotScore, match="no game or shell task"):
        scored(tmp_path)
