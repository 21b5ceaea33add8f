"""What benchmarks and scripts import is there: most of them run where no test runs them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("benchmarks", "core", "miner", "scripts", "tests", "trainer")
FILES = sorted(
    path for folder in ("benchmarks", "scripts") for path in (ROOT / folder).rglob("*.py") if path.is_file()
)


def file_of(module: str) -> Path | None:
    place = ROOT.joinpath(*module.split("."))
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


@cache
def names_of(path: Path) -> frozenset[str]:
    """What a module defines, also in an `if` or a `try`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.Import() | ast.ImportFrom():
                names |= {alias.asname or alias.name for alias in node.names}
    return frozenset(names)


def missing(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.ImportFrom) or node.level or node.module is None:
            continue
        if node.module.partition(".")[0] not in PACKAGES:
            continue
        module = file_of(node.module)
        for alias in node.names:
            if file_of(f"{node.module}.{alias.name}"):
                continue
            if module is None or alias.name not in names_of(module):
                yield f"{node.module}.{alias.name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_everything_that_is_imported_exists(path: Path) -> None:
    assert list(missing(path)) == []
