"""Every shipped engine template: it parses, and its engine knows every key of it."""

from __future__ import annotations

from typing import Any

from core.domain.choices import Engine
from core.recipes.base import load_templates, overlay, template_dir
from core.recipes.schema import EngineTable, check_keys, engine_table
from tests.doubles.each import each

AXOLOTL, KOHYA, AI_TOOLKIT = (
    engine_table(engine) for engine in (Engine.AXOLOTL, Engine.KOHYA, Engine.AI_TOOLKIT)
)


def table_of(name: str) -> tuple[EngineTable, str]:
    if name.startswith("axolotl"):
        return AXOLOTL, AXOLOTL.facts["root"]
    if name.startswith("kohya"):
        return KOHYA, KOHYA.facts["roots"]["flux" if "flux" in name else "sdxl"]
    return AI_TOOLKIT, AI_TOOLKIT.facts["root"]


@each("name", sorted({path.name for path in template_dir().iterdir()} - {"native.yaml"}))  # test_native.py's
def test_the_engine_knows_every_key(name: str) -> None:
    table, root = table_of(name)
    config = load_templates(name)
    assert config
    assert check_keys(table, root, config) == []


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
