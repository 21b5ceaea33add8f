"""Run the tests: PYTHON scripts/run_tests.py fast|changed|test|all|campaign [TRAINING_PYTHON].

`changed` runs the tests of what differs from the commit BASE (default: the last one).

PYTHON is the daemon's, TRAINING_PYTHON the training environment's. The two suites run side by side in
processes of their own. The end is a table by part, and one line with the totals.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
#: What each command selects, of the tiers in tests/conftest.py.
SELECTED = {
    "fast": "fast",
    "changed": "not campaign and not thorough",
    "test": "not campaign and not thorough",
    "all": "not campaign",
    "campaign": "campaign or hypothesis",
}
EXAMPLES = {"fast": "few", "changed": "few", "test": "few", "all": "all", "campaign": "campaign"}
PARTS = ("fast", "process", "docker", "training", "campaign", "collection")
NO_TRAINING = "no training environment: make training, or GOD_MINER_TRAINING_PYTHON"
NO_AXOLOTL = "training has only what needs no Axolotl, see make training"
NO_TESTS = 5  # pytest's code
REASONS_SHOWN = 12
TRAINING_WORKERS = 2
SLOWEST = "--durations=10"


class Case(NamedTuple):
    part: str
    outcome: str
    reason: str
    seconds: float


def workers() -> int:
    return int(os.environ.get("GOD_MINER_TEST_WORKERS") or min(8, max(2, len(os.sched_getaffinity(0)))))


def daemon_command(which: str, training: str, report: Path, seed: int) -> list[str]:
    selected = SELECTED[which]
    if which != "fast" and not (training and has_axolotl(training)):
        selected = f"({selected}) and {'(small or not training)' if training else 'not training'}"
    command = [sys.executable, "-m", "pytest", "-q", "-m", selected, f"--junitxml={report}", SLOWEST]
    # One more than there are cores, because a test with a process waits half of its time.
    command += ["-n", str(workers() + 1), "--dist", "loadfile", "--no-loadscope-reorder"]
    if which == "changed":
        command += changed_tests()
    return [*command, f"--hypothesis-seed={seed}"] if which == "campaign" else command


@cache
def changed_tests() -> list[str]:
    """Find the tests of what differs from BASE by the mirror; a module without any gets its folder's."""
    git = (
        ["git", "diff", "--name-only", os.environ.get("BASE") or "HEAD"],
        ["git", "ls-files", "-o", "--exclude-standard"],
    )
    names = [
        line for command in git for line in subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    ]
    found: set[str] = set()
    for path in map(Path, names):
        if path.suffix != ".py":
            continue
        folder = path.parent if path.parts[0] == "tests" else Path("tests", path.parent)
        own = path.name if path.name.startswith("test_") else f"test_{path.stem}*.py"
        beside = [file for file in (ROOT / folder).glob(own) if file.is_file()] or [ROOT / folder]
        found |= {str(file.relative_to(ROOT)) for file in beside if file.exists()}
    return sorted(found)


def training_command(which: str, training: str, report: Path, seed: int) -> list[str]:
    """At the lowest priority, because the daemon's tests depend on clocks and these only compute."""
    folder = Path(sys.prefix) / "training-tests"
    command = ["nice", "-n", "19", training, "scripts/training_tests.py", str(folder), "-q", SLOWEST]
    # Whichever part is left alone at the end has use for a second core.
    command += ["--workers", str(TRAINING_WORKERS)]
    # The fast tests run with the daemon's packages already.
    selected = SELECTED[which] if which == "all" else f"training and ({SELECTED[which]})"
    if has_axolotl(training):
        command += ["-m", selected, f"--junitxml={report}", *trainers(which)]
    else:
        command += ["-m", f"small and ({selected})", f"--junitxml={report}", "tests/trainer/native"]
        command += ["tests/trainer/session/test_watchdog_hang.py"]
    return [*command, f"--hypothesis-seed={seed}"] if which == "campaign" else command


def trainers(which: str) -> list[str]:
    if which != "changed":
        return ["tests/trainer"]
    return [test for test in changed_tests() if test.startswith("tests/trainer")]


@cache
def has_axolotl(training: str) -> bool:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('axolotl') is None)"
    return subprocess.run([training, "-c", code], check=False).returncode == 0


