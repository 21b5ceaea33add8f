"""Values beside a conditioning."""

from typing import Any


def conditioning_set_values(conditioning: list[list[Any]], values: dict[str, Any]) -> list[list[Any]]:
    return [[context, {**extras, **values}] for context, extras in conditioning]
