"""The trial of a model before its rows are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.domain.tasks import TaskType
from tests.trainer.tasks import task
from trainer.errors import BadModel
from trainer.handoff import PrepareSpec
from trainer.runner import prepare as module


def test_the_imports_are_no_part_of_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports take minutes from a cold disk, and the runner would blame the model."""
    run = task(tmp_path, TaskType.INSTRUCT)
    spec = PrepareSpec(
        run=run, plan_path=None, plan_out="", folder=str(tmp_path), prepared_out="", failure_out=""
    )
    tried: list[tuple[str, bool]] = []

    def load(path: str) -> None:
        tried.append(("load", spec.trial_path.exists()))
        raise BadModel("none")

    monkeypatch.setattr(
        module, "import_tokenizers", lambda: tried.append(("import", spec.trial_path.exists()))
    )
    monkeypatch.setattr(module, "load_tokenizer", load)
    with pytest.raises(BadModel):
        module.prepare(spec)
    assert tried == [("import", False), ("load", True)]
