"""Models side by side, from files to the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from core.domain.evaluation import Era
from core.domain.tasks import TaskType
from core.runs.run_files import EvalTask
from tests.trainer import tiny
from tests.trainer.tasks import ROWS, SCORED, spec
from trainer.errors import BadData, BadModel, BadReward
from trainer.scoring.eval import comparison_table, evaluate, main

TASKS = (TaskType.INSTRUCT, TaskType.CHAT, TaskType.DPO, TaskType.GRPO)


def task(folder: Path, kind: TaskType, count: int = 24, **more: Any) -> Path:
    (folder / "rows.json").write_text(json.dumps(ROWS[kind](count)))
    file = folder / "task.json"
    file.write_text(json.dumps({"dataset_type": SCORED[kind].model_dump(), "data": "rows.json", **more}))
    return file


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny.save(tmp_path / "base")


def tuned(base: Path, folder: Path, kind: TaskType) -> Path:
    """An adapter that was trained on the rows for a moment, so that it is surely better than the base."""
    model = get_peft_model(tiny.load(base), LoraConfig(r=8, target_modules="all-linear"))
    tokenizer = tiny.tokenizer(adds_begin=True)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=2e-2)
    for row in ROWS[kind](24):
        ids = torch.tensor([tokenizer(f"{row.get('instruct', '')} {row.get('output', '')}")["input_ids"]])
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", TASKS)
def test_the_base_an_adapter_and_a_full_model_stand_side_by_side(
    base: Path, tmp_path: Path, kind: TaskType
) -> None:
    other = tiny.save(tmp_path / "other", seed=8)
    adapter = tuned(base, tmp_path / "ours", kind)
    count = 6 if kind.generates else 24
    report = evaluate(EvalTask.read(task(tmp_path, kind, count)), base, [adapter, other], allow_rewards=True)
    assert [one.name for one in report.models] == ["base", "ours", "other"]
    assert report.rows == count
    assert report.lower_is_better is (not kind.generates)
    assert len({one.score for one in report.models}) > 1
    if kind.generates:
        assert all(len(one.rewards) == 1 and one.kl is not None for one in report.models)
        assert report.models[0].kl == pytest.approx(0.0, abs=1e-4)
    else:
        ours = report.models[1].over_base
        assert ours is not None
        assert ours.rows == 24
        assert report.models[2].over_first is not None


def test_a_model_that_learned_the_rows_wins_against_the_base(base: Path, tmp_path: Path) -> None:
    adapter = tuned(base, tmp_path / "ours", TaskType.INSTRUCT)
    report = evaluate(EvalTask.read(task(tmp_path, TaskType.INSTRUCT)), base, [adapter])
    verdict = report.models[1].over_base
    assert verdict is not None
    assert verdict.won
    assert "WINS" in comparison_table(report)


def test_an_adapter_is_put_on_the_base_that_was_given(base: Path, tmp_path: Path) -> None:
    """Whatever base its own configuration names: a hub's name, or a path of another machine."""
    adapter = tuned(base, tmp_path / "ours", TaskType.INSTRUCT)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": "no/where"})
    )
    assert len(evaluate(EvalTask.read(task(tmp_path, TaskType.INSTRUCT)), base, [adapter]).models) == 2


def test_the_command_prints_a_table_or_json(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--base", str(base), "--task", str(task(tmp_path, TaskType.CHAT)), "--rows", "6"]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 6
    assert main([*arguments, "--model", str(base)]) == 0
    shown = capsys.readouterr().out
    assert "6 rows" in shown
    assert "no win" in shown


def test_what_cannot_be_scored_is_one_line_on_the_error_output(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = task(tmp_path, TaskType.CHAT)
    (tmp_path / "rows.json").write_text("[]")
    assert main(["--base", str(base), "--task", str(file)]) == 1
    assert "no rows" in capsys.readouterr().err


def test_reward_code_is_not_run_here_without_being_asked_to(base: Path, tmp_path: Path) -> None:
    with pytest.raises(BadReward, match="--allow-rewards"):
        evaluate(EvalTask.read(task(tmp_path, TaskType.GRPO)), base, [])


def test_an_invalid_model_is_refused(base: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadModel, match="empty cannot be loaded"):
        evaluate(EvalTask.read(task(tmp_path, TaskType.CHAT)), base, [tmp_path / "empty"])


def test_environments_are_not_scored_on_rows(tmp_path: Path) -> None:
    file = tmp_path / "task.json"
    file.write_text(json.dumps({"dataset_type": {"environment_names": ["x"]}, "data": "rows.json"}))
    with pytest.raises(BadData, match="played"):
        evaluate(EvalTask.read(file), tmp_path, [])


def test_a_run_file_is_a_task_too(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(spec(tmp_path, TaskType.CHAT, era=Era.TOURNAMENTS, kl_coefficient=0.5).to_json())
    read = EvalTask.read(file)
    assert (read.era, read.kl_coefficient, read.data) == (
        Era.TOURNAMENTS,
        0.5,
        str(tmp_path / "rows.json"),
    )
