from __future__ import annotations

from pydantic import Field

from core.config.problems import SchemaKeys
from core.domain.records import Record
from tests.doubles.each import each


class Leaf(Record):
    colour: str = ""
    weight: float | None = None


class Tree(Record):
    leaf: Leaf = Leaf()
    named: dict[str, Leaf] = Field(default_factory=dict)
    listed: list[Leaf] | None = None


KEYS = SchemaKeys(Tree, {"color": "colour", "mass": "weight"}, [(), ("leaf",)], {"grown"})


@each(
    ("path", "expected"),
    [
        (("leaf", "wieght"), "no such key; nearest is weight"),
        (("leaf", "color"), "no such key; here it is called colour"),
        (("weight",), "no such key; it belongs under leaf"),
        (("mass",), "no such key; here it is called weight, and it belongs under leaf"),
        (("named", "x", "colur"), "no such key; nearest is colour"),
        (("listed", 0, "colur"), "no such key; nearest is colour"),
        (
            ("leaf", "grown"),
            "this key was removed: no shipped profile changed its default, and measurements found no gain",
        ),
        (("leaf", "leaf"), "no such key; it belongs under the top level"),
        (("leaf", "colour", "deep"), "no such key"),
    ],
)
def test_advice_for_an_unknown_key_names_what_was_meant(path: tuple[str | int, ...], expected: str) -> None:
    assert KEYS.advice(path) == expected
