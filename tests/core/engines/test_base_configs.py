"""Every shipped engine template: it parses, and its engine knows every key of it."""

from __future__ import annotations

from typing import Any

from core.domain.choices import Engine
from core.engines.base import load_templates, overlay, template_dir
from core.engines.schema import check_keys, engine_table
from tests.doubles.each import each

FILES = sorted(path.name for path in template_dir().iterdir())


def engine_of(name: str) -> tuple[Engine, str]:
    if name.startswith("axolotl"):
        return Engine.AXOLOTL, engine_table(Engine.AXOLOTL).facts["root"]
    if name.startswith("kohya"):
        roots = engine_table(Engine.KOHYA).facts["roots"]
        return Engine.KOHYA, roots["flux" if "flux" in name else "sdxl"]
    return Engine.AI_TOOLKIT, engine_table(Engine.AI_TOOLKIT).facts["root"]


@each("name", [name for name in FILES if name != "native.yaml"])  # test_native.py's
def test_the_engine_knows_every_key(name: str) -> None:
    engine, root = engine_of(name)
    config = load_templates(name)
    assert config
    assert check_keys(engine_table(engine), root, config) == []


def test_a_template_is_a_new_copy_every_time() -> None:
    first = load_templates("ai_toolkit_krea2.yaml")
    first["config"]["process"][0]["train"]["steps"] = 1
    assert "steps" not in load_templates("ai_toolkit_krea2.yaml")["config"]["process"][0]["train"]


@each(
    ("below", "above", "merged"),
    [
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": 1}, {"a": None}, {}),
        ({"a": {"x": 1, "y": 2}}, {"a": {"y": None, "z": 3}}, {"a": {"x": 1, "z": 3}}),
        ({"a": 1}, {"a": {"x": None, "y": 2}}, {"a": {"y": 2}}),
        ({"a": [1]}, {"a": [2]}, {"a": [2]}),
        ({}, {"a": None}, {}),
    ],
)
def test_the_upper_layer_wins_and_a_null_removes(
    below: dict[str, Any], above: dict[str, Any], merged: dict[str, Any]
) -> None:
    assert overlay(below, above) == merged
