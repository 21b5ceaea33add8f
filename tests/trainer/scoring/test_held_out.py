"""Held-out scores during a training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

from core.domain.evaluation import UNTRAINED_DPO, Era
from core.domain.tasks import TaskType
from tests.trainer import tiny
from tests.trainer.tasks import rows_plan, spec
from trainer.inputs.text import read_task, write_task
from trainer.inputs.tokens import PairRow, load_tokenizer
from trainer.scoring.held_out import HeldOut

TASKS = (TaskType.INSTRUCT, TaskType.CHAT, TaskType.DPO, TaskType.GRPO)


def opened(folder: Path, task: TaskType, **changes: Any) -> HeldOut:
    run = spec(folder, task, **changes)
    tokenizer = load_tokenizer(run.model_path)
    plan = rows_plan(task, eval_rows=3 if task.generates else 12)  # generating takes its time
    return HeldOut.open(run, write_task(read_task(run, tokenizer), plan, folder / "data"), tokenizer)


def adapted(folder: Path, *, moved: bool) -> Any:
    """The base with an adapter, which does nothing until it is moved."""
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=not moved)
    return get_peft_model(tiny.load(folder / "model"), config)


@pytest.mark.parametrize("task", TASKS)
def test_an_untouched_adapter_scores_like_the_base(tmp_path: Path, task: TaskType) -> None:
    held = opened(tmp_path, task)
    base = held.remember_base(tiny.load(tmp_path / "model"))
    now = held.score(adapted(tmp_path, moved=False))
    assert now.value == pytest.approx(base.value, abs=1e-3)
    if task.has_pairs:
        assert base.value == pytest.approx(math.log(2))
    if task.generates:
        assert base.value == pytest.approx(0.0, abs=1e-6)
        assert not base.lower_is_better


@pytest.mark.parametrize("task", TASKS)
def test_a_moved_adapter_scores_otherwise_and_the_same_every_time(tmp_path: Path, task: TaskType) -> None:
    held = opened(tmp_path, task)
    base = held.remember_base(tiny.load(tmp_path / "model"))
    model = adapted(tmp_path, moved=True)
    now = held.score(model)
    assert now.value != base.value
    assert held.score(model).value == now.value
    assert now.metric == base.metric


@pytest.mark.parametrize("task", TASKS)
def test_the_ranks_scores_add_up_to_the_score_of_all(tmp_path: Path, task: TaskType) -> None:
    held, model = opened(tmp_path, task), adapted(tmp_path, moved=True)
    parts = [held.remember_base(tiny.load(tmp_path / "model"), rank=rank, world=3) for rank in range(3)]
    held.base = parts[0].merged([sum(column) for column in zip(*(part.sums for part in parts), strict=True)])
    scores = [held.score(model, rank=rank, world=3) for rank in range(3)]
    together = scores[0].merged([sum(column) for column in zip(*(one.sums for one in scores), strict=True)])
    if task.generates:
        assert math.isfinite(together.value), "ranks sample other completions than one process does"
        return
    alone = opened(tmp_path, task)
    alone.remember_base(tiny.load(tmp_path / "model"))
    assert together.value == pytest.approx(alone.score(model).value, rel=1e-4)
    for shares in (parts, scores):
        assert sorted(place for one in shares for place in one.rows) == list(range(len(held.rows)))


def test_preferences_need_no_reference_in_memory_while_the_base_is_remembered(tmp_path: Path) -> None:
    held = opened(tmp_path, TaskType.DPO)
    held.remember_base(tiny.load(tmp_path / "model"))
    full = tiny.model(seed=9)
    with_memory = held.score(full).value
    fresh = opened(tmp_path, TaskType.DPO)
    assert fresh.score(full, reference=tiny.load(tmp_path / "model")).value == pytest.approx(with_memory)
    with pytest.raises(ValueError, match="give the base model"):
        opened(tmp_path, TaskType.DPO).score(full)


def test_a_task_with_a_kl_term_is_scored_with_it(tmp_path: Path) -> None:
    plain = opened(tmp_path, TaskType.INSTRUCT)
    model = adapted(tmp_path, moved=True)
    without = plain.score(model)
    dear = opened(tmp_path, TaskType.INSTRUCT, kl_coefficient=2.0)
    with_kl = dear.score(model)
    assert with_kl.metric == "eval_loss+kl"
    kl = with_kl.sums[2] / with_kl.sums[3]
    assert kl > 0
    assert with_kl.value == pytest.approx(without.value + 2.0 * kl, rel=1e-4)
    assert dear.score(model, reference=tiny.load(tmp_path / "model")).value == pytest.approx(
        with_kl.value, rel=1e-4
    )


def test_preferences_are_scored_by_the_rules_of_both_eras_where_these_differ(tmp_path: Path) -> None:
    """Prompts with an end token, answers that lose their first: what gains there must not lose elsewhere."""
    chances = {}
    for era in Era:
        for adds_begin in (True, False):
            folder = tmp_path / f"{era}-{adds_begin}"
            tiny.save(folder / "model", adds_begin=adds_begin)
            rows = [{**row, "prompt": f"{row['prompt']}\n"} for row in tiny.pair_rows(60)]
            run = spec(folder, TaskType.DPO, rows, era=era)
            tokenizer = load_tokenizer(run.model_path)
            files = write_task(read_task(run, tokenizer), rows_plan(TaskType.DPO), folder / "data")
            chances[era, adds_begin] = files.other_path is not None
    assert chances == {(era, adds_begin): adds_begin for era in Era for adds_begin in (True, False)}

    rows = [row for row in opened(tmp_path, TaskType.DPO).rows if isinstance(row, PairRow)]
    turned = [PairRow(row.prompt, row.rejected, row.chosen) for row in rows]
    run, tokenizer = spec(tmp_path, TaskType.DPO), load_tokenizer(str(tmp_path / "model"))
    model, base = adapted(tmp_path, moved=True), tiny.load(tmp_path / "model")
    values = []
    for mine, other in ((rows, ()), (turned, ()), (rows, turned), (turned, rows), (rows, rows)):
        held = HeldOut(run, mine, tokenizer, other=other)
        assert held.remember_base(base).value == pytest.approx(UNTRAINED_DPO)
        values.append(held.score(model).value)
        fresh = HeldOut(run, mine, tokenizer, other=other)
        assert fresh.score(model, reference=base).value == pytest.approx(values[-1])
    straight, backward, *guarded = values
    assert min(straight, backward) < UNTRAINED_DPO < max(straight, backward)
    worse = max(straight, backward)
    assert guarded == pytest.approx([worse, worse, straight])


def test_rewards_are_scored_against_the_base_only(tmp_path: Path) -> None:
    held = opened(tmp_path, TaskType.GRPO)
    measured = held.score(adapted(tmp_path, moved=False))
    with pytest.raises(ValueError, match="remember_base comes first"):
        _ = measured.value


def test_without_held_out_rows_there_is_nothing_to_open(tmp_path: Path) -> None:
    run = spec(tmp_path, TaskType.CHAT, tiny.chat_rows(2))
    tokenizer = load_tokenizer(run.model_path)
    files = write_task(read_task(run, tokenizer), rows_plan(TaskType.CHAT), tmp_path / "data")
    with pytest.raises(ValueError, match="no rows were held out"):
        HeldOut.open(run, files, tokenizer)
