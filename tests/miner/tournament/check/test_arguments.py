"""The argument lines, parsed by the entry points of a checkout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.domain.wire import TournamentType
from miner.backends.docker.images import source_root
from miner.tournament.check.arguments import check_arguments
from miner.tournament.check.entry import CheckedEntry, FindingState
from tests.miner.tournament.entries import open_small

pytestmark = pytest.mark.process


#: A module in the trainer's place that answers as the real one: `{body}` is what it makes of the arguments.
PARSER = """
import json, os
from types import SimpleNamespace
def text_run(arguments):
    given = dict(zip(arguments[::2], arguments[1::2]))
    run = made(given)
    return SimpleNamespace(model_dump_json=lambda: json.dumps(run))
image_run = text_run
made = lambda given: {body}
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> CheckedEntry:
    """This checkout itself, in place of a clone of it."""
    entry = open_small(tmp_path_factory.mktemp("entry"), {"a": "a"})
    return replace(entry, clone=replace(entry.clone, directory=source_root()))


def small(folder: Path, body: str, **more: Any) -> CheckedEntry:
    files = {
        "trainer/__init__.py": "",
        "trainer/runner/__init__.py": "",
        "trainer/runner/command_line.py": PARSER.replace("{body}", body),
    }
    return open_small(folder, files, kinds=(TournamentType.TEXT,), **more)


def test_our_entry_points_understand_all_kinds(here: CheckedEntry) -> None:
    found = check_arguments(here)
    assert found.state is FindingState.PASSED, (found.text, found.notes)
    for name in ("instruct-kl", "chat", "dpo", "grpo", "continuous", "environment", "flux", "krea2"):
        assert name in found.text


def test_kinds_that_are_not_entered_are_said(here: CheckedEntry) -> None:
    found = check_arguments(replace(here, kinds=(TournamentType.ENVIRONMENT,)))
    assert found.state is FindingState.PASSED, (found.text, found.notes)
    assert "all 1 are understood: environment" in found.text
    assert found.notes[-2:] == (
        "image: not checked; --kind image does",
        "text: not checked; --kind text does",
    )


def test_a_parser_that_refuses_unknown_options_fails(tmp_path: Path) -> None:
    found = check_arguments(small(tmp_path, "given['--no-such-option']"))
    assert found.state is FindingState.FAILED
    assert "instruct: KeyError" in found.text


def test_a_run_for_other_paths_and_hours_fails(tmp_path: Path) -> None:
    body = "{'task_id': given['--task-id'], 'deadline_at': 3600, 'began_at': 0, 'end_by': 3500}"
    found = check_arguments(small(tmp_path, body))
    said = "\n".join((found.text, *found.notes))
    assert "instruct: model_path is None" in said
    assert "instruct: 0.75 hours are taken for 1.00" in said
    assert "instruct-kl: kl_coefficient is None, not 0.5" in said


def test_an_entry_point_that_cannot_be_imported_fails(tmp_path: Path) -> None:
    found = check_arguments(small(tmp_path, "{}\nimport no_such_module"))
    assert found.state is FindingState.FAILED
    assert "no_such_module" in found.text


def test_an_entry_point_that_is_not_ours_is_not_vouched_for(tmp_path: Path) -> None:
    files = {
        "trainer/runner/command_line.py": "",
        "ops/docker/standalone-text-trainer.dockerfile": 'FROM a\nENTRYPOINT ["python", "train.py"]\n',
    }
    found = check_arguments(open_small(tmp_path, files, kinds=(TournamentType.TEXT,)))
    assert found.state is FindingState.UNKNOWN
    assert "starts python train.py, not trainer.text" in found.text


def test_another_trainer_is_not_run(tmp_path: Path) -> None:
    assert check_arguments(open_small(tmp_path, {"train.py": ""})).state is FindingState.UNKNOWN


def test_without_bubblewrap_another_owner_s_code_is_run_only_if_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made"
    entry = small(tmp_path, f"open({str(made)!r}, 'w') and {{}}")
    assert check_arguments(entry).state is FindingState.FAILED
    assert not made.exists()
    monkeypatch.setenv("PATH", str(tmp_path))
    found = check_arguments(entry)
    assert found.state is FindingState.UNKNOWN
    assert "bubblewrap is not installed" in found.text
    assert "--trust" in found.to_do
    assert not made.exists()
    found = check_arguments(replace(entry, trusted=True))
    assert "its code was run without a sandbox" in found.notes[-1]
    assert made.exists()


@pytest.mark.parametrize(
    "printed", ["'answer {'", "'answer []'", "'answer ' + '[' * 100000", "'answer 1e999'"]
)
def test_answers_of_another_shape_are_no_answers(tmp_path: Path, printed: str) -> None:
    found = check_arguments(small(tmp_path, f"print({printed}) or {{'deadline_at': 'x', 'end_by': [1]}}"))
    assert found.state is FindingState.FAILED
    assert "0.75 hours are taken for 0.00" in "\n".join((found.text, *found.notes))
