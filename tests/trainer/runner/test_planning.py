"""A run that plans for itself: for what it sees, in the time that is left, and never refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from core.data.facts import assumed_facts, facts_from_rows
from core.domain.choices import Attention
from core.domain.evaluation import Era
from core.domain.hardware import CPU, GpuSet, Hardware, parse_gpus
from core.domain.tasks import InstructDataset, TaskType
from core.models.facts import ModelFacts
from core.runs.run_files import RunSpec
from tests.trainer.rewards.test_source import task
from tests.trainer.run_specs import run_spec
from trainer.errors import BadModel, UnusableGpu
from trainer.runner import planning
from trainer.runner.planning import make_own_plan, model_facts

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def run_of(folder: Path, hours: float, reserve: float = 300.0, **changes: Any) -> RunSpec:
    values: dict[str, Any] = {
        "model_id": "miner/made-up-name",
        "model_path": str(folder),
        "dataset": InstructDataset(field_instruction="q", field_output="a"),
        "era": Era.TOURNAMENTS,
        "work_dir": str(folder),
    }
    return run_spec(folder, hours * 3600 - reserve, reserve, **{**values, **changes})


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(gpus: str) -> None:
        hardware = Hardware(gpus=parse_gpus(gpus), cpu_cores=24, memory_bytes=200 * 10**9)
        monkeypatch.setattr(planning, "detect_machine", lambda disk: hardware)

    monkeypatch.delenv(planning.PROFILE_VARIABLE, raising=False)
    return put


@pytest.fixture
def llama(tmp_path: Path) -> ModelFacts:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    return model_facts(tmp_path, "miner/made-up-name")


def facts(rows: int = 2000) -> Any:
    records = [{"q": f"what is {number}?", "a": "a number " * 20} for number in range(rows)]
    return facts_from_rows(TaskType.INSTRUCT, records, rows)


def test_it_is_made_for_the_gpus_that_are_visible(on: Any, llama: ModelFacts, tmp_path: Path) -> None:
    on("1xH100")
    plan = make_own_plan(run_of(tmp_path, 1), llama, facts())
    assert (plan.gpus.kind.name, plan.gpus.count) == ("H100-SXM", 1)
    assert plan.profile.name == "steady"
    assert plan.verdict.feasible


def test_all_gpus_of_the_container_are_used_though_one_would_do(
    on: Any, llama: ModelFacts, tmp_path: Path
) -> None:
    on("4xH100")
    plan = make_own_plan(run_of(tmp_path, 1), llama, facts())
    assert (plan.gpus.count, plan.launch.processes) == (4, 4)
    assert plan.steps.total == plan.steps.wanted


def statistics(folder: Path, tokens_s: float) -> str:
    speed = {"tokens_per_sec": tokens_s, "seq_len": 1024, "micro_batch_size": 8}
    path = folder / "stats.json"
    path.write_text(json.dumps({"throughput": {**speed, "gpu_name": "NVIDIA H100 80GB HBM3"}}))
    return str(path)


def test_the_validators_measured_speed_is_the_first_guess_of_a_step(
    on: Any, llama: ModelFacts, tmp_path: Path
) -> None:
    on("1xH100")
    without = make_own_plan(run_of(tmp_path, 1), llama, facts())
    run = run_of(tmp_path, 1, baseline_stats_path=statistics(tmp_path, 20_000.0))
    plan = make_own_plan(run, llama, facts())
    assert plan.time.step_s > 1.2 * without.time.step_s
    assert "20,000 tokens/s" in plan.notes[-1]


def test_statistics_that_cannot_be_read_are_noted_and_change_nothing(
    on: Any, llama: ModelFacts, tmp_path: Path
) -> None:
    on("1xH100")
    run = run_of(tmp_path, 1, baseline_stats_path=str(tmp_path / "missing.json"))
    plan, without = make_own_plan(run, llama, facts()), make_own_plan(run_of(tmp_path, 1), llama, facts())
    assert plan.steps == without.steps
    assert [note for note in plan.notes if "statistics are ignored" in note]


def test_it_fits_into_the_time_that_is_left(on: Any, llama: ModelFacts, tmp_path: Path) -> None:
    on("1xH100")
    short, long = (make_own_plan(run_of(tmp_path, hours), llama, facts(200_000)) for hours in (0.5, 3))
    assert short.steps.total < long.steps.total
    assert short.time.total_s <= 0.5 * 3600
    assert short.time.reserve_s == pytest.approx(300, abs=1)


def test_completions_are_sampled_as_the_tournament_will(on: Any, llama: ModelFacts, tmp_path: Path) -> None:
    on("1xH100")
    dataset, rows = task("def f(completions): return [0.0]"), assumed_facts(TaskType.GRPO, 2000)
    for era, sampling in ((Era.TOURNAMENTS, (1.0, 0)), (Era.OFFERS, (0.9, 50))):
        plan = make_own_plan(
            run_of(tmp_path, 2, task_type=TaskType.GRPO, dataset=dataset, era=era), llama, rows
        )
        assert plan.grpo is not None
        assert (plan.grpo.temperature, plan.grpo.top_k) == sampling


def test_what_looks_infeasible_is_tried_all_the_same(on: Any, llama: ModelFacts, tmp_path: Path) -> None:
    """A tournament counts no submission as a loss: a training that is cut off has one."""
    on("1xH100")
    plan = make_own_plan(run_of(tmp_path, 0.02, reserve=10), llama, facts(200_000))
    assert plan.verdict.feasible
    assert plan.steps.total >= 1
    assert any("tried although it does not look feasible" in note for note in plan.notes)


def test_the_profile_is_the_environments_to_choose(
    on: Any, llama: ModelFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on("1xH100")
    monkeypatch.setenv(planning.PROFILE_VARIABLE, "base")
    assert make_own_plan(run_of(tmp_path, 1), llama, facts()).profile.name == "base"


@pytest.mark.parametrize(
    ("gpus", "installed", "profile", "used"),
    [
        ("1xH100", True, "steady", Attention.FLASH_3),
        ("1xH100", False, "steady", Attention.FLASH_2),
        ("1xA100", True, "steady", Attention.FLASH_2),
        ("1xB200", True, "steady", Attention.FLASH_2),
        ("1xH100", True, "h100x8", Attention.FLASH_2),  # as that profile asks
    ],
)
def test_flash_attention_3_is_taken_on_hopper_where_the_image_has_it(
    gpus: str,
    installed: bool,
    profile: str,
    used: Attention,
    on: Any,
    llama: ModelFacts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on(gpus)
    monkeypatch.setenv(planning.PROFILE_VARIABLE, profile)
    monkeypatch.setattr(planning.importlib.util, "find_spec", lambda name: name if installed else None)
    assert make_own_plan(run_of(tmp_path, 1), llama, facts()).precision.attention is used


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_model_without_a_readable_config_is_bad_input(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(BadModel, match=r"config\.json"):
        model_facts(tmp_path, "org/x")


def test_gpus_that_cannot_be_used_end_the_run_at_once(
    on: Any, llama: ModelFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours on a processor would end without anything; a code other than zero is tried again elsewhere."""
    on("1xcpu")
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(planning, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UnusableGpu, match="nvidia0 cannot be used"):
        make_own_plan(run_of(tmp_path, 1.0), llama, facts())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert make_own_plan(run_of(tmp_path, 1.0), llama, facts()).gpus.is_cpu


