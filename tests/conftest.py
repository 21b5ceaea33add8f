"""What all tests share: the tier of each, and what a fast one must not do."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.doubles import outside, watch
from tests.doubles.required import training_python  # noqa: F401

# The training environment runs the trainer's tests without the daemon's packages.
if importlib.util.find_spec("pydantic_settings") is not None:
    from tests.doubles.backend_fixtures import (  # noqa: F401
        docker_host,
        slurm,
        unread_replies_collected,
    )

ROOT = Path(__file__).parents[1]

#: A test is fast unless it, its file or its folder says otherwise: `pytestmark = pytest.mark.process`.
#: A fast test fails if it starts a process, opens a socket or imports torch.
TIERS = ("process", "docker", "training", "campaign")
FOLDERS = {"integration": "process", "fuzz": "process"}
#: A row of a test of several backends. Only the sandbox of local processes has all of them in `make test`.
DOCKER = re.compile(r"\[(?:[^]]*-)?docker(?:-[^]]*)?\]$")
BACKENDS = "|".join(plugin.parent.name for plugin in ROOT.glob("miner/backends/*/plugin.py"))
OTHER_BACKEND = re.compile(rf"\[({BACKENDS})[]-]")

#: Importing one of these is what makes a test of the trainer's one of the training stack.
STACK = (
    r"(?:torch|numpy|transformers|datasets|axolotl|trl|peft|accelerate|safetensors"
    r"|tests\.trainer\.(?:tiny|native|tasks|axolotl_engine)|trainer\.scoring\.forward)"
)
NEEDS_STACK = re.compile(
    rf"^(?:(?:from|import) {STACK}\b|from tests\.trainer import .*\btiny\b"
    r"|.*importorskip\(\"(?:pyspiel|torch)\"\))",
    re.MULTILINE,
)
TORCH = importlib.util.find_spec("torch") is not None

# A shared machine makes any single example slow once in a while: that is no finding.
settings.register_profile("few", deadline=None, max_examples=15, derandomize=True, database=None)
settings.register_profile("all", deadline=None, max_examples=100, derandomize=True, database=None)
settings.register_profile("campaign", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("GOD_MINER_EXAMPLES", "few"))


def needs_stack(file: Path) -> bool:
    """Whether a file of tests imports the training stack, or the little models made with it."""
    return NEEDS_STACK.search(file.read_text("utf-8")) is not None


def tier_of(item: pytest.Item) -> str:
    for mark in item.iter_markers():  # the test's own, then its file's
        if mark.name in TIERS:
            return "docker" if mark.name == "process" and DOCKER.search(item.nodeid) else mark.name
    folder = item.path.relative_to(ROOT / "tests").parts[0]
    if folder in FOLDERS:
        return "docker" if DOCKER.search(item.nodeid) else FOLDERS[folder]
    return "training" if folder == "trainer" and needs_stack(item.path) else "fast"


def is_thorough(item: pytest.Item) -> bool:
    """Return True for a row of a test that `make test` leaves to `make test-all`."""
    row = item.name.partition("[")[2].removesuffix("]")
    other = OTHER_BACKEND.search(item.name) if item.path.name.startswith("test_backends") else None
    # What keeps hostile code and a crash from doing harm is tried on Docker too.
    if other and (other[1] == "slurm" or item.path.name == "test_backends.py"):
        mark = item.get_closest_marker("every_backend")
        return mark is None or (bool(mark.args) and not row.startswith(mark.args))
    kept, left_out = item.get_closest_marker("kept"), item.get_closest_marker("thorough_rows")
    return (kept is not None and row not in kept.args) or (
        left_out is not None and row.startswith(left_out.args)
    )


def check_rows(items: list[pytest.Item]) -> None:
    """Refuse a row that a marker names and no test has: renamed, it would run at other times unseen."""
    rows: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for item in items:
        for mark in item.iter_markers():
            if mark.name in {"kept", "thorough_rows", "every_backend"} and mark.args:
                test, _, row = item.nodeid.partition("[")
                rows.setdefault((test, mark.args), []).append(row)
    for (test, named), found in rows.items():
        missing = [name for name in named if not any(row.startswith(name) for row in found)]
        if missing:
            raise pytest.UsageError(f"{test}: a marker names the rows {missing}; there are {sorted(found)}")


def pytest_configure(config: pytest.Config) -> None:
    watch.start(config)
    outside.watch()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any("::" in argument for argument in config.args):
        check_rows(items)
    for item in items:
        tier = tier_of(item)
        item.add_marker(tier)
        item.user_properties.append(("tier", tier))
        if is_thorough(item):
            item.add_marker("thorough")
    # Several workers end together when the long ones come first.
    order = {"docker": 0, "training": 1, "process": 2, "campaign": 3, "fast": 4}
    items.sort(key=lambda item: order[dict(item.user_properties)["tier"]])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    found = yield
    if item.get_closest_marker("fast") and outside.reached:
        pytest.fail(
            f"a fast test {', '.join(dict.fromkeys(outside.reached))}: mark it as process (tests/conftest.py)"
        )
    return found


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Half a surrogate pair cannot be sent from a worker; the tests print some."""
    report = yield
    report.sections = [(name, _printable(text)) for name, text in report.sections]
    if report.failed and _printable(report.longreprtext) != report.longreprtext:
        report.longrepr = _printable(report.longreprtext)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    outside.forget()
    return (yield)
