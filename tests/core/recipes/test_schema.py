"""Checking keys and types against an engine's table."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.choices import Engine
from core.recipes.schema import Table, check, nearest, shown, table
from tests.doubles.each import each

TABLE = Table(
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
    return [problem.where for problem in check(TABLE, "root", config)]


@pytest.mark.parametrize(
    "config",
    [
        {"count": 3, "rate": 1, "name": "x", "flag": True},
        {"count": None, "mode": None, "rate": 0.5},
        {"mode": "fast", "either": "auto", "names": ["a", "b"], "free": {"x": [1, {"y": None}]}},
        {"rows": [{"path": "p", "kind": "k"}, {"path": "p", "kind": {"left": "l"}}, {"left": "a"}]},
    ],
)
def test_right_keys_and_types_are_no_problem(config: dict[str, Any]) -> None:
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
def test_a_wrong_one_is_named_where_it_stands(config: dict[str, Any], where: str) -> None:
    assert wheres(config) == [where]


def test_the_message_says_what_is_there_what_belongs_there_and_what_was_meant() -> None:
    (wrong,) = check(TABLE, "root", {"count": "many"})
    assert str(wrong) == 'count has value "many": axolotl 1.2.3 takes a whole number or nothing here'
    (unknown,) = check(TABLE, "root", {"nmae": "x"})
    assert str(unknown).endswith("drop it without a word; the nearest is name")
    (hinted,) = check(TABLE, "root", {"nmae": "x"}, {"nmae": "names"})
    assert str(hinted).endswith("without a word; names")


def test_the_nearest_key_is_one_that_begins_alike() -> None:
    assert nearest("lora_rank", ["local_rank", "lora_r", "lora_alpha"]) == "lora_r"
    assert nearest("zzz", ["lora_r"]) is None


def test_a_long_value_is_cut() -> None:
    assert len(shown("x" * 1000)) == 80
    assert shown(float("inf")) == "Infinity"


def test_keys_can_be_added_to_one_table_without_changing_the_other() -> None:
    more = TABLE.with_keys("root", {"extra": ["int"]})
    assert check(more, "root", {"extra": 1}) == []
    assert wheres({"extra": 1}) == ["extra"]


@pytest.mark.parametrize("engine", [Engine.AXOLOTL, Engine.KOHYA, Engine.AI_TOOLKIT])
def test_every_table_is_whole(engine: Engine) -> None:
    """Each object that a key refers to is there, and each alternative is of a known form."""
    known = table(engine)

    def walk(alternatives: list[Any]) -> None:
        assert alternatives
        for one in alternatives:
            if isinstance(one, str):
                assert one in {"int", "float", "bool", "str", "null", "any"}
            elif "object" in one:
                assert one["object"] in known.objects
            elif "choices" in one:
                assert one["choices"]
            else:
                walk(one.get("list") or one["dict"])

    for fields in known.objects.values():
        for alternatives in fields.values():
            walk(list(alternatives))


def test_the_tables_are_of_a_size_that_says_they_are_complete() -> None:
    kohya = table(Engine.KOHYA).objects
    assert len(kohya["sdxl_train_network"]) == 196
    assert len(kohya["flux_train_network"]) == 215
    assert kohya["sdxl_train_network"].keys() < kohya["flux_train_network"].keys()
    assert len(table(Engine.AXOLOTL).objects["AxolotlInputConfig"]) > 350
    assert len(table(Engine.AI_TOOLKIT).objects["TrainConfig"]) > 100


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=8) | st.sampled_from(list("ab")), inner)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(TABLE.objects["root"])) | st.text(max_size=8), json_values))
def test_nothing_that_json_can_say_ends_in_a_traceback(config: dict[str, Any]) -> None:
    for problem in check(TABLE, "root", config):
        assert problem.rule in str(problem)
