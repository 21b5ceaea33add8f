"""The yardstick's design, its scaling and its verdicts, without any training."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.text_rules import scale
from benchmarks.text_rules import winner_rules as rules
from benchmarks.text_rules.cells import (
    KINDS,
    TYPES,
    Cell,
    Records,
    all_cells,
    digest_of,
    shares,
)
from benchmarks.text_rules.report import (
    VARIANTS,
    gap_of,
    report_of,
    variants_report,
    verdicts,
)
from core.domain.choices import Method
from core.domain.tasks import TaskType
from core.models.identify import facts_from_name
from core.profile.resolve import load_profile, resolve_profile
from tests.core.builders import llama_8b
from tests.doubles.each import each

PROFILE = Path(scale.__file__).with_name("profile.yaml")
TINY = facts_from_name("org/tiny-llama", 600_000)


# — the design


def test_every_type_meets_every_kind_of_data_once() -> None:
    cells = all_cells()
    assert len({cell.name for cell in cells}) == len(cells) == 36
    for kind in TYPES:
        assert Counter(cell.kind for cell in cells if cell.type == kind) == Counter(KINDS)


def test_workers_share_the_cells_and_not_their_bases() -> None:
    one, other = shares(all_cells(), 2)
    assert len(one) == len(other)
    assert {(cell.family, cell.seed) for cell in one}.isdisjoint({(cell.family, cell.seed) for cell in other})
    assert Counter(cell.type for cell in one) == Counter(cell.type for cell in other)


# — records


def test_an_interrupted_table_goes_on_after_its_last_whole_record(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "records.jsonl"
    Records(path).add({"cell": "a", "side": "ours", "stamp": "1", "rows": [1.0]})
    with path.open("a") as file:
        file.write('{"cell": "a", "side": "winner", "sta')
    records = Records(path)
    assert records.get("a", "ours", "1") == {"cell": "a", "side": "ours", "stamp": "1", "rows": [1.0]}
    assert records.get("a", "winner", "1") is None


def test_a_record_counts_for_what_was_run_only(tmp_path: Path) -> None:
    records = Records(tmp_path / "records.jsonl")
    records.add({"cell": "a", "side": "ours", "stamp": "1"})
    assert records.get("a", "ours", "2") is None
    file = tmp_path / "rule.py"
    file.write_text("rate = 1")
    before = digest_of([file])
    file.write_text("rate = 1  # of all")
    assert digest_of([file]) == before
    file.write_text("rate = 2")
    assert digest_of([file]) != before


# — scaling


def test_our_side_is_the_default_profile_but_for_what_a_cpu_lacks() -> None:
    """Nothing of how a model is trained may differ: rates, batches, schedules, epochs, method."""
    machine = {
        *("lora_kernels", "bf16", "tf32", "attention", "fused_loss", "optimizer"),
        *("dataloader_num_workers", "dataloader_pin_memory", "sample_packing", "micro_batch_size"),
    }
    for task in (task for task in TaskType if task.is_text):
        ours = resolve_profile(load_profile(str(PROFILE)), task, llama_8b()).targets.model_dump()
        shipped = resolve_profile(load_profile("steady"), task, llama_8b()).targets.model_dump()
        assert {key for key in ours if ours[key] != shipped[key]} <= machine


@pytest.mark.parametrize("cell", all_cells()[:12], ids=lambda cell: cell.name)
def test_a_cells_profile_is_that_of_the_methods_size_with_scaled_rates(cell: Cell, tmp_path: Path) -> None:
    written = scale.cell_profile(cell, PROFILE)
    path = tmp_path / "cell.yaml"
    path.write_text(yaml.safe_dump(written))
    ours = resolve_profile(load_profile(str(path)), cell.task, TINY).targets
    shipped, planned = scale.resolved_for(PROFILE, cell.task, cell.method)
    assert planned or (cell.task is TaskType.GRPO and cell.method is Method.FULL)
    scaled = {"method", "learning_rate", "effective_batch_size", "lora_r"}
    assert ours.model_dump(exclude=scaled) == shipped.targets.model_dump(exclude=scaled)
    factor = scale.rate_factor(cell) * (1 if planned else scale.FULL_GRPO)
    assert ours.learning_rate == pytest.approx(shipped.targets.learning_rate * factor, rel=1e-5)
    assert ours.method is cell.method


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_changes_some_profile(name: str, tmp_path: Path) -> None:
    def resolved(cell: Cell, changes: str = "") -> object:
        path = tmp_path / "cell.yaml"
        path.write_text(yaml.safe_dump(scale.cell_profile(cell, PROFILE, changes)))
        found = resolve_profile(load_profile(str(path)), cell.task, TINY)
        return found.targets, found.limits

    cells = map(Cell.of, ("instruct-llama-4", "grpo-llama-4"))
    assert any(resolved(cell, VARIANTS[name]) != resolved(cell) for cell in cells)


# — verdicts


def result(cell: str, chance: float, gap: float, **others: Any) -> dict[str, Any]:
    """Of a cell where ours is ahead of every rival by so much of a loss of 2."""
    found = {"p_better": chance, "mean_gap": gap, "chances": [chance, 1.0]}
    scores = {"base": 5.0, "upstream": 4.0, "uncapped": 3.0, "winner": 2.0, "ours": 2.0 - gap}
    told = {side: [{"steps": 10}] for side in ("upstream", "uncapped", "winner", "ours")}
    against = {"ours": dict.fromkeys(("winner", "uncapped", "upstream", "base"), found)}
    return {"cell": cell, "scores": scores, "told": told, "against": against, **others}


def test_differences_are_in_per_cent_of_the_rivals_loss_and_of_all_rewards() -> None:
    assert gap_of(result("dpo-llama-1", 0.9, 0.1), "ours", "winner") == (0.9, pytest.approx(5.0))
    assert gap_of(result("grpo-llama-1", 0.9, 0.1), "ours", "winner") == (0.9, pytest.approx(10.0))


def test_the_bars_hold_where_enough_cells_are_better_and_few_worse() -> None:
    held = verdicts({"dpo": [(0.95, 2.0)] * 6 + [(0.5, 0.1)] * 3 + [(0.05, -1.0)]}, [(1.0, 9.0)] * 10)
    assert held[-2].count("yes") == 4
    assert held[-1].startswith("26 cells are missing")
    missed = verdicts({"dpo": [(0.95, 2.0)] * 5 + [(0.05, -9.0)] * 5}, [(1.0, 9.0)] * 9 + [(0.5, 0.0)])
    assert missed[-2].count("NO") == 4
    assert "every type ahead: NO (dpo)" in missed[-2]


def test_the_table_has_a_row_for_each_cell() -> None:
    report = report_of([result("dpo-qwen-1", 0.97, 0.1), result("kl-llama-2", 0.05, -0.1)], 40)
    assert [row[0] for row in report.rows] == ["dpo-qwen-1", "kl-llama-2"]
    assert [row[1] for row in report.rows] == ["altered (pruning)", "altered (noise)"]
    assert [row[-1] for row in report.rows] == ["better", "worse"]
    assert len(report.rows[0]) == len(report.columns)
    json.dumps(report.data)


def test_the_random_numbers_of_a_second_training_are_others() -> None:
    cell = Cell.of("dpo-qwen-1")
    first, second = (scale.cell_profile(cell, PROFILE, number=number) for number in (0, 1))
    assert "seed" not in first["sections"]["cell"]["targets"]
    assert second["sections"]["cell"]["targets"]["seed"] == 43
    assert scale.peer_ask(cell, 40, 0)["seed"] != scale.peer_ask(cell, 40, 1)["seed"]


def test_a_cell_that_failed_counts_as_worse() -> None:
    cells = [result("dpo-qwen-1", 0.97, 0.1), result("dpo-llama-1", 0.97, 0.1)]
    report = report_of(cells, 40, [{"cell": "dpo-llama-2", "error": "killed"}])
    assert any("better in 2, worse in 1 of 3" in note for note in report.notes)


def test_a_variants_row_is_its_mean_and_where_it_is_surely_better() -> None:
    cells = [result("dpo-qwen-1", 0.0, 0.0), result("chat-llama-1", 0.0, 0.0)]
    for cell, chance in zip(cells, (0.95, 0.02), strict=True):
        cell["against"]["ours:no_search"] = {"ours": {"p_better": chance, "mean_gap": chance - 0.5}}
    report = variants_report(cells, ["no_search"], 40)
    assert report.rows[0][:2] == ("no_search", VARIANTS["no_search"])
    assert report.rows[0][3:5] == ("1/2", "1/2")
    assert len(report.rows[0]) == len(report.columns)


FULL, LORA = Method.FULL, Method.LORA
INSTRUCT, CHAT, DPO, GRPO = TaskType.INSTRUCT, TaskType.CHAT, TaskType.DPO, TaskType.GRPO


@each(
    ("rule", "arguments", "expected"),
    [
        # The smallest classes of the tables are used.
        (rules.class_of, (INSTRUCT, FULL), rules.WinnerClass(1e-4, 140)),
        (rules.class_of, (CHAT, LORA), rules.WinnerClass(1e-4, 32)),
        (rules.class_of, (DPO, LORA), rules.WinnerClass(6.5e-6, 12)),
        (rules.class_of, (GRPO, FULL), rules.WinnerClass(8e-6, 40)),
        # Small batches are accumulated.
        (rules.rows_of_step, (INSTRUCT, FULL), 140),
        (rules.rows_of_step, (CHAT, LORA), 64),
        (rules.rows_of_step, (DPO, FULL), 64),
        (rules.rows_of_step, (DPO, LORA), 48),
        (rules.rows_of_step, (GRPO, FULL), 160),
        # Epochs fill the time within bounds: seconds left, of a step, steps of an epoch, rows.
        (rules.epochs, (1000, 1.0, 100, 5000), 4.0),
        (rules.epochs, (1000, 1.0, 100, 20_000), 3.0),
        (rules.epochs, (200, 1.0, 100, 5000), 2.125),
        (rules.epochs, (10, 1.0, 100, 5000), 1.3),
        # The warmup follows steps and hours.
        (rules.warmup, (200, 1), 10),
        (rules.warmup, (1000, 1), 30),
        (rules.warmup, (9000, 1), 60),
        (rules.warmup, (9000, 9), 200),
        (rules.warmup, (20, 1), 5),
        (rules.dev_rows, (240,), 48),
        (rules.dev_rows, (5000,), 400),
        (rules.dev_rows, (20_000,), 606),
        (rules.dev_rows, (50_000,), 1000),
        # Long prompts count a little.
        (rules.prompt_weight, (50, 10), 0.0),
        (rules.prompt_weight, (100, 10), 0.025),
        # The first rate follows the weights, and the probe changes it within bounds.
        (rules.first_rate, (CHAT, 1e-3, 0.06, 0.03), 2e-3),
        (rules.first_rate, (DPO, 1e-3, 0.06, 0.03), 1e-3),
        (rules.first_rate, (DPO, 1e-3, 0.015, 0.03), 5e-4),
        (rules.probed_factor, (-1.0,), 0.6),
        (rules.probed_factor, (0.04,), 1.0),
        (rules.probed_factor, (0.14,), 1.4),
        (rules.probed_factor, (1.0,), 1.6),
        # Edges and gaps are looked at.
        (rules.next_rate, ({1.0: 3.0, 2.0: 1.0, 8.0: 2.0}, 2.0), 4.0),
        (rules.next_rate, ({1.0: 3.0, 2.0: 1.0, 8.0: 2.0}, 8.0), 8 * 10**0.15),
        (rules.next_rate, ({1.0: 3.0, 2.0: 1.0, 8.0: 2.0}, 1.0), 10**-0.15),
        (rules.next_rate, ({1.0: 2.0, 1.1: 1.0, 1.2: 2.0}, 1.1), None),
        # Hopeless candidates are given up.
        (rules.given_up, ([5.0, 4.0], 1.0), False),
        (rules.given_up, ([5.0, 9.0], 1.0), True),
        (rules.given_up, ([5.0, math.nan], math.inf), True),
        (rules.given_up, ([1.0, 1.2, 1.3, 1.4, 1.6], math.inf), True),
    ],
)
def test_a_rule_is_the_one_that_is_written_down(rule: Any, arguments: tuple[Any, ...], expected: Any) -> None:
    found = rule(*arguments)
    assert found == (pytest.approx(expected) if isinstance(expected, float) else expected)


def test_the_rate_warms_up_and_falls_to_a_quarter() -> None:
    factors = [rules.rate_factor(step, 100, 10) for step in range(101)]
    assert factors[0] == 0.1
    assert max(factors) == factors[10] == 1.0
    assert factors[100] == pytest.approx(0.25)
    assert factors[10:] == sorted(factors[10:], reverse=True)


@each(
    ("steps", "epochs", "plan"),
    [
        (500, 3.0, rules.SearchPlan(62, 50, third=True)),
        (500, 1.5, rules.SearchPlan(62, 50)),
        (140, 3.0, rules.SearchPlan(35, 0, third=True)),
        (5000, 3.0, rules.SearchPlan(100, 150, third=True)),
        (60, 3.0, rules.SearchPlan(20, 0, (-0.3, 0.0, 0.3))),
        (60, 0.5, rules.SearchPlan(20, 0, (-0.1, 0.0, 0.1))),
        (40, 3.0, None),
    ],
)
def test_stages_of_the_search_fit_its_steps(steps: int, epochs: float, plan: rules.SearchPlan | None) -> None:
    found = rules.search_plan(steps, epochs)
    assert found == plan
    if found is not None:
        assert found.first * len(found.offsets) + found.second * len(rules.STAGE_2) <= steps


def test_the_highest_of_nearly_equal_rates_is_picked() -> None:
    scores = {1e-4: 2.0, 2e-4: 1.0, 4e-4: 1.02, 8e-4: 1.1, 1e-2: math.inf}
    assert rules.pick(scores, highest=True) == 4e-4
    assert rules.pick(scores, highest=False) == 2e-4
