from __future__ import annotations

from pydantic import Field

from core.facts import Record
from core.layers.nearest import Keys
from tests.doubles.each import each


class Leaf(Record):
    colour: str = ""
    weight: float | None = None


class Tree(Record):
    leaf: Leaf = Leaf()
    named: dict[str, Leaf] = Field(default_factory=dict)
    listed: list[Leaf] | None = None


KEYS = Keys(Tree, {"color": "colour", "mass": "weight"}, [(), ("leaf",)])


@each(
    ("path", "said"),
    [
        (("leaf", "wieght"), "no such key; nearest is weight"),
        (("leaf", "color"), "no such key; here it is called colour"),
        (("weight",), "no such key; it belongs under leaf"),
        (("mass",), "no such key; here it is called weight, and it belongs under leaf"),
        (("named", "x", "colur"), "no such key; nearest is colour"),
        (("listed", 0, "colur"), "no such key; nearest is colour"),
        (("leaf", "leaf"), "no such key; it belongs under the top level"),
        (("leaf", "colour", "deep"), "no such key"),
    ],
)
def test_a_stray_key_is_told_what_was_meant(path: tuple[str | int, ...], said: str) -> None:
    assert KEYS.advice(path) == said
