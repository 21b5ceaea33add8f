from __future__ import annotations

from pydantic import Field

from core.config.schema_docs import editor_schema, reference_table
from core.domain.records import Record
from core.domain.selectors import Band, IntegerRange, IntRange
from core.domain.units import Seconds


class Inner(Record):
    """A part of its own."""

    a: int = Field(default=1, ge=1, le=5, description="One | two.")


class Outer(Record):
    wait: Seconds = Field(default=90.0, description="How long.")
    inner: Inner = Field(default=Inner(), description="A part.")
    cycles: IntRange = Field(default=IntegerRange(low=2, high=3), description="How often.")
    sizes: dict[Band, float] = Field(default_factory=dict, description="By size.")
    yes: bool = Field(default=True, description="Or no.")


def test_a_reference_table_has_values_and_defaults() -> None:
    lines = reference_table("outer", "Lead.", Outer).splitlines()
    assert lines[:2] == ["## outer", ""]
    assert "| `wait` | like `90m` | `1.5m` | How long. |" in lines
    assert "| `inner` | mapping | – | A part. |" in lines
    assert any(line.startswith("| `cycles` |") and "| `2-3` |" in line for line in lines)
    assert "| `sizes` | mapping | – | By size. |" in lines
    assert "| `yes` | yes/no | yes | Or no. |" in lines
    assert "| `a` | integer 1–5 | `1` | One \\| two. |" in reference_table("inner", "", Inner)


def test_the_editor_schema_has_no_defaults_that_a_file_cannot_contain() -> None:
    schema = editor_schema(Outer)
    assert schema["$schema"].endswith("2020-12/schema")
    assert all("default" not in about for about in schema["properties"].values())
    assert "default" not in schema["$defs"]["Inner"]["properties"]["a"]
