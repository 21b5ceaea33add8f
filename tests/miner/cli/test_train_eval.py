"""`god-miner eval` starts the scores in the training environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from miner.__main__ import app

pytestmark = pytest.mark.process


#: Answers what it is asked about itself like a python, and tells instead of scoring.
FAKE = """#!/bin/sh
if [ "$1" = -c ]; then exec {python} "$@"; fi
{{ for word in "$@"; do echo "$word"; done; env; }} > {seen}
exit 3
"""
MODELS = """
import json, sys
from pathlib import Path
from tests.trainer import tiny
folder = Path(sys.argv[1])
tiny.save(folder / "base"); tiny.save(folder / "other", seed=8)
(folder / "rows.json").write_text(json.dumps(tiny.chat_rows(8)))
"""
ROOT = Path(__file__).parents[3]


def files(folder: Path) -> list[str]:
    task = {
        "dataset_type": {
            "chat_column": "conversations",
            "chat_user_reference": "human",
            "chat_assistant_reference": "gpt",
        },
        "data": "rows.json",
    }
    (folder / "task.json").write_text(json.dumps(task))
    for name in ("base", "other"):
        (folder / name).mkdir(exist_ok=True)
    return ["eval", "--task", str(folder / "task.json"), "--base", str(folder / "base")]


def test_the_training_environment_is_started_with_what_was_asked_and_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, seen = tmp_path / "python", tmp_path / "seen"
    fake.write_text(FAKE.format(python=sys.executable, seen=seen))
    fake.chmod(0o755)
    monkeypatch.setenv("TRAINER_PYTHON", str(fake))
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.chdir(tmp_path)
    asked = [*files(tmp_path), "--model", str(tmp_path / "other"), "--rows", "5", "--json"]
    assert CliRunner().invoke(app, asked).exit_code == 3, "the scores' own exit code is ours"
    reported = seen.read_text()
    assert reported.startswith(
        f"-m\ntrainer.scoring.eval\n--task\n{tmp_path}/task.json\n--base\n{tmp_path}/base\n"
    )
    assert f"--model\n{tmp_path}/other\n--rows\n5\n--json\n" in reported
    assert "PYTHONPATH=" in reported
    assert "TQDM_DISABLE=1\n" in reported
    assert "hf_secret" not in reported


def test_a_folder_that_is_not_there_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, [*files(tmp_path), "--model", str(tmp_path / "none")])
    assert ended.exit_code == 2


def test_models_are_scored_in_the_real_training_environment(tmp_path: Path, training_python: str) -> None:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [training_python, "-c", MODELS, tmp_path], env=environment, check=True, capture_output=True
    )
    arguments = [*files(tmp_path), "--model", str(tmp_path / "other"), "--json"]
    settings = {"TRAINER_PYTHON": training_python, "DATA_DIR": str(tmp_path / "data")}
    ended = subprocess.run(
        [sys.executable, "-m", "miner", *arguments],
        env={**environment, **settings, "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert (report["rows"], [one["name"] for one in report["models"]]) == (8, ["base", "other"])
    assert report["models"][1]["over_base"]["rows"] == 8
