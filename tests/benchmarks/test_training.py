"""The training benchmark's other side is upstream's own configuration, and its verdict is hard to please."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.training import is_best
from benchmarks.upstream import write_config
from core.domain.tasks import (
    ChatDataset,
    DatasetType,
    DpoDataset,
    GrpoDataset,
    InstructDataset,
    RewardFunction,
    TaskType,
)
from core.profile.resolve import load_profile, resolve_profile
from tests.core.builders import llama_8b

ROW = {"instruct": "a", "input": "b", "output": "c", "prompt": "a", "chosen": "b", "rejected": "c"}
REWARD = RewardFunction(reward_func="def f(completions):\n    return [0.0]", reward_weight=2.0)
DATASETS: dict[str, DatasetType] = {
    "instruct": InstructDataset(field_instruction="instruct", field_input="input", field_output="output"),
    "chat": ChatDataset(),
    "dpo": DpoDataset(field_prompt="prompt", field_chosen="chosen", field_rejected="rejected"),
    "grpo": GrpoDataset(field_prompt="prompt", reward_functions=[REWARD, REWARD]),
}


def config(folder: Path, kind: str, *, capped: bool = True) -> dict[str, Any]:
    path = write_config(folder / "run", Path("base"), DATASETS[kind], [ROW], capped=capped, seed=1)
    written: dict[str, Any] = yaml.safe_load(path.read_text())
    return written


@pytest.mark.parametrize("kind", list(DATASETS))
def test_upstreams_own_numbers_are_run(tmp_path: Path, kind: str) -> None:
    written = config(tmp_path, kind)
    assert written["max_steps"] == 10
    assert (written["learning_rate"], written["lora_r"], written["lora_alpha"]) == (2e-4, 8, 16)
    assert (written["micro_batch_size"], written["gradient_accumulation_steps"]) == (
        4 if kind == "grpo" else 2,
        4,
    )
    assert written["num_epochs"] == 1


def test_without_the_cap_nothing_else_changes(tmp_path: Path) -> None:
    capped = config(tmp_path / "1", "instruct")
    free = config(tmp_path / "2", "instruct", capped=False)
    different = {key for key in capped.keys() | free.keys() if capped.get(key) != free.get(key)}
    assert different == {"max_steps", "datasets", "output_dir", "dataset_prepared_path"}


def test_preferences_are_trained_in_chatml_under_the_handlers_names(tmp_path: Path) -> None:
    written = config(tmp_path, "dpo")
    assert (written["rl"], written["datasets"][0]["type"]) == ("dpo", "chatml.default")
    [row] = json.loads(Path(written["datasets"][0]["path"]).read_text())
    assert row == {"question": "a", "chosen": "b", "rejected": "c"}


def test_rewards_lie_in_a_module_with_weights_that_sum_to_one(tmp_path: Path) -> None:
    trl = config(tmp_path, "grpo")["trl"]
    assert trl["reward_funcs"] == ["upstream_rewards.f_0", "upstream_rewards.f_1"]
    assert trl["reward_weights"] == [0.5, 0.5]
    assert trl["num_generations"] == 4
    source = (tmp_path / "run" / "upstream_rewards.py").read_text()
    assert source.count("def f_") == 2


@pytest.mark.parametrize("lower", [True, False])
def test_best_is_better_than_every_other(lower: bool) -> None:
    def trial(**scores: float) -> dict[str, Any]:
        sign = 1 if lower else -1
        return {"lower": lower, "sides": {name: {"score": sign * score} for name, score in scores.items()}}

    assert is_best(trial(base=3, upstream=2, ours=1))
    assert not is_best(trial(base=3, upstream=1, ours=1))
    assert not is_best(trial(base=1, upstream=2, ours=1.5))


def test_our_side_is_the_default_profile_but_for_what_a_cpu_lacks() -> None:
    """Nothing of how a model is trained may differ: rates, batches, schedules, epochs, method."""
    machine = {
        *("lora_kernels", "bf16", "tf32", "attention", "fused_loss", "optimizer"),
        *("dataloader_num_workers", "dataloader_pin_memory"),
    }
    path = Path(__file__).parents[2] / "benchmarks" / "training.yaml"
    for task in (task for task in TaskType if task.is_text):
        ours = resolve_profile(load_profile(str(path)), task, llama_8b()).targets.model_dump()
        shipped = resolve_profile(load_profile("steady"), task, llama_8b()).targets.model_dump()
        assert {key for key in ours if ours[key] != shipped[key]} <= machine
