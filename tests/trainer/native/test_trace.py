"""A few steps under the profiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.domain.tasks import TaskType
from core.recipes.native import settings_of
from tests.trainer.native import tiny
from tests.trainer.tasks import task
from trainer.handoff import LaunchSpec
from trainer.native import trace
from trainer.native.trace import prepare_launch

pytestmark = pytest.mark.small


PROFILE = """
extends: cpu-demo
targets: {engine: native, gradient_accumulation_steps: 2}
limits: {max_gpus: 1}
"""


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> LaunchSpec:
    folder = tmp_path_factory.mktemp("trace")
    (folder / "profile.yaml").write_text(PROFILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOD_MINER_PROFILE", str(folder / "profile.yaml"))
        return prepare_launch(task(folder, TaskType.INSTRUCT, 200))


def test_a_trace_names_the_operations_that_take_the_time(
    spec: LaunchSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which operations are the slowest varies: every one is shown here."""
    monkeypatch.setattr(trace, "_SHOWN_KERNELS", 10_000)
    events = list(trace.trace(spec, trace.single_gpu_plan(spec.plan), tmp_path / "trace", 2))
    kernels = [event for event in events if event["event"] == "kernel"]
    assert "aten::mm" in [kernel["name"] for kernel in kernels]
    shares = [kernel["share"] for kernel in kernels]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1)
    assert Path(events[-1]["trace"]).stat().st_size > 1000
    assert "aten::mm" in Path(events[-1]["table"]).read_text()


def test_a_plan_for_several_gpus_is_measured_on_one_with_its_own_batch() -> None:
    one = trace.single_gpu_plan(tiny.plan(full=True, world=2, engine_config={"batch_ramp": 0.2}))
    assert (one.batch.world_size, one.launch.processes) == (1, 1)
    assert (settings_of(one).probe_batch, settings_of(one).batch_ramp) == (False, 0.0)
