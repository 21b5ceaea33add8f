"""What is written about the project is whole: nothing a user can reach goes unmentioned."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI

from miner.doctor.checks.subnet import WHAT_EARNS
from miner.http import subnet
from miner.http.apps import OPERATOR_ROUTERS, api_page
from scripts import alerts_page, commands_page
from tests.doubles.each import each

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


TEXT = "\n".join(page.read_text() for page in PAGES)
PACKAGES = [name for name in ("core", "miner", "trainer") if (ROOT / name).is_dir()]

#: Broad excepts per thousand lines. Each one must be marked for the linter; only boundaries need them.
MAX_BROAD = 2.5


def _routes() -> list[str]:
    app = FastAPI()
    subnet.add_routes(app)
    paths = [path for _, path, _ in subnet.ROUTES]
    return ["/healthz", *paths, *(route.path for router in OPERATOR_ROUTERS for route in router.routes)]


@each("path", _routes())
def test_every_route_is_described(path: str) -> None:
    assert path in TEXT


@each(
    "name, printed",
    [("commands", commands_page.page), ("alerts", alerts_page.page), ("api", api_page)],
)
def test_a_generated_page_is_what_the_declarations_say(name: str, printed: Callable[[], str]) -> None:
    assert (ROOT / "docs" / f"{name}.md").read_text() == printed(), "run: make docs"


@each("page", [ROOT / "README.md", ROOT / "docs" / "quickstart.md"])
def test_pages_say_what_earns_as_the_doctor_does(page: Path) -> None:
    text = re.sub(r"[*`]|\[([^]]*)\]\([^)]*\)", r"\1", page.read_text())
    assert all(line in " ".join(text.split()) for line in WHAT_EARNS)


@each("page", PAGES)
def test_every_link_between_pages_leads_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not anchor or anchor in _anchors(file), f"{target}#{anchor}"


def _anchors(page: Path) -> set[str]:
    """The headings, as GitHub names them in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each("page", [*PAGES, ROOT / "scripts" / "engine_tables" / "README.md"])
def test_every_file_named_in_a_page_exists(page: Path) -> None:
    for name in re.findall(
        r"`((?:core|miner|trainer|tests|configs|dockerfiles|benchmarks|scripts|docs)/[\w/.-]+)`",
        page.read_text(),
    ):
        assert (ROOT / name).exists(), name


def _mirrored(test: Path) -> bool:
    """`tests/miner/a/test_b.py` tests `miner/a/b`; `test_b_in_parts.py` tests a side of it."""
    folder = ROOT / test.parent.relative_to(ROOT / "tests")
    words = test.stem.removeprefix("test_").split("_")
    names = ["_".join(words[:count]) for count in range(1, len(words) + 1)]
    return any((folder / f"{name}.py").exists() or (folder / name).is_dir() for name in names)


TESTS = [test for name in PACKAGES for test in sorted((ROOT / "tests" / name).rglob("test_*.py"))]


@each("test", TESTS)
def test_every_test_lies_where_what_it_tests_lies(test: Path) -> None:
    assert _mirrored(test)


def _broad(tree: ast.AST) -> int:
    """`except:`, `except Exception`, `except BaseException`, alone or among others."""
    kinds = [node.type for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    names = [ast.unparse(kind) if kind is not None else "BaseException" for kind in kinds]
    return sum(bool(re.search(r"\b(Base)?Exception\b", name)) for name in names)


def test_broad_excepts_stay_few() -> None:
    files = [file for name in PACKAGES for file in (ROOT / name).rglob("*.py")]
    lines = sum(len(file.read_text().splitlines()) for file in files)
    broad = {str(file.relative_to(ROOT)): _broad(ast.parse(file.read_text())) for file in files}
    found = {name: count for name, count in broad.items() if count}
    assert 1000 * sum(found.values()) / lines <= MAX_BROAD, found


def test_broad_excepts_are_found() -> None:
    code = "try: 1\nexcept: 2\ntry: 1\nexcept (OSError, Exception): 2\ntry: 1\nexcept ValueError: 2"
    assert _broad(ast.parse(code)) == 2
