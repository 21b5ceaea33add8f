"""Plans that follow what a card has shown, from a file made for the purpose: none is shipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from core.data.facts import assumed_facts
from core.domain.choices import Engine, Method
from core.domain.hardware import Hardware, parse_gpus
from core.domain.tasks import TaskType
from core.models.identify import facts_from_name
from core.planning import measured
from core.planning.measured import MeasuredCard, MeasuredTraining, StepKind
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from core.profile.resolve import LoadedProfile, load_profile
from miner.cli.render.plan import _speed

LORA = MeasuredTraining(
    engine=Engine.AXOLOTL,
    step=StepKind.ROWS,
    method=Method.LORA,
    compiled=False,
    checkpointing=True,
    params=8_000_000_000,
    slowness=0.8,
    memory_offset_bytes=2_000_000_000,
)
CARD = MeasuredCard(gpu="H100-SXM", date="2026-12-01", versions={"torch": "2.11.0"}, trainings=(LORA,))  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(measured, "measured_file", lambda gpu: tmp_path / f"{gpu}.yaml")
    measured.measured_card.cache_clear()
    yield tmp_path
    measured.measured_card.cache_clear()


@pytest.fixture(scope="module")
def profile() -> LoadedProfile:
    return load_profile("h100x4")


def made(profile: LoadedProfile, gpus: str = "1xH100", model: str = "org/llama-8B") -> TrainingPlan:
    task, kind = TaskSpec(task_type=TaskType.INSTRUCT, hours=4), TaskType.INSTRUCT
    hardware = Hardware(gpus=parse_gpus(gpus))
    return plan_task(task, facts_from_name(model), assumed_facts(kind, 20_000), hardware, profile)


def test_without_a_file_a_plan_says_that_its_speed_is_a_prior(folder: Path, profile: LoadedProfile) -> None:
    plan = made(profile)
    assert (plan.time.prior, plan.memory["measured"]) == ("a prior", 0)


def test_a_measured_card_replaces_the_prior_and_is_named(folder: Path, profile: LoadedProfile) -> None:
    before = made(profile)
    assert (before.engine, before.method) == (LORA.engine, LORA.method)
    (folder / "H100-SXM.yaml").write_text(CARD.to_yaml())
    measured.measured_card.cache_clear()
    after = made(profile)
    assert after.batch == before.batch
    assert after.time.step_s == pytest.approx(0.8 * before.time.step_s)
    assert after.memory["measured"] == 2_000_000_000
    assert after.memory.total_bytes == before.memory.total_bytes + 2_000_000_000
    assert _speed(after).endswith("(measured on an H100-SXM on 2026-12-01)")
    assert TrainingPlan.from_json(after.to_json()) == after


def test_it_counts_for_no_other_card_and_no_other_size(folder: Path, profile: LoadedProfile) -> None:
    (folder / "H100-SXM.yaml").write_text(CARD.to_yaml())
    for gpus, model in (("1xH200", "org/llama-8B"), ("4xH100", "org/llama-70B"), ("1xH100", "org/llama-1B")):
        assert made(profile, gpus, model).time.prior == "a prior"


@pytest.mark.parametrize(
    "text",
    [
        "gpu: [",
        "gpu: H100-SXM\ndate: 2026-12-01\ntrainings: [{engine: own}]\n",
        "gpu: H100-SXM\ndate: 2026-13-01\n",
        CARD.to_yaml().replace("2000000000", "900000000000"),
    ],
)
def test_a_file_that_cannot_be_read_leaves_the_priors(
    folder: Path, profile: LoadedProfile, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    (folder / "H100-SXM.yaml").write_text(text)
    assert made(profile).time.prior == "a prior"
    assert "H100-SXM.yaml is left out" in caplog.text


def test_of_several_the_nearest_that_recomputes_alike_counts(folder: Path, profile: LoadedProfile) -> None:
    plan = made(profile)
    same = plan.precision.gradient_checkpointing
    rows = [(3_000_000_000, same, 2.0), (8_000_000_000, not same, 3.0), (9_000_000_000, same, 4.0)]
    trainings = tuple(
        LORA.model_copy(update={"params": params, "checkpointing": how, "slowness": slow})
        for params, how, slow in rows
    )
    (folder / "H100-SXM.yaml").write_text(CARD.model_copy(update={"trainings": trainings}).to_yaml())
    measured.measured_card.cache_clear()
    assert measured.measured_slowness(plan.candidate) == 4.0
