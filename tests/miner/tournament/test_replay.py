"""Replays of picture tasks that are over, on saved files."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from core.domain.errors import ConfigError
from core.runs.picture_run import AdapterScore, PictureScores
from miner.__main__ import app
from miner.tournament.public_api import TournamentTaskResult, task_result
from miner.tournament.replay import CannotReplay, replay

PICTURES = tuple(f"{number:02}.png" for number in range(21))
HIDDEN = ("03.png", "11.png", "17.png")
HOTKEYS = ("5AliceAlice", "5BobBobBobB", "5CarolCarol")


def losses(seed: int, level: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    draw = random.Random(seed)
    rows = tuple(tuple(level * draw.uniform(0.5, 1.5) for _ in PICTURES) for _ in range(2))
    return rows[0], rows[1]


def on_hidden(rows: tuple[tuple[float, ...], tuple[float, ...]]) -> float:
    at = [PICTURES.index(name) for name in HIDDEN]
    return sum(rows[0][one] + rows[1][one] for one in at) / 2 / len(at)


def adapter(path: str, seed: int, level: float) -> AdapterScore:
    text, no_text = losses(seed, level)
    return AdapterScore(path=path, score=0.5, text_losses=text, no_text_losses=no_text)


def task(noise: float = 1e-5) -> TournamentTaskResult:
    """Alice is best, Carol third; their machine computes a little differently."""
    levels = zip(HOTKEYS, (0.30, 0.32, 0.34), strict=True)
    rows = [
        {"hotkey": hotkey, "rank": seed + 1, "test_loss": on_hidden(losses(seed, level)) * (1 + noise)}
        for seed, (hotkey, level) in enumerate(levels)
    ]
    return task_result({"task_type": "ImageTask", "model_type": "krea2", "hotkey_details": rows}, "t")


def scores(*, entries: int = 2) -> PictureScores:
    levels = (0.30, 0.32, 0.34)
    known = [adapter(f"/loras/{HOTKEYS[at][:8]}/last.safetensors", at, levels[at]) for at in range(entries)]
    return PictureScores(pictures=PICTURES, adapters=(*known, adapter("/ours.safetensors", 9, 0.31)))


def test_the_hidden_pictures_are_those_over_which_the_published_losses_are_means() -> None:
    found = replay(task(), scores())
    assert (found.hidden.names, found.hidden.found) == (HIDDEN, True)
    assert found.ours == pytest.approx(on_hidden(losses(9, 0.31)))
    better = sum((entry.loss or 0) < found.ours for entry in found.ranked)
    assert (found.place, len(found.ranked)) == (better + 1, 3)


def test_losses_of_another_measure_fit_no_set_clearly() -> None:
    assert not replay(task(noise=0.05), scores()).hidden.found


def test_what_says_nothing_of_the_task_is_refused() -> None:
    with pytest.raises(CannotReplay, match="no entry of the task"):
        replay(task(), scores(entries=0))
    with pytest.raises(CannotReplay, match="no adapter has no losses"):
        replay(task(), PictureScores(pictures=PICTURES))
    with pytest.raises(CannotReplay, match="name no picture"):
        replay(task(), PictureScores())


def test_losses_that_distinguish_no_pictures_fit_no_set_clearly() -> None:
    same = (0.3,) * len(PICTURES)
    rows = [AdapterScore(path=path, score=0.3, text_losses=same, no_text_losses=same) for path in "ab"]
    known = rows[0].model_copy(update={"path": HOTKEYS[0]})
    entry = [{"hotkey": HOTKEYS[0], "test_loss": 0.3}]
    found = replay(
        task_result({"hotkey_details": entry}, "t"),
        PictureScores(pictures=PICTURES, adapters=(known, rows[1])),
    )
    assert not found.hidden.found


@pytest.mark.parametrize(
    "entry",
    [{"hotkey": HOTKEYS[0], "test_loss": 0}, {"hotkey": "o", "test_loss": 0.3}],
    ids=["a loss of nothing", "a name that is in every path"],
)
def test_an_entry_that_cannot_be_true_is_not_compared(entry: dict[str, object]) -> None:
    with pytest.raises(CannotReplay, match="no entry of the task"):
        replay(task_result({"hotkey_details": [entry]}, "t"), scores())


def test_scores_of_some_pictures_are_refused() -> None:
    good = scores()
    short = good.adapters[0].model_copy(update={"no_text_losses": (0.3,)})
    with pytest.raises(CannotReplay, match="has 1 losses of 21 pictures"):
        replay(task(), good.model_copy(update={"adapters": (short, *good.adapters[1:])}))


def test_the_command_reads_saved_files(tmp_path: Path) -> None:
    result = task()
    rows = [{"hotkey": one.hotkey, "rank": one.rank, "test_loss": one.loss} for one in result.entries]
    (tmp_path / "task.json").write_text(json.dumps({"task_type": "ImageTask", "hotkey_details": rows}))
    (tmp_path / "scores.json").write_text(scores().model_dump_json())
    asked = ["tournament", "replay", str(tmp_path / "task.json"), "--scores", str(tmp_path / "scores.json")]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert "03.png, 11.png, 17.png" in done.output
    found = json.loads(CliRunner().invoke(app, [*asked, "--json"]).output)
    assert (found["place"], found["found"]) == (replay(result, scores()).place, True)


@pytest.mark.parametrize("text", ["{", "[]", '{"adapters": 3}'])
def test_a_file_that_holds_no_scores_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "task.json").write_text("{}")
    (tmp_path / "scores.json").write_text(text)
    asked = ["tournament", "replay", str(tmp_path / "task.json"), "--scores", str(tmp_path / "scores.json")]
    error = CliRunner().invoke(app, asked).exception
    assert isinstance(error, ConfigError)
    assert "scores.json" in str(error)
