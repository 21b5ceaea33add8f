"""The daemon is killed during a submit: the run starts once, or can be started; never twice."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from miner.backends import ownership
from miner.backends.base import AttemptSpec, EndCause
from miner.support.data_id import data_id
from tests.doubles.backend_bench import BackendBench
from tests.doubles.backend_fixtures import bench, kind

__all__ = ["bench", "kind"]


ROOT = Path(__file__).parents[2]
#: No submit takes so many steps.
MOST_STEPS = 100
PAYLOAD = "open('ran', 'a').write('x')"


@pytest.fixture
def daemons(bench: BackendBench) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.doubles.submitter", bench.kind, str(bench.data_dir)]
    where = str(bench.settings.slurm_bin_dir) if bench.kind == "slurm" else bench.settings.docker_host
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([*command, where], cwd=ROOT, text=True, bufsize=1, **pipes) as process:
        yield process


def submitting(daemons: subprocess.Popen[str], spec: AttemptSpec, dies: int) -> int:
    assert daemons.stdin is not None
    assert daemons.stdout is not None
    order = {"key": spec.key, "run_dir": str(spec.run_dir), "argv": spec.argv, "dies": dies}
    daemons.stdin.write(json.dumps(order) + "\n")
    return int(daemons.stdout.readline())


async def started_once(bench: BackendBench, spec: AttemptSpec) -> None:
    known = await bench.again().find(spec.key)
    run = await bench.submit(spec)
    assert known in (None, run.ref)
    status = await bench.end_of(run)
    assert (status.why, run.file("ran")) == (EndCause.OK, "x")
    assert not ownership.marked_processes(ownership.run_mark(data_id(bench.data_dir), spec.key))
    await bench.backend.remove(run.ref)
    run.ref = ""
    assert await bench.backend.list_runs() == []


async def gone(pid: int) -> None:
    async with asyncio.timeout(120):
        with suppress(ProcessLookupError):
            while True:
                os.kill(pid, 0)
                await asyncio.sleep(0.01)


async def test_a_daemon_killed_before_any_step_of_a_submit(
    bench: BackendBench, daemons: subprocess.Popen[str]
) -> None:
    for step in range(1, MOST_STEPS):
        spec = bench.code(PAYLOAD)
        await gone(submitting(daemons, spec, step))
        survived = (spec.run_dir / "submitted").exists()
        await started_once(bench, spec)
        if survived:
            assert step > 3
            return
    pytest.fail(f"a submit takes more than {MOST_STEPS} steps")
