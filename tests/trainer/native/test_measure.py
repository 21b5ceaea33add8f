"""A few steps under the clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.choices import Optimizer
from core.plan import TrainingPlan
from core.run_files import RunSpec
from core.tasks import TaskType
from tests.trainer.native.test___main__ import task
from trainer.native import clocked, levers, measure, sweep, trace
from trainer.native.ready import plan_of, ready
from trainer.sheet import Sheet

PROFILE = """
extends: cpu-demo
targets: {engine: native, gradient_accumulation_steps: 2}
limits: {max_gpus: 1}
"""


@pytest.fixture(scope="module")
def sheet(tmp_path_factory: pytest.TempPathFactory) -> Sheet:
    folder = tmp_path_factory.mktemp("measure")
    (folder / "profile.yaml").write_text(PROFILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOD_MINER_PROFILE", str(folder / "profile.yaml"))
        run: RunSpec = task(folder, TaskType.INSTRUCT, 200)
        return ready(run)


def test_steps_are_timed_after_the_first_ones(sheet: Sheet) -> None:
    found = clocked.speed(sheet, levers.measurable(plan_of(sheet)), 3)
    assert found["tokens_s"] > 0
    assert found["loss"] == pytest.approx(6, abs=1)


def test_a_trace_names_the_operations_that_take_the_time(sheet: Sheet, tmp_path: Path) -> None:
    events = list(trace.trace(sheet, levers.measurable(plan_of(sheet)), tmp_path / "trace", 2))
    kernels = [event for event in events if event["event"] == "kernel"]
    assert "aten::mm" in [kernel["name"] for kernel in kernels]
    shares = [kernel["share"] for kernel in kernels]
    assert shares == sorted(shares, reverse=True)
    assert 0.5 < sum(shares) <= 1
    assert Path(events[-1]["trace"]).stat().st_size > 1000
    assert "aten::mm" in Path(events[-1]["table"]).read_text()


def test_a_sweep_keeps_what_is_faster_and_builds_on_it(
    sheet: Sheet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With made-up speeds: each larger micro-batch is faster, muon slower, and bf16 breaks."""
    tried: list[tuple[int, Optimizer]] = []

    def apart(sheet: Sheet, plan: TrainingPlan, count: int) -> dict[str, Any]:
        tried.append((plan.batch.micro, plan.optimizer.name))
        if plan.precision.bf16:
            return {"failed": "no bf16 here"}
        slower = 0.5 if plan.optimizer.name is Optimizer.MUON else 1.0
        return {"tokens_s": 100.0 * plan.batch.micro * slower, "step_ms": 1.0, "memory_bytes": 0, "loss": 1.0}

    monkeypatch.setattr(sweep, "_apart", apart)
    plan = levers.measurable(plan_of(sheet))
    events = list(sweep.sweep(sheet, plan, 3, ["numbers", "micro", "optimizer"]))
    assert events[0]["name"] == "as planned"
    assert events[1]["failed"] == "no bf16 here"
    *_, keep = events
    assert keep["targets"] == {"micro_batch_size": 4, "gradient_accumulation_steps": 1}
    assert keep["gain"] == pytest.approx(2.0)
    assert (4, Optimizer.MUON) in tried
    measure._say(keep)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(keep))


def test_a_setting_that_breaks_costs_its_own_process_only(
    sheet: Sheet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep.sys, "executable", "/bin/false")
    assert sweep._apart(sheet, plan_of(sheet), 1) == {"failed": "ended with 1"}