def cases(report: Path) -> Iterator[Case]:
    if not report.exists():
        return
    try:
        tree = ET.parse(report)  # noqa: S314 # written by pytest, a moment ago
    except ET.ParseError:  # killed while it wrote
        return
    for case in tree.iter("testcase"):
        kinds = {child.tag: child.get("message") or "" for child in case}
        tiers = [entry.get("value") for entry in case.iter("property") if entry.get("name") == "tier"]
        outcome = (
            "failed" if {"failure", "error"} & set(kinds) else "skipped" if "skipped" in kinds else "passed"
        )
        yield Case(
            tiers[0] if tiers and tiers[0] else "collection",
            outcome,
            kinds.get("skipped", "").removeprefix("Skipped: "),
            float(case.get("time") or 0),
        )


def table(results: list[Case], left_out: dict[str, str]) -> Iterator[str]:
    yield f"{'part':12}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}"
    for part in PARTS:
        mine = [case for case in results if case.part == part]
        counts = Counter(case.outcome for case in mine)
        if part in left_out and not mine:
            yield f"{part:12}  left out: {left_out[part]}"
        elif mine:
            numbers = f"{counts['passed']:8}{counts['failed']:8}{counts['skipped']:9}"
            yield f"{part:12}{numbers}{sum(case.seconds for case in mine):9.0f}"
    reasons = Counter(
        case.reason.splitlines()[0][:66] for case in results if case.outcome == "skipped" and case.reason
    )
    if reasons:
        yield "skipped, and why:"
        yield from (f"{count:8}  {reason}" for reason, count in reasons.most_common(REASONS_SHOWN))


def run(which: str, training: str, folder: Path) -> int:
    seed = int(os.environ.get("GOD_MINER_SEED") or random.randrange(2**31))  # noqa: S311
    environment = {**os.environ, "GOD_MINER_EXAMPLES": EXAMPLES[which]}
    # Without a cache every worker rewrites the asserts of all tests: 15 s of a core each, not 5.
    # With PYTHONDONTWRITEBYTECODE, bytecode goes to the environment's own directory.
    if environment.pop("PYTHONDONTWRITEBYTECODE", ""):
        environment.setdefault("PYTHONPYCACHEPREFIX", str(Path(sys.prefix) / "pycache"))
    if which == "campaign":
        environment |= {
            "GOD_MINER_SEED": str(seed),
            "GOD_MINER_INSTANTS": os.environ.get("GOD_MINER_INSTANTS", "25"),
        }
        show(f"campaign with GOD_MINER_SEED={seed}")
    if training:
        environment["GOD_MINER_TRAINING_PYTHON"] = training
    with_training = bool(training) and which != "fast" and bool(trainers(which))
    if which == "changed" and not changed_tests():
        show("no Python file differs from BASE")
        return 0
    reports, log = [folder / "daemon.xml", folder / "training.xml"], folder / "training.log"
    beside = None
    if with_training:
        with log.open("wb") as file:
            command = training_command(which, training, reports[1], seed)
            beside = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
    try:
        command = daemon_command(which, training, reports[0], seed)
        codes = [wait_for(subprocess.Popen(command, cwd=ROOT, env=environment))]
        if beside is not None:
            show("== the tests in the training environment")
            codes.append(wait_for(beside))
            show(log.read_text(errors="replace"))
    finally:
        if beside is not None and beside.poll() is None:
            beside.terminate()
    results = [case for report in reports for case in cases(report)]
    show("\n".join(table(results, {} if with_training or which == "fast" else {"training": NO_TRAINING})))
    if with_training and not has_axolotl(training):
        show(NO_AXOLOTL)
    counts = Counter(case.outcome for case in results)
    # 1 is pytest's code for failed tests; without any, something else went wrong.
    expected = (0, 1, NO_TESTS) if counts["failed"] else (0, NO_TESTS)
    if ended := [code for code in codes if code not in expected]:
        show(f"ended with {', '.join(map(str, ended))}: see above")
    show(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    lacking = not with_training and which != "fast" and os.environ.get("CI") == "true"
    bad = any(code not in (0, NO_TESTS) for code in codes)
    nothing = not counts["passed"] and which != "changed"
    return int(bool(bad or lacking or counts["failed"] or nothing))


def wait_for(child: subprocess.Popen[bytes]) -> int:
    """Wait for the exit code. Ctrl-C reaches the child too, which gets the time to clean up."""
    try:
        return child.wait()
    except KeyboardInterrupt:
        return child.wait()


def show(text: str) -> None:
    print(text, flush=True)


def main(which: str, training: str = "") -> int:
    with tempfile.TemporaryDirectory() as folder:
        return run(which, training, Path(folder))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:3]))
