"""Checking keys and types against an engine's table."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from core.domain.choices import Engine
from core.recipes.schema import EngineTable, check_keys, engine_table, nearest_key, shown_value
from scripts import install, pins
from tests.core.recipes.cases import TORCH
from tests.doubles.each import each

ROOT = Path(__file__).parents[3]
TABLE = EngineTable(
    Engine.AXOLOTL,
    "1.2.3",
    {
        "root": {
            "count": ["int", "null"],
            "rate": ["float"],
            "name": ["str"],
            "flag": ["bool"],
            "mode": [{"choices": ["fast", "slow"]}, "null"],
            "either": ["bool", {"choices": ["auto"]}],
            "names": [{"list": ["str"]}],
            "free": [{"dict": ["any"]}],
            "rows": [{"list": [{"object": "row"}, {"object": "pair"}]}],
        },
        "row": {"path": ["str"], "kind": ["str", {"object": "pair"}]},
        "pair": {"left": ["str"], "right": ["str"]},
    },
    {},
)


def wheres(config: dict[str, Any]) -> list[str]:
    return [problem.where for problem in check_keys(TABLE, "root", config)]


@pytest.mark.parametrize(
    "config",
    [
        {"count": 3, "rate": 1, "name": "x", "flag": True},
        {"count": None, "mode": None, "rate": 0.5},
        {"mode": "fast", "either": "auto", "names": ["a", "b"], "free": {"x": [1, {"y": None}]}},
        {"rows": [{"path": "p", "kind": "k"}, {"path": "p", "kind": {"left": "l"}}, {"left": "a"}]},
    ],
)
def test_valid_keys_and_types_are_accepted(config: dict[str, Any]) -> None:
    assert wheres(config) == []


@each(
    ("config", "where"),
    [
        ({"count": "3"}, "count"),
        ({"count": 3.5}, "count"),
        ({"count": True}, "count"),
        ({"rate": "1e-4"}, "rate"),
        ({"rate": None}, "rate"),
        ({"flag": 1}, "flag"),
        ({"mode": "medium"}, "mode"),
        ({"names": "a"}, "names"),
        ({"names": ["a", 1]}, "names[1]"),
        ({"rows": {"path": "p"}}, "rows"),
        ({"rows": [{"path": "p", "paht": "q"}]}, "rows[0].paht"),
        ({"rows": [{"path": "p"}, {"path": "p", "kind": {"left": 1}}]}, "rows[1].kind.left"),
        ({"unheard": 1}, "unheard"),
    ],
)
def test_an_invalid_value_is_reported_with_its_path(config: dict[str, Any], where: str) -> None:
    assert wheres(config) == [where]


def test_the_message_names_the_value_the_type_and_the_nearest_key() -> None:
    (wrong,) = check_keys(TABLE, "root", {"count": "many"})
    assert str(wrong) == 'count has value "many": axolotl 1.2.3 takes a whole number or nothing here'
    (unknown,) = check_keys(TABLE, "root", {"nmae": "x"})
    assert str(unknown).endswith("silently drop it; the nearest is name")
    (hinted,) = check_keys(TABLE, "root", {"nmae": "x"}, {"nmae": "names"})
    assert str(hinted).endswith("silently drop it; names")


def test_the_nearest_key_has_the_same_beginning() -> None:
    assert nearest_key("lora_rank", ["local_rank", "lora_r", "lora_alpha"]) == "lora_r"
    assert nearest_key("zzz", ["lora_r"]) is None


def test_a_long_value_is_shortened() -> None:
    assert len(shown_value("x" * 1000)) == 80
    assert shown_value(float("inf")) == "Infinity"


def test_keys_can_be_added_to_one_table_without_changing_the_other() -> None:
    more = TABLE.with_keys("root", {"extra": ["int"]})
    assert check_keys(more, "root", {"extra": 1}) == []
    assert wheres({"extra": 1}) == ["extra"]


@pytest.mark.parametrize("engine", [Engine.AXOLOTL, Engine.KOHYA, Engine.AI_TOOLKIT])
def test_every_table_is_complete(engine: Engine) -> None:
    """Each object that a key refers to is there, and each alternative is of a known form."""
    known = engine_table(engine)

    def walk(alternatives: list[Any]) -> None:
        assert alternatives
        for kind in alternatives:
            if isinstance(kind, str):
                assert kind in {"int", "float", "bool", "str", "null", "any"}
            elif "object" in kind:
                assert kind["object"] in known.objects
            elif "choices" in kind:
                assert kind["choices"]
            else:
                walk(kind.get("list") or kind["dict"])

    for fields in known.objects.values():
        for alternatives in fields.values():
            walk(list(alternatives))


def test_every_place_that_names_axolotls_version_agrees() -> None:
    """The places are listed in scripts/engine_tables/README.md."""
    table = engine_table(Engine.AXOLOTL)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    files = [*install.TRAINING["training"], *install.TORCH["CUDA"]]
    locked = {pin.name: pin.version for file in files for pin in pins.read(pins.FOLDER / f"{file}.txt")}
    dockerfile = (ROOT / "dockerfiles" / "standalone-text-trainer.dockerfile").read_text("utf-8")
    tag = re.search(r"BASE_IMAGE=axolotlai/axolotl:(?P<axolotl>[\d.]+)-.*-(?P<torch>[\d.]+)@", dockerfile)
    assert f"axolotl=={table.version}" in extras["training"]
    assert table.version == tag["axolotl"]
    assert table.facts["made_with"].items() <= locked.items()
    assert locked["torch"] == tag["torch"] == TORCH
    for extra in ("demo", "training"):
        assert f"torch=={locked['torch']}" in extras[extra]
