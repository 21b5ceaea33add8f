"""Rows for a run: ordered by its plan, made in processes of their own, and read whatever became of these."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from core.domain.tasks import PVP_GAMES, EnvironmentDataset, TaskType
from core.runs.run_files import RunSpec
from tests.core.recipes.cases import text_plan
from tests.trainer.run_specs import run_spec
from trainer.environments import task
from trainer.environments.sources import RowsOrder, RowsReport
from trainer.environments.task import LEAST_EACH, RowsInTheMaking, rows_orders, trained_rows
from trainer.errors import BadData
from trainer.handoff import write_record

pytestmark = pytest.mark.process


PLAN = text_plan(TaskType.ENVIRONMENT)
ROW = json.dumps({"environment": "leduc_poker", "messages": [], "tools": None})


def run_of(folder: Path, *names: str, seconds: float = 3600.0, **changes: Any) -> RunSpec:
    dataset = EnvironmentDataset(environment_names=list(names))
    values = {"task_type": TaskType.ENVIRONMENT, "model_path": str(folder / "model"), "dataset": dataset}
    return run_spec(folder, seconds, 60.0, **{**values, **changes})


def worker(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Runs this in place of the maker; `sys.argv[1]` is its order."""
    real = task.subprocess.Popen

    def start(command: list[str], env: dict[str, str]) -> Any:
        # What makers put aside stays within the run, also when they are killed.
        assert Path(env["TMPDIR"]).is_relative_to(Path(command[-1]).parent)
        return real([sys.executable, "-c", code, command[-1]], env=env)

    monkeypatch.setattr(task.subprocess, "Popen", start)


def made(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, *names: str, seconds: float = 3600.0
) -> Any:
    worker(monkeypatch, code)
    return RowsInTheMaking.start(run_of(folder, *names, seconds=seconds), PLAN).rows()


WRITES = f"""
import json, pathlib, sys
folder = pathlib.Path(json.loads(pathlib.Path(sys.argv[1]).read_text())["folder"])
(folder / "rows-1.jsonl").write_text({ROW!r} + "\\n")
"""
REPORTS = (
    WRITES
    + """
report = {"rows": 1, "games": 1, "ready_s": 0.0, "seconds": 2.0, "notes": ["something odd"]}
(folder / "report.json").write_text(json.dumps(report))
"""
)


def test_each_environment_has_the_same_share_of_what_is_trained(tmp_path: Path) -> None:
    orders = list(rows_orders(run_of(tmp_path, "leduc_poker", "othello", "chess", "othello"), PLAN))
    assert [order.environment for order in orders] == ["leduc_poker", "othello"]
    assert trained_rows(PLAN) <= sum(order.rows for order in orders) <= 3 * trained_rows(PLAN)
    assert len({order.rows for order in orders}) == 1
    assert len({order.seed for order in orders}) == len({order.folder for order in orders}) == 2


def test_of_unknown_names_alone_all_games_are_played(tmp_path: Path) -> None:
    assert [order.environment for order in rows_orders(run_of(tmp_path, "chess"), PLAN)] == list(PVP_GAMES)


@pytest.mark.parametrize(("seconds", "least", "most"), [(3600, 100, 1800), (1, 10, 30), (-50, 10, 30)])
def test_the_making_has_a_part_of_the_time_and_never_none(
    tmp_path: Path, seconds: float, least: float, most: float
) -> None:
    [order] = rows_orders(run_of(tmp_path, "leduc_poker", seconds=seconds), PLAN)
    assert least < order.end_by - time.time() < most
    assert order.rows >= LEAST_EACH


def test_rows_and_what_is_to_be_said_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, notes = made(tmp_path, monkeypatch, REPORTS, "leduc_poker", "othello", "chess")
    assert rows == [json.loads(ROW)] * 2
    assert "'chess'" in notes[0]
    assert notes[1:3] == ("leduc_poker: 1 rows of 1 games in 2 s, of which 0 s to get ready", "something odd")


def test_rows_of_a_process_that_was_killed_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not the line that it was writing."""
    cut = WRITES + '\n(folder / "rows-1.jsonl").open("a").write("{\\"mess")\nraise SystemExit(9)'
    rows, notes = made(tmp_path, monkeypatch, cut, "leduc_poker")
    assert rows == [json.loads(ROW)]
    assert notes[0] == "leduc_poker: 1 rows, by a process that was ended"


def test_an_environment_that_hangs_costs_its_own_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "GRACE_S", 0.0)
    monkeypatch.setattr(task, "_LATE_S", 0.5)
    monkeypatch.setattr(task, "LEAST_S", 0.5)
    hangs = "import sys, time\nif 'othello' in sys.argv[1]: time.sleep(600)\n" + REPORTS
    rows, notes = made(tmp_path, monkeypatch, hangs, "othello", "leduc_poker", seconds=1.0)
    assert rows == [json.loads(ROW)]
    assert notes[0] == "othello: no rows: not ready in time"


def test_where_nothing_has_rows_the_game_that_is_ready_at_once_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = "import sys\nif 'instead' not in sys.argv[1]: sys.exit(1)\n" + REPORTS
    rows, notes = made(tmp_path, monkeypatch, only, "swe_infinite")
    assert rows == [json.loads(ROW)]
    assert notes[0].startswith("swe_infinite: no rows")
    assert notes[1] == "none of these has rows: leduc_poker is played instead"


def test_without_any_row_there_is_nothing_to_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadData, match=r"othello: no rows.*leduc_poker: no rows"):
        made(tmp_path, monkeypatch, "", "othello")


def test_rows_of_an_earlier_attempt_are_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, "leduc_poker")
    [order] = rows_orders(run, PLAN)
    Path(order.folder).mkdir(parents=True)
    (Path(order.folder) / "rows-1.jsonl").write_text(ROW + "\n", encoding="utf-8")
    write_record(order.report_path, RowsReport(rows=1, games=1, ready_s=0, seconds=1))
    worker(monkeypatch, "raise SystemExit('not again')")
    making = RowsInTheMaking.start(run, PLAN)
    assert not making.processes
    assert making.rows()[0] == [json.loads(ROW)]


def test_nor_are_enough_rows_of_a_maker_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, "leduc_poker")
    [order] = rows_orders(run, PLAN)
    Path(order.folder).mkdir(parents=True)
    (Path(order.folder) / "rows-1.jsonl").write_text(f"{ROW}\n" * task.LEAST_EACH, encoding="utf-8")
    worker(monkeypatch, "raise SystemExit('not again')")
    making = RowsInTheMaking.start(run, PLAN)
    assert not making.processes
    assert len(making.rows()[0]) == task.LEAST_EACH


def test_an_order_survives_its_file(tmp_path: Path) -> None:
    [order] = rows_orders(run_of(tmp_path, "leduc_poker", requested_data=("/cache/a",)), PLAN)
    path = tmp_path / "order.json"
    write_record(path, order)
    assert RowsOrder.model_validate_json(path.read_bytes()) == order
