"""Task files for `god-miner eval`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.errors import ConfigError
from core.eval_task import EvalTask
from core.evaluation import Era
from core.tasks import TaskType

CHAT = {"chat_template": "chatml", "chat_column": "conversations"}


def written(folder: Path, content: object) -> Path:
    file = folder / "task.json"
    file.write_text(json.dumps(content))
    return file


def test_the_data_are_looked_for_beside_the_file(tmp_path: Path) -> None:
    found = EvalTask.read(written(tmp_path, {"dataset_type": CHAT, "data": "sub/rows.json"}))
    assert found.data == str(tmp_path / "sub/rows.json")
    assert (found.task_type, found.era, found.kl_coefficient) == (TaskType.CHAT, Era.OFFERS, None)


def test_a_tournaments_evaluation_is_asked_for_by_its_year(tmp_path: Path) -> None:
    found = EvalTask.read(
        written(tmp_path, {"dataset_type": CHAT, "data": "/d", "era": "2026", "kl_coefficient": 0.5})
    )
    assert (found.era, found.kl_coefficient) == (Era.TOURNAMENTS, 0.5)


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ({"dataset_type": CHAT}, "data"),
        ({"data": "x"}, "dataset_type"),
        ({"dataset_type": CHAT, "data": ""}, "data"),
        ({"dataset_type": CHAT, "data": "x", "era": "1999"}, "era"),
        ({"dataset_type": CHAT, "data": "x", "typo": 1}, "typo"),
        ({"dataset_type": CHAT, "data": "x", "kl_coefficient": -1}, "kl_coefficient"),
        ([], "object"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, content: object, where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        EvalTask.read(written(tmp_path, content))


def test_a_file_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        EvalTask.read(tmp_path / "none.json")