GB = 10**9


class Driver(SimpleNamespace):
    """The driver's library with these GPUs: (name, memory, capability)."""

    def __init__(self, *gpus: tuple[str, int, tuple[int, int]]) -> None:
        super().__init__()
        self.gpus, self.closed = gpus, False

    def nvmlInit(self) -> None:
        if not self.gpus:
            raise RuntimeError("Driver Not Loaded")

    def nvmlShutdown(self) -> None:
        self.closed = True

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, at: int) -> int:
        return at

    def nvmlDeviceGetName(self, at: int) -> bytes:
        return self.gpus[at][0].encode()

    def nvmlDeviceGetMemoryInfo(self, at: int) -> Any:
        return SimpleNamespace(total=self.gpus[at][1])

    def nvmlDeviceGetCudaComputeCapability(self, at: int) -> tuple[int, int]:
        return self.gpus[at][2]


H100 = ("NVIDIA H100 80GB HBM3", 85_520_809_984, (9, 0))
T4 = ("Tesla T4", 16_106_127_360, (7, 5))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """No torch, as in an image trainer's own interpreter, and these GPUs."""
    plain = planning.importlib.util.find_spec
    monkeypatch.setattr(
        planning.importlib.util, "find_spec", lambda name: None if name == "torch" else plain(name)
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def put(*gpus: tuple[str, int, tuple[int, int]]) -> Driver:
        library = Driver(*gpus)
        monkeypatch.setitem(sys.modules, "pynvml", library)
        return library

    return put


def test_four_gpus_of_one_kind(driver: Any) -> None:
    library = driver(H100, H100, H100, H100)
    gpus = planning.visible_gpus()
    assert (gpus.kind.name, gpus.count) == ("H100-SXM", 4)
    assert library.closed


def test_of_several_kinds_those_with_the_most_memory_are_used(driver: Any) -> None:
    driver(T4, H100, T4)
    gpus = planning.visible_gpus()
    assert (gpus.kind.name, gpus.count) == ("H100-SXM", 1)


def test_gpus_that_cuda_may_not_use_are_not_counted(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(H100, H100, H100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert planning.visible_gpus().count == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert planning.visible_gpus().is_cpu


def test_without_a_driver_there_is_the_cpu(driver: Any) -> None:
    driver()
    assert planning.visible_gpus().is_cpu


def test_the_disk_is_the_one_that_checkpoints_lie_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "visible_gpus", lambda: GpuSet(kind=CPU, count=1))
    free = {tmp_path: 7 * GB, Path("/"): GB}
    monkeypatch.setattr(planning.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path]))
    assert planning.detect_machine(tmp_path).disk_free_bytes == 7 * GB
