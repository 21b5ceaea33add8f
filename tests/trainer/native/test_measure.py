"""A few steps under the clock."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from core.domain.choices import Optimizer
from core.domain.tasks import TaskType
from core.planning.plan import PrecisionPlan, TrainingPlan
from core.recipes.native import settings_of
from tests.trainer.native import tiny
from tests.trainer.tasks import task
from trainer.handoff import LaunchSpec
from trainer.native import measure
from trainer.native.measure import prepare_launch

pytestmark = pytest.mark.small


PROFILE = """
extends: cpu-demo
targets: {engine: native, gradient_accumulation_steps: 2}
limits: {max_gpus: 1}
"""


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> LaunchSpec:
    folder = tmp_path_factory.mktemp("measure")
    (folder / "profile.yaml").write_text(PROFILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOD_MINER_PROFILE", str(folder / "profile.yaml"))
        return prepare_launch(task(folder, TaskType.INSTRUCT, 200))


def test_steps_are_timed_after_the_first_ones(spec: LaunchSpec) -> None:
    measured = measure.measure_speed(spec, measure.single_gpu_plan(spec.plan), 3)
    assert measured["tokens_s"] > 0
    assert math.isfinite(measured["loss"])


def test_a_trace_names_the_operations_that_take_the_time(
    spec: LaunchSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which operations are the slowest varies: every one is shown here."""
    monkeypatch.setattr(measure, "_SHOWN_KERNELS", 10_000)
    events = list(measure.trace(spec, measure.single_gpu_plan(spec.plan), tmp_path / "trace", 2))
    kernels = [event for event in events if event["event"] == "kernel"]
    assert "aten::mm" in [kernel["name"] for kernel in kernels]
    shares = [kernel["share"] for kernel in kernels]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1)
    assert Path(events[-1]["trace"]).stat().st_size > 1000
    assert "aten::mm" in Path(events[-1]["table"]).read_text()


def test_a_sweep_keeps_what_is_faster_and_builds_on_it(
    spec: LaunchSpec, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With made-up speeds: each larger micro-batch is faster, muon slower, and bf16 breaks."""
    tried: list[tuple[int, Optimizer]] = []

    def apart(spec: LaunchSpec, plan: TrainingPlan, count: int) -> dict[str, Any]:
        tried.append((plan.batch.micro, plan.optimizer.name))
        if plan.precision.bf16:
            return {"failed": "no bf16 here"}
        slower = 0.5 if plan.optimizer.name is Optimizer.MUON else 1.0
        return {"tokens_s": 100.0 * plan.batch.micro * slower, "step_ms": 1.0, "memory_bytes": 0, "loss": 1.0}

    monkeypatch.setattr(measure, "_in_own_process", apart)
    plan = measure.single_gpu_plan(spec.plan)
    events = list(measure.sweep(spec, plan, 3, ["numbers", "micro", "optimizer"]))
    assert events[0]["name"] == "as planned"
    assert events[1]["failed"] == "no bf16 here"
    *_, keep = events
    assert keep["targets"] == {"micro_batch_size": 4, "gradient_accumulation_steps": 1}
    assert keep["gain"] == pytest.approx(2.0)
    assert (4, Optimizer.MUON) in tried
    measure._print_json(keep)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(keep))


def test_a_setting_that_breaks_costs_its_own_process_only(
    spec: LaunchSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure.sys, "executable", "/bin/false")
    assert measure._in_own_process(spec, spec.plan, 1) == {"failed": "ended with 1"}


@pytest.mark.parametrize("name", measure.AXES)
def test_every_setting_of_an_axis_is_another_plan_with_a_profiles_targets(name: str) -> None:
    plan = tiny.plan(full=True, micro=4, accumulation=2, precision=PrecisionPlan(bf16=False, tf32=False))
    settings = list(measure.AXES[name](plan))
    for setting in settings:
        assert setting.targets
        assert setting.plan != plan
        assert setting.plan.batch.effective == plan.batch.effective
        TrainingPlan.model_validate(setting.plan.model_dump())
        settings_of(setting.plan)
    # A CPU has but one attention.
    assert settings or name == "attention"


def test_a_plan_for_several_gpus_is_measured_on_one_with_its_own_batch() -> None:
    one = measure.single_gpu_plan(tiny.plan(full=True, world=2, engine_config={"batch_ramp": 0.2}))
    assert (one.batch.world_size, one.launch.processes) == (1, 1)
    assert (settings_of(one).probe_batch, settings_of(one).batch_ramp) == (False, 0.0)
