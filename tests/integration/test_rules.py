"""A real training on the CPU whose GPU is the NVML stub's: it fills up, and a rule makes passes smaller."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from core.domain.choices import Engine
from core.domain.tasks import TaskType
from core.planning.plan import TrainingPlan
from core.runs.progress import ControlEvent, StepEvent, parse_events
from core.runs.run_files import LOG_FILE
from miner.dev import demo, demo_inputs
from miner.dev.demo_inputs import LoopbackSite
from miner.dev.samples import SampleTask
from miner.store import alerts as store_alerts
from miner.store.actions import ActionOutcome, ActionRow, actions_of_job
from miner.store.alerts import AlertRow
from miner.support import background
from tests.doubles.nvml import NvmlHost, compiled
from tests.miner.http.daemon_in_process import DaemonInProcess, open_daemon

pytestmark = [pytest.mark.training, pytest.mark.small]

#: Importing the stack on a busy machine takes minutes; below what `tests.doubles.watch` gives a test.
LIMIT_S = 800.0
TOTAL_MIB = 1000
#: The newest value counts, however long a busy machine takes for the next one. An action is judged
#: when the test says so, and not by the speed.
RULES = """
rules:
  gpu-memory: {{for: 0s, when: {{stat: last, over: 10s}}, act: {{settle: {settle}, worse: 1.0}}}}
  gpu-hot: {{off: true}}
  slow-training: {{off: true}}
"""
#: Of the demo's, so long that it goes on while the rule works.
PROFILES = {
    "native": """
extends: cpu-native
targets: {max_steps: 20000, num_epochs: 1000, eval_steps: 200, learning_rate: 1e-3}
limits: {max_steps: 20000}
""",
    # As for flash attention, all sequences of a micro-batch in one row.
    "packed": """
extends: cpu-demo
targets: {engine: axolotl, sample_packing: true, sequence_len: 128, micro_batch_size: 4,
  gradient_accumulation_steps: 2, max_steps: 20000, num_epochs: 1000, eval_steps: 200, learning_rate: 1e-3}
