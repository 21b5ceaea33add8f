"""Rows of a run in tokens: none is cut, and what is lost is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("axolotl")

from core.domain.tasks import EnvironmentDataset, TaskType
from tests.trainer.environments import models
from tests.trainer.environments.test_template_probe import rows
from tests.trainer.run_specs import run_spec
from tests.trainer.tasks import rows_plan
from trainer.environments.task import encode_made
from trainer.errors import BadData
from trainer.inputs import text
from trainer.inputs.tables import read_table
from trainer.inputs.text import TextTask, write_task


def encoded(folder: Path, made: list[dict[str, Any]], window: int = 16384) -> TextTask:
    model = models.config_only(folder / "model", "qwen2")
    config = {"model_type": "qwen2", "vocab_size": 10_000, "max_position_embeddings": window}
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    dataset = EnvironmentDataset(environment_names=["liars_dice", "leduc_poker"])
    run = run_spec(folder, task_type=TaskType.ENVIRONMENT, dataset=dataset, model_path=str(model))
    return encode_made(run, made, models.tokenizer())


def with_text(row: dict[str, Any], words: str) -> dict[str, Any]:
    system, user, answer = row["messages"]
    return {**row, "messages": [{**system, "content": words}, user, answer]}


def test_rows_keep_their_length_and_equal_rows_are_held_out_together(tmp_path: Path) -> None:
    made = [with_text(row, f"red apples {number % 40}") for number in range(60) for row in rows()]
    task = encoded(tmp_path, made)
    assert (len(task.rows), dict(task.dropped), task.notes) == (240, {}, ())
    assert len(set(task.fingerprints)) == 160
    plan = rows_plan(TaskType.ENVIRONMENT, length=task.facts.total.max, eval_rows=12)
    prepared = write_task(task, plan, tmp_path / "data")
    assert prepared.train_rows + prepared.eval_rows == 240
    assert prepared.eval_path is not None
    held, trained = read_table(prepared.eval_path), read_table(prepared.train_path)
    assert len(held) == 12
    assert not [row for row in held if row in trained]


def test_where_the_usual_length_does_not_do_sequences_are_longer(tmp_path: Path) -> None:
    made = [with_text(row, "red apples " * 2000) for row in rows()]
    task = encoded(tmp_path, made)
    assert (task.limit, len(task.rows)) == (8192, 4)
    assert "longer than 4096 tokens: sequences have 8192" in task.notes[-1]


def test_a_few_rows_that_are_too_long_are_lost_and_said(tmp_path: Path) -> None:
    made = [*rows() * 50, with_text(rows()[0], "red apples " * 2000)]
    task = encoded(tmp_path, made)
    assert (task.limit, len(task.rows)) == (4096, 200)
    assert task.notes[-1] == f"1 of 201 rows are lost: {text.TOO_LONG}"


def test_a_window_that_no_row_fits_into_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="too long"):
        encoded(tmp_path, rows()[:3], window=256)
