"""One of the sides that ours is compared with is upstream's own configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.upstream import write_config
from core.domain.tasks import (
    ChatDataset,
    DatasetType,
    DpoDataset,
    GrpoDataset,
    InstructDataset,
    RewardFunction,
)

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


def test_a_full_fine_tune_has_no_adapter_and_a_scaled_rate(tmp_path: Path) -> None:
    path = write_config(
        tmp_path / "run",
        Path("base"),
        DATASETS["instruct"],
        [ROW],
        capped=True,
        seed=1,
        full=True,
        rate_factor=3.0,
    )
    written = yaml.safe_load(path.read_text())
    assert written["learning_rate"] == pytest.approx(6e-4)
    assert not {"adapter", "lora_r", "lora_alpha", "lora_target_linear"} & written.keys()
