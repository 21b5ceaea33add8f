"""What the files beside an entry's weights say of its training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miner.tournament.field.recipes import FieldRecipe, mean_factor, read_recipe
from tests.doubles.field import (
    AXOLOTL_README,
    TRANSFORMERS_README,
    adapter,
    ai_toolkit_config,
    sd_scripts_metadata,
)


def test_ai_toolkits_configuration_and_the_steps_that_were_submitted(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(ai_toolkit_config())
    info = {"training_info": json.dumps({"step": 600, "epoch": 33})}
    (tmp_path / "last.safetensors").write_bytes(adapter(metadata=info))
    found = read_recipe(tmp_path)
    assert (found.trainer, found.steps, found.shipped) == ("ai-toolkit", 700, 600)
    assert (found.batch, found.accumulation, found.lr, found.schedule) == (1, 2, 3e-4, "cosine")
    assert (found.lora_rank, found.lora_alpha, found.dropout) == (24, 12, 0.15)
    assert (found.loss, found.ema, found.resolutions) == ("mae", 0.97, (512, 640))
    assert found.floor == pytest.approx(0.1)
    # The mean of a cosine that falls to a tenth, over the first 6/7 of it: 0.55 + 0.45·sin(6π/7)/(6π/7).
    assert found.rate_sum == pytest.approx(600 * 3e-4 * (0.55 + 0.45 * 0.43388 / 2.69279), rel=1e-3)


def test_what_ai_toolkit_takes_for_granted_is_filled_in(tmp_path: Path) -> None:
    config = ai_toolkit_config(lr_scheduler=None, ema_config=None, loss_type=None, cache_text_embeddings=True)
    (tmp_path / "config.yaml").write_bytes(config)
    found = read_recipe(tmp_path)
    assert (found.schedule, found.loss, found.ema) == ("constant", "mse", 0.0)
    assert found.notes == ("caption dropout has no effect: text embeddings are cached",)


def test_the_metadata_of_sd_scripts(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.safetensors").write_bytes(adapter(48, metadata=sd_scripts_metadata()))
    found = read_recipe(tmp_path)
    assert (found.trainer, found.steps, found.shipped, found.epochs) == ("sd-scripts", 150, 120, 40)
    assert (found.batch, found.accumulation, found.optimizer, found.lr) == (4, 2, "Lion", 6e-5)
    assert (found.lora_rank, found.lora_alpha, found.pictures) == (48, 24, 13)
    assert (found.loss, found.ema, found.resolutions) == ("l2", 0, (1024,))


def test_the_rank_of_the_tensors_counts_where_nothing_says_it(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(adapter(16))
    assert read_recipe(tmp_path) == FieldRecipe(lora_rank=16)


def test_axolotls_configuration_in_the_readme_and_the_adapters(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes(AXOLOTL_README)
    (tmp_path / "adapter_config.json").write_text('{"r": 32, "lora_alpha": 64, "lora_dropout": 0.0}')
    found = read_recipe(tmp_path)
    assert (found.trainer, found.lr, found.batch, found.accumulation) == ("Axolotl", 2e-4, 4, 3)
    assert (found.epochs, found.schedule) == (2, "cosine")
    assert (found.lora_rank, found.lora_alpha) == (64, 128)


def test_the_list_that_transformers_writes(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes(TRANSFORMERS_README)
    found = read_recipe(tmp_path)
    assert (found.lr, found.batch, found.accumulation, found.steps) == (5e-5, 8, 2, 300)
    # A linear fall after ten steps of warm-up: half of all steps.
    assert found.rate_sum == pytest.approx(5e-5 * (5 + 290 / 2), rel=1e-2)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", b"- [" * 5000),
        ("config.yaml", b"config: {process: [{train: {steps: yes, lr: [1], batch_size: -3}}]}"),
        ("config.yaml", b"config: {process: nothing}"),
        ("config.yaml", b"!!python/object/apply:os.system ['true']"),
        ("config.yaml", b"\xff\xfe\x00"),
        ("adapter_config.json", b'{"r": 1e400, "lora_alpha": "NaN"}'),
        ("adapter_config.json", b"[" * 100_000),
        ("README.md", b"- learning_rate: " + b"9" * 5000),
        (
            "config.yaml",
            b"a0: &a0 {x: 1}\n"
            + b"".join(b"a%d: &a%d {<<: [*a%d, *a%d]}\n" % (n, n, n - 1, n - 1) for n in range(1, 60)),
        ),
        ("README.md", b"```yaml\n" * 30_000),
        ("README.md", b"```yaml\n" + b"a: &a [*a]\n" + b"\n```"),
        ("header.json", b'{"ranks": {"x": 1}, "metadata": {"training_info": "[1]"}}'),
    ],
)
def test_files_of_another_shape_say_nothing(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    found = read_recipe(tmp_path)
    assert (found.steps, found.lr, found.lora_rank, found.shipped, found.rate_sum) == (None,) * 5


def test_weights_that_are_none_are_a_note(tmp_path: Path) -> None:
    (tmp_path / "last.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    (note,) = read_recipe(tmp_path).notes
    assert "not a safetensors file" in note


def test_the_mean_of_a_schedule() -> None:
    assert mean_factor("constant", 100, 100) == 1
    assert mean_factor("cosine", 1000, 1000) == pytest.approx(0.5, abs=1e-3)
    assert mean_factor("linear", 1000, 500) == pytest.approx(0.75, abs=1e-3)
    assert mean_factor("constant_with_warmup", 100, 100, warmup=50) == pytest.approx(0.75, abs=0.01)
    assert mean_factor("warmup_stable_decay", 1000, 1000, cooldown=0.2) == pytest.approx(0.9, abs=1e-3)
    assert mean_factor("a schedule of their own", 10, 10) is None