limits: {max_steps: 20000, max_epochs: 1000}
engine_config: {axolotl: {multipack_real_batches: false}}
""",
}


@dataclass
class PlayedJob:
    daemon: DaemonInProcess
    host: NvmlHost
    job: int
    #: Of `PROFILES`.
    profile: str

    async def fill(self, share: float) -> None:
        """Until it is measured."""
        self.host.gpu(0, used_mib=round(TOTAL_MIB * share))
        samples = self.daemon.daemon.samples
        await self.until(lambda: (sample := samples.latest("cpu")) and sample.memory_share == share)

    def judge_after(self, settle: str) -> None:
        (self.daemon.daemon.settings.data_dir / "alerts.yaml").write_text(RULES.format(settle=settle))

    async def until(self, holds: Callable[[], object]) -> None:
        try:
            async with asyncio.timeout(LIMIT_S):
                while not holds():
                    await asyncio.sleep(0.2)
        except TimeoutError:
            live, samples = self.daemon.daemon.live(self.job), self.daemon.daemon.samples.latest("cpu")
            raise AssertionError(f"{live}\n{samples}\n{self.actions()}\n{self.alerts()}") from None

    @property
    def step(self) -> int:
        live = self.daemon.daemon.live(self.job)
        return (live.step if live else None) or 0

    def actions(self) -> list[ActionRow]:
        return self.daemon.daemon.store.read_now(actions_of_job, self.job)

    def alerts(self) -> list[AlertRow]:
        rows = self.daemon.daemon.store.read_now(store_alerts.newest_alerts, 20)
        return [row for row in rows if row.rule == "gpu-memory"]

    def events(self) -> list[Any]:
        return [line.event for line in parse_events(self.file("progress.jsonl")) if line.event]

    def file(self, name: str) -> bytes:
        return (self.daemon.daemon.settings.data_dir / f"jobs/{self.job}/attempt_1" / name).read_bytes()


@pytest.fixture
async def played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, training_python: str
) -> AsyncIterator[PlayedJob]:
    host = NvmlHost(compiled(tmp_path), tmp_path / "nvml.json", 1)
    host.gpu(0, uuid="cpu", total_mib=TOTAL_MIB, used_mib=500)
    for name, value in host.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(background, "ROUND_SECONDS", 0.25)
    monkeypatch.setattr(demo, "PATIENCE_S", LIMIT_S)
    data_dir = tmp_path / "data"
    (data_dir / "profiles").mkdir(parents=True)
    (data_dir / "profiles" / "long.yaml").write_text(PROFILES[request.param])
    (data_dir / "alerts.yaml").write_text(RULES.format(settle="1h"))
    with LoopbackSite() as site:
        site.add_model(demo_inputs.MODEL_ID, demo_inputs.model_files())
        settings = {
            "GPUS": "cpu",
            "PROFILE": "long",
            "BACKEND": "process",
            "TRAINER_PYTHON": training_python,
            "TRAINER_SANDBOX": "off",
            "HUB": f"local:{tmp_path / 'hub'}",
            "HF_ENDPOINT": site.url,
            "ALLOW_PRIVATE_NETWORKS": "127.0.0.0/8",
            "MIN_FREE_DISK_BYTES": "0",
            "miner.backends.build_fleet.SAMPLE_SECONDS": "1",
        }
        async with open_daemon(tmp_path, **settings) as daemon:
            # Before that the plan takes another engine, which begins a minute later.
            assert await demo.wait_for_trial(daemon.operator) is None
            task = SampleTask(
                task_type=TaskType.INSTRUCT,
                task_id=str(uuid.uuid4()),
                model=demo_inputs.MODEL_ID,
                params=demo_inputs.model_params(),
                hours=0.5,
                ds_size=None,
                expected_repo_name="played",
                data_url=site.add_file("/rows.json", demo_inputs.training_rows()),
                dataset_type={"field_instruction": "instruct", "field_output": "output"},
            )
            reply = await daemon.start(task)
            assert reply.status_code == 200, reply.text
            (row,) = daemon.rows("SELECT id FROM jobs")
            yield PlayedJob(daemon, host, row["id"], request.param)
            await daemon.daemon.running_jobs.cancel(row["id"])
            await daemon.daemon.running_jobs.wait_until_over(row["id"])


@pytest.mark.thorough
@pytest.mark.parametrize("played", PROFILES, indirect=True)
async def test_a_gpu_that_fills_gets_smaller_passes_and_the_loss_goes_on(played: PlayedJob) -> None:
    await played.until(lambda: played.step >= 20)
    assert played.actions() == []
    await played.fill(0.95)
    await played.until(
        lambda: bool(played.actions()) and played.actions()[0].outcome is ActionOutcome.APPLIED
    )
    assert [alert.resolved_at for alert in played.alerts()] == [None]
    await played.fill(0.8)
    played.judge_after("1s")
    await played.until(lambda: played.actions()[0].outcome is ActionOutcome.KEPT)
    await played.until(lambda: played.alerts()[0].resolved_at is not None)
    (action,) = played.actions()
    assert action.detail.startswith("it helped")
    assert action.after["micro"] < action.before["micro"]
    plan = TrainingPlan.from_json(played.file("plan.json"))
    engine = Engine.AXOLOTL if played.profile == "packed" else Engine.NATIVE
    assert (plan.engine, plan.sequence.packing) == (engine, played.profile == "packed")

    assert (
        played.daemon.metric(f'god_miner_training_step{{job_id="{played.job}",task_type="InstructTextTask"}}')
        > 0
    )
    at = played.step
    await played.until(lambda: played.step >= at + 20)
    events = played.events()
    (answer,) = [event for event in events if isinstance(event, ControlEvent)]
    assert (answer.applied, answer.micro) == (True, action.after["micro"])
    place = events.index(answer)
    before, after = (
        [event for event in part if isinstance(event, StepEvent)] for part in (events[:place], events[place:])
    )
    assert [event.step for event in before + after] == sorted({event.step for event in before + after})
    losses = [[event.loss for event in part if event.loss is not None] for part in (before, after)]
    assert max(losses[1]) < 1.2 * max(losses[0])  # the same training goes on, its optimizer with it
    assert len(played.daemon.rows("SELECT id FROM attempts")) == 1

    # What happens is in the job's log too, as lines and not as bars.
    log = played.file(LOG_FILE).decode()
    assert f"control: {answer.text}\n" in log
    assert re.search(r"^step [\d,]+/[\d,]+  loss \d\.\d{4}  lr ", log, re.MULTILINE)
    assert not re.search(r"\d+%\|", log)
