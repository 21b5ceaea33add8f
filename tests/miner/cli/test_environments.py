"""`god-miner environments play` starts the matches in the training environment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from miner.__main__ import app

pytestmark = pytest.mark.process


#: A python that answers what it is asked about itself, and else writes down how it was called.
FAKE = """#!/bin/sh
if [ "$1" = -c ]; then exec {python} "$@"; fi
for one in "$@"; do echo "$one"; done > {folder}/asked
exit 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "python"
    path.write_text(FAKE.format(python=sys.executable, folder=tmp_path))
    path.chmod(0o755)
    monkeypatch.setenv("TRAINER_PYTHON", str(path))
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def asked(folder: Path, *arguments: str) -> list[str]:
    done = CliRunner().invoke(app, ["environments", "play", *arguments])
    assert done.exit_code == 3, done.output
    return (folder / "asked").read_text().splitlines()


def test_what_is_asked_for_is_passed_on_with_the_programs_exit_code(folder: Path) -> None:
    options = ["--game", "othello", "--game", "clobber", "--against", "mcts:50", "--against", "expert"]
    options += ["--games", "40", "--output", "kept", "--json", "--parser", "llama3"]
    words = asked(folder, "http://127.0.0.1:30000/v1#tuned", *options)
    assert words[:3] == ["-m", "trainer.environments.play", "http://127.0.0.1:30000/v1#tuned"]
    text = " ".join(words)
    assert "--game othello --game clobber --against mcts:50 --against expert --games 40" in text
    assert f"--seconds 900.0 --seed 42 --turn-seconds 30.0 --parser llama3 --output {folder}/kept" in text
    assert words[-1] == "--json"


def test_transcripts_are_kept_with_the_daemons_data(folder: Path) -> None:
    words = asked(folder, "random")
    kept = Path(words[words.index("--output") + 1])
    assert kept.parent == folder / "data" / "environments"
