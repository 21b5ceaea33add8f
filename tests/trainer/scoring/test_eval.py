"""Models side by side, from files to the table."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from peft import LoraConfig, get_peft_model

from core.domain.evaluation import Era
from core.domain.tasks import TaskType
from core.domain.tournament_rules import BOSS_GATE
from core.runs.run_files import EvalTask
from tests.trainer import tiny
from tests.trainer.tasks import ROWS, SCORED, spec
from trainer.errors import BadData, BadModel, BadReward
from trainer.scoring.eval import compare_models, comparison_table, evaluate, main

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
    assert (read.era, read.kl_coefficient, read.data) == (Era.TOURNAMENTS, 0.5, str(tmp_path / "rows.json"))


assert torch  # collected with the training stack only, which numpy comes with
CHANCE = numpy.random.default_rng(0)
BOSS = CHANCE.gamma(2.0, 0.5, 800)


def test_a_clearly_better_challenger_wins() -> None:
    comparison = compare_models(BOSS.tolist(), (BOSS - 0.1 + CHANCE.normal(0, 0.05, 800)).tolist())
    assert comparison.won
    assert comparison.win_rate_bound > 0.9
    assert "at the 1st percentile" in comparison.reason
    assert comparison.mean_gap == pytest.approx(0.1, abs=0.01)
    assert comparison.mean_gap_bound < comparison.mean_gap


def test_a_model_does_not_beat_itself() -> None:
    comparison = compare_models(BOSS.tolist(), BOSS.tolist())
    assert (comparison.wins, comparison.losses, comparison.won) == (0, 0, False)
    assert comparison.win_rate_bound == 0.0


def test_differences_within_the_dead_zone_decide_nothing() -> None:
    comparison = compare_models(BOSS.tolist(), (BOSS - BOSS_GATE.dead_zone * 0.9).tolist())
    assert (comparison.wins, comparison.won) == (0, False)


def test_noise_does_not_win() -> None:
    comparison = compare_models(BOSS.tolist(), (BOSS + CHANCE.normal(0, 0.3, 800)).tolist())
    assert not comparison.won
    assert 0.4 < comparison.win_rate < 0.6


def test_many_hairline_wins_do_not_outweigh_a_few_heavy_losses() -> None:
    challenger = BOSS - 0.02
    challenger[:100] += 1.0
    comparison = compare_models(BOSS.tolist(), challenger.tolist())
    assert comparison.win_rate > 0.8
    assert not comparison.won
    assert "mean gap" in comparison.reason


def test_high_losses_need_a_wider_gap() -> None:
    high = (BOSS + 9).tolist()
    assert compare_models(high, high).gap_needed == pytest.approx(0.01 * numpy.mean(high))
    assert compare_models([0.1] * 5, [0.1] * 5).gap_needed == 0.01


def test_rows_that_could_not_be_scored_count_for_nobody() -> None:
    comparison = compare_models([1.0, float("nan"), 1.0, float("inf")], [0.5, 0.5, float("nan"), 0.5])
    assert (comparison.rows, comparison.wins) == (1, 1)
    assert compare_models([], []).won is False


def test_the_bounds_are_those_of_the_validators_bootstrap() -> None:
    """Written down again: 10,000 draws of all rows, 1st percentile, a fixed seed."""
    boss, challenger = BOSS[:300], BOSS[:300] - CHANCE.normal(0.03, 0.1, 300)
    gaps = boss - challenger
    generator = numpy.random.default_rng(20260808)
    rates, means = [], []
    for start in range(0, 10_000, 2_000_000 // 300):
        drawn = generator.integers(0, 300, size=(min(2_000_000 // 300, 10_000 - start), 300))
        picked = gaps[drawn]
        decided = (abs(picked) > 0.01).sum(axis=1)
        rates += list((picked > 0.01).sum(axis=1) / decided)
        means += list(picked.mean(axis=1))
    comparison = compare_models(boss.tolist(), challenger.tolist())
    assert comparison.win_rate_bound == pytest.approx(numpy.percentile(rates, 1), abs=1e-12)
    assert comparison.mean_gap_bound == pytest.approx(numpy.percentile(means, 1), abs=1e-9)


def test_vectors_of_different_rows_are_not_compared() -> None:
    with pytest.raises(ValueError):
        compare_models([1.0], [1.0, 2.0])


def drawn_twice(boss: list[float], challenger: list[float], draws: int, again: int) -> float:
    """The chance to win, the long way: the whole rule on each of many other sets of rows."""
    chance = random.Random(1)
    pairs = list(zip(boss, challenger, strict=True))
    wins = 0
    for _ in range(draws):
        rows = chance.choices(pairs, k=len(pairs))
        gaps = [one - other for one, other in rows]
        rates, means = [], []
        for _ in range(again):
            some = chance.choices(gaps, k=len(gaps))
            decided = [gap for gap in some if abs(gap) > 0.01]
            rates.append(sum(gap > 0 for gap in decided) / len(decided) if decided else 0.0)
            means.append(sum(some) / len(some))
        needed = max(0.01, 0.01 * sum(one for one, _ in rows) / len(rows))
        wins += sorted(rates)[again // 100] >= 0.55 and sorted(means)[again // 100] >= needed
    return wins / draws


@pytest.mark.parametrize(("better_by", "noise"), [(0.05, 0.1), (0.03, 0.06), (0.02, 0.1)])
def test_the_chance_to_win_is_that_of_the_whole_rule_on_other_rows(better_by: float, noise: float) -> None:
    boss = BOSS[:120]
    challenger = (boss - better_by + numpy.random.default_rng(3).normal(0, noise, 120)).tolist()
    comparison = compare_models(boss.tolist(), challenger)
    expected = drawn_twice(boss.tolist(), challenger, draws=100, again=100)
    assert comparison.p_win == pytest.approx(expected, abs=0.15)


def test_the_chance_to_win_is_none_for_equals_and_sure_for_a_much_better_model() -> None:
    assert compare_models(BOSS.tolist(), BOSS.tolist()).p_win == 0.0
    assert compare_models(BOSS.tolist(), (BOSS - 0.5).tolist()).p_win == 1.0
    assert compare_models([], []).p_win == 0.0
