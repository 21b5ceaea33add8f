"""The page about planning names what there is."""

from __future__ import annotations

from pathlib import Path

from core.budget import Refusal
from core.choices import GpuStrategy
from tests.doubles.each import each

PAGE = (Path(__file__).parents[3] / "docs" / "planning.md").read_text(encoding="utf-8")


@each("word", [*Refusal, *GpuStrategy])
def test_every_refusal_and_every_strategy_is_explained(word: str) -> None:
    assert f"| `{word}` |" in PAGE
