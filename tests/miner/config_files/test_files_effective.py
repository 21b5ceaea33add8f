from __future__ import annotations

from typing import Any

import yaml

from miner.api.config_files import EffectiveValue
from miner.config_files.files import effective_yaml


def test_values_are_nested_as_in_a_file_each_with_its_origin() -> None:
    rows: list[tuple[str, Any, str]] = [
        ("targets.lora_r", 64, "mine.yaml:3"),
        ("targets.dtype", "bf16", "base.yaml:9"),
        ("limits.gpu_memory", "75GB", "default"),
        ("engine_config.axolotl.a.b", True, "mine.yaml:9"),
        ("rules.blackout", ["Sun 03:00-05:00"], "mine.yaml:10"),
        ("rules.size.<7B", "no: text", "set"),
    ]
    values = [EffectiveValue(path=path, value=value, origin=origin) for path, value, origin in rows]
    text = effective_yaml(values)
    assert yaml.safe_load(text) == {
        "targets": {"lora_r": 64, "dtype": "bf16"},
        "limits": {"gpu_memory": "75GB"},
        "engine_config": {"axolotl": {"a.b": True}},
        "rules": {"blackout": ["Sun 03:00-05:00"], "size": {"<7B": "no: text"}},
    }
    assert text.splitlines()[1].split("  # ") == [f"{'  lora_r: 64':<44}", "mine.yaml:3"]
