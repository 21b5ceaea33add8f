"""The servers under measurement, each a process of its own, and the load generator, another one."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.load_kind import LoadKind
from miner.dev import stack
from miner.dev.stack import VALIDATOR_STAKE

_ROOT = Path(__file__).resolve().parents[1]

#: Limits that a real validator never meets and fifty impatient connections do.
OPEN_LIMITS = {
    "miner.chain.auth.REQUEST_BURST": "1e6",
    "miner.chain.auth.FAILURE_BURST": "1e9",
    # The host of the strategy for eight; more than what fits is refused, as it would be there.
    "GPUS": "8xH100",
    "POLICY": "auto",
    "PROFILE": "auto",
}
QUIET = {"LOG_LEVEL": "WARNING"}


@contextmanager
def ground() -> Iterator[stack.DevStack]:
    """Keys, a nodes file and ports, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="god-miner-bench-") as folder:
        yield stack.prepare_stack(Path(folder))


def reference(on: stack.DevStack, log_level: str = "warning") -> stack.ChildProcess:
    """The stand-in for the reference stack, knowing the same validator."""
    stakes = on.folder / "stakes.json"
    stakes.write_text(json.dumps({on.keys.validator.ss58_address: VALIDATOR_STAKE}), encoding="utf-8")
    return _module("benchmarks.reference_stack", on, str(stakes), log_level)


def bare_server(on: stack.DevStack) -> stack.ChildProcess:
    """Answers without looking."""
    return _module("benchmarks.bare_server", on)


def _module(name: str, on: stack.DevStack, *arguments: str) -> stack.ChildProcess:
    (port,) = stack.free_ports(1)
    command = [sys.executable, "-m", name, str(port), *arguments]
    child = stack.ChildProcess(command, port, on.folder, on.folder / f"{name}.log", {})
    child.environment["PYTHONPATH"] = str(_ROOT)
    return child


def load(
    on: stack.DevStack, port: int, kind: LoadKind, requests: int, concurrency: int = 50, seed: int = 0
) -> dict[str, Any]:
    """Run `python -m benchmarks.load --json` in its own process. Its exit code repeats the report."""
    command = [sys.executable, "-m", "benchmarks.load", "--json"]
    options = {
        "--url": f"http://{stack.LOOPBACK}:{port}",
        "--kind": kind.value,
        "--requests": str(requests),
        "--concurrency": str(concurrency),
        "--seconds": "600",
        "--seed": str(seed),
        "--dir": str(on.folder),
    }
    command += [part for option in options.items() for part in option]
    done = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT, check=False)
    if not done.stdout.startswith("{"):
        raise RuntimeError(f"the load generator said nothing (code {done.returncode}): {done.stderr}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report
