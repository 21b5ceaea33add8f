"""`god-miner tournament odds`."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from core.domain.errors import ConfigError
from miner.__main__ import app
from tests.miner.tournament.odds.test_history import tournament

pytestmark = pytest.mark.process

runner = CliRunner()
ODDS = """\
image tournament by the rules of DATE: 3,000 brackets in SECONDS s
history: 3 tournaments, 2 new champions, 9 entries, 14 of 18 boss tasks won; our
assumptions weigh as much as 4 tournaments

P(win a task)   krea2 67%, qwen-image 33%, z-image 90%, ideogram4 80%, all
                others 50%
others          9 enter; the best of them wins 53% of the boss's tasks; two
                tasks rank them alike by 0.70
we reach        knockout 73.5%, boss 41.2%
P(win)          15.6%; second 25.6%, third 32.3%

cost            1.40 TAO: fee 0.40, GPUs 1.00 TAO (100 h at 2 USD)
a win           4,631 alpha (9.26 TAO) a week for 2.3 weeks on average: the
                champion falls with 43% in each, and 26 are counted at most; the
                kind has 29% of the emission
expected        +2.76 TAO; 5% -1.40, median -0.82, 95% +26.38; 41% not to lose
                money
breaks even at  P(win) 2.9%, at as many second and third places

if …                                            P(win)   expected
  each of our chances is 10% lower                7.3%    +0.91 TAO
  each of our chances is 10% higher              33.3%    +6.38 TAO
  our tasks go together, by 0.3                  30.3%    +5.57 TAO
  challengers win 68% of the boss's tasks        10.7%    +1.45 TAO
  twice as many enter                             9.7%    +1.21 TAO
  champions fall twice as often                  15.6%    +1.07 TAO

Enter? Yes: on average it brings 2.76 TAO.
"""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Three tournaments, one of them in an answer that the operator saved himself."""
    for day, won in ((2, 6), (9, 3), (16, 5)):
        one = tournament(day, won=won, new=won >= 5, losses=[range(9), [1, 0, 2, 3, 4, 5, 6, 8, 7]])
        folder = tmp_path / "field" / one.tournament_id
        folder.mkdir(parents=True)
        if day < 16:
            (folder / "tournament.json").write_text(json.dumps(one.as_answer()))
        else:
            (tmp_path / "field" / "latest.json").write_text(json.dumps({"image": one.as_answer()}))
    return tmp_path / "field"


def test_the_odds_and_what_would_change_them(saved: Path, tmp_path: Path, data_dir: Path) -> None:
    report = tmp_path / "report.json"
    against = [{"task": "krea2", "score": {"wins": True}}, {"task": "qwen-image-2", "score": {"wins": False}}]
    against[0]["deviations"] = ["the data are made up"]
    report.write_text(json.dumps({"tasks": [*against, {"task": "flux", "score": None}]}))
    command = ["tournament", "odds", "image", "--from", str(saved), "--report", str(report)]
    command += ["--p", "z-image=0.9", "--p", "ideogram4=0.8", "--p", "0.5", "--alpha-price", "0.002"]
    command += ["--gpu-hours", "100", "--gpu-price", "2", "--tao-price", "200", "--brackets", "3000"]
    done = runner.invoke(app, command)
    assert done.exit_code == 0, done.output
    shown = re.sub(r"in [\d.]+ s", "in SECONDS s", re.sub(r"\d{4}-\d\d-\d\d", "DATE", done.stdout))
    assert shown == ODDS
    assert done.stderr == "krea2: measured with a tiny model or made-up data, which says little\n"
    found = json.loads(runner.invoke(app, [*command, "--json"]).stdout)
    assert (found["enter"], found["history"]["dethroned"]) == (True, 2)
    assert found["p_win"] == found["placings"]["won"] / 3000
    assert f"{found['worth']['expected']:+.2f} TAO" in shown


def test_without_prices_the_price_that_is_needed_is_named(tmp_path: Path, data_dir: Path) -> None:
    done = runner.invoke(app, ["tournament", "odds", "text", "--p", "0.5", "--brackets", "500"])
    assert "no history: the field is assumed" in done.stdout
    assert "Enter? Yes, if an alpha is worth more than" in done.stdout
    for wrong, said in (
        (["--p", "dop=0.5"], "not a kind of task; known are instruct"),
        (["--p", "1.5"], "between 0 and 1"),
        (["--p", "0.5", "--gpu-hours", "3"], "--gpu-price and --tao-price"),
        (["--p", "instruct=0.5"], "add --p"),
        (["--report", str(_file(tmp_path, '{"tasks": []}'))], "compares with nobody"),
    ):
        refused = runner.invoke(app, ["tournament", "odds", "text", *wrong])
        assert refused.exit_code
        assert said in refused.output + str(refused.exception)


def test_a_backtest_of_what_is_saved(saved: Path, data_dir: Path) -> None:
    command = ["tournament", "odds", "image", "--from", str(saved), "--backtest"]
    shown = runner.invoke(app, command).stdout
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert re.search(r"tourn_90_20261109 .* stayed\n.*tourn_83_20261116 .* new\nBrier score ", shown)
    found = json.loads(runner.invoke(app, [*command, "--json"]).stdout)
    assert len(found["brier"]) == 3
    (saved / "latest.json").write_text("{")
    (saved / "tourn_90_20261109" / "tournament.json").unlink()
    done = runner.invoke(app, command)
    assert done.exit_code == 1
    assert "latest.json cannot be read" in done.stderr
    assert "field pull --past 12" in done.stderr


def _file(folder: Path, text: str) -> Path:
    path = folder / "empty.json"
    path.write_text(text)
    return path


def test_what_cannot_be_read_is_named_and_nobody_waits_for_it(tmp_path: Path, data_dir: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    options = (
        "image",
        "--brackets",
        "100",
        "--p",
        "0.5",
        "--entrants",
        "0",
        "--fee",
        "0",
        "--alpha-price",
        "0",
    )
    run = runner.invoke(app, ["tournament", "odds", *options, "--from", str(tmp_path)])
    assert run.exit_code == 0
    assert run.stderr.count("cannot be read") == 2
    assert "others          nobody else enters\n" in run.stdout
    assert run.stdout.endswith("Enter? No: on average it loses 0.00 TAO.\n")
    report = runner.invoke(app, ["tournament", "odds", "image", "--report", str(tmp_path / "deep.json")])
    assert isinstance(report.exception, ConfigError) or report.exit_code == 78
