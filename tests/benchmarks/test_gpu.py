"""The GPU's benchmark without a GPU: its parts are pretended, its time is short."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from benchmarks.gpu import run as runs
from benchmarks.gpu.figures import Figure, GpuReport, PartState
from benchmarks.gpu.run import GpuRun, Part
from core.domain.hardware import GPU_KINDS
from core.planning.measured import MeasuredCard
from core.system import wrapper

TRAINING = {
    "engine": "native",
    "step": "rows",
    "method": "lora",
    "compiled": True,
    "checkpointing": False,
    "params": 8_030_000_000,
    "slowness": 0.9,
}
PARTS = [Part(name, 20, "something") for name in ("first", "second", "third")]


class FakeChild:
    """A part's process that has ended as soon as it began."""

    def __init__(self, code: int) -> None:
        self.pid, self.returncode = 0, code

    def poll(self) -> int:
        return self.returncode


def gpu_run(folder: Path, start: Callable[..., Any], seconds: float = 60.0) -> GpuRun:
    (folder / "log").write_text("torch said something\ntorch.OutOfMemoryError: no room\n")
    report = GpuReport(gpu="H100-SXM", date=datetime.date(2026, 12, 1), small=False)
    end = time.monotonic() + seconds
    return GpuRun(folder, folder, report, end, start, GPU_KINDS["H100-SXM"], say=lambda text: None)


def states(run: GpuRun) -> dict[str, str]:
    return {result.name: result.state.value for result in run.results}


def test_a_part_that_fails_costs_itself_alone_and_every_part_is_written_down(tmp_path: Path) -> None:
    seen: list[dict[str, str]] = []

    def start(name: str, root: Path, answers: Path, seconds: float) -> FakeChild:
        written = json.loads((tmp_path / "gpu.json").read_text())
        seen.append({part["name"]: part["state"] for part in written["parts"]})
        lines = [
            {"figure": {"name": f"speed of {name}", "value": 12_000, "plan": 11_500}},
            {"training": TRAINING},
        ]
        answers.write_text("\n".join(map(json.dumps, lines)) + '\n{"figure": {"na')
        return FakeChild(0 if name != "second" else 1)

    run = gpu_run(tmp_path, start)
    run.run(PARTS)
    assert states(run) == {"first": "done", "second": "failed", "third": "done"}
    assert seen == [
        {"first": "waiting", "second": "waiting", "third": "waiting"},
        {"first": "done", "second": "waiting", "third": "waiting"},
        {"first": "done", "second": "failed", "third": "waiting"},
    ]
    assert run.results[1].reason == "exit code 1: torch.OutOfMemoryError: no room"
    assert len(run.results[1].figures) == 1
    table = (tmp_path / "gpu.txt").read_text()
    assert "speed of third" in table
    assert "as planned" in table
    card = MeasuredCard.model_validate(yaml.safe_load((tmp_path / "H100-SXM.yaml").read_text()))
    assert [training.slowness for training in card.trainings] == [0.9, 0.9, 0.9]


def test_parts_without_time_are_left_out_with_the_reason(tmp_path: Path) -> None:
    limits: list[float] = []

    def start(name: str, root: Path, answers: Path, seconds: float) -> FakeChild:
        limits.append(seconds)
        run.end -= 20  # as if it had taken so long
        return FakeChild(0)

    run = gpu_run(tmp_path, start, seconds=45)
    run.run(PARTS)
    assert states(run) == {"first": "done", "second": "done", "third": "skipped"}
    assert limits == [30, pytest.approx(21, abs=1)]
    assert run.results[2].reason == "1 s were left" or run.results[2].reason == "0 s were left"


def test_after_a_request_to_stop_no_part_begins(tmp_path: Path) -> None:
    run = gpu_run(tmp_path, lambda *_: pytest.fail("nothing may begin"))
    run.stopped = True
    run.run(PARTS)
    assert set(states(run).values()) == {"skipped"}


@pytest.mark.parametrize(
    ("figure", "gpu", "verdict"),
    [
        (Figure(name="n", value=100, plan=105), "cpu", "as planned"),
        (Figure(name="n", value=80, plan=100), "cpu", "-20% to plan"),
        (Figure(name="n", value=2, low=1, high=3, bounds_for="H"), "H200", "as calculated"),
        (Figure(name="n", value=4, low=1, high=3, bounds_for="H"), "H100-SXM", "NOT as calculated"),
        (Figure(name="n", value=4, low=1, high=3, bounds_for="H"), "A100-SXM-80GB", ""),
        (Figure(name="n", value=0.5, high=0.02), "cpu", "NOT as calculated"),
        (Figure(name="n", value=0.0, high=0.0), "cpu", "as calculated"),
    ],
)
def test_a_verdict_names_both_expectations(figure: Figure, gpu: str, verdict: str) -> None:
    assert figure.verdict(gpu) == verdict


def test_little_shapes_measure_no_card(tmp_path: Path) -> None:
    report = GpuReport(gpu="H100-SXM", date=datetime.date(2026, 12, 1), small=True)
    report.write(tmp_path)
    assert not list(tmp_path.glob("*.yaml"))
    assert "does not show what the card can do" in (tmp_path / "gpu.txt").read_text()


HANGS = """
import pathlib, subprocess, sys, time
pathlib.Path(sys.argv[1]).write_text('{"figure": {"name": "before it hung", "value": 1}}\\n')
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1] + ".pid").write_text(str(child.pid))
time.sleep(600)
"""


@pytest.mark.process
def test_a_part_that_hangs_is_ended_with_all_it_started_and_keeps_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(name: str, root: Path, answers: Path, seconds: float) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", HANGS, str(answers)])

    class StoppedOnceItWorks(GpuRun):
        """Stopped when the part has started a process of its own."""

        def _write(self, *rest: Any) -> None:
            super()._write(*rest)
            self.stopped = grandchild.exists() or time.monotonic() > patience

    monkeypatch.setattr(runs, "_GRACE_S", 1)
    grandchild, patience = tmp_path / "first.jsonl.pid", time.monotonic() + 60
    run = gpu_run(tmp_path, start)
    run.__class__ = StoppedOnceItWorks
    run.run(PARTS[:1])
    (result,) = run.results
    assert (result.state, result.reason) == (PartState.CUT, "stopped from outside")
    assert [figure.name for figure in result.figures] == ["before it hung"]
    assert int(grandchild.read_text()) not in [process.pid for process in wrapper.processes()]


@pytest.mark.process
def test_a_driver_that_does_not_answer_ends_it_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = tmp_path / "python"
    hangs.write_text("#!/bin/sh\nexec sleep 600\n")
    hangs.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(hangs))
    with pytest.raises(typer.BadParameter, match="did not see the GPU within 0 s"):
        runs.visible_card(0.2)


LEAVES = HANGS.removesuffix("time.sleep(600)\n")


@pytest.mark.process
@pytest.mark.parametrize(("code", "is_full"), [(LEAVES, False), (HANGS, True)])
def test_no_part_leaves_a_process_behind_whatever_ends_it(
    tmp_path: Path, code: str, is_full: bool, adopted: None
) -> None:
    grandchild = tmp_path / "first.jsonl.pid"

    def start(name: str, root: Path, answers: Path, seconds: float) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", code, str(answers)])

    class FullDisk(GpuRun):
        def _write(self, *rest: Any) -> None:
            super()._write(*rest)
            if is_full and grandchild.exists() and grandchild.read_text():
                raise OSError("no space left on device")

    run = gpu_run(tmp_path, start)
    run.__class__ = FullDisk
    with pytest.raises(OSError, match="no space") if is_full else contextlib.nullcontext():
        run.run(PARTS[:1])
    assert int(grandchild.read_text()) not in [process.pid for process in wrapper.processes()]


@pytest.fixture
def adopted() -> Iterator[None]:
    wrapper.adopt_orphans()
    yield
    ctypes.CDLL(None).prctl(wrapper.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


SLOW_TO_END = """
import pathlib, signal, sys, time
def stop(*_):
    time.sleep(0.6)  # longer than subprocess.run waits after Ctrl-C
    pathlib.Path(sys.argv[1]).write_text("the table")
    sys.exit(3)
signal.signal(signal.SIGTERM, stop)
pathlib.Path(sys.argv[1]).write_text("begun")
time.sleep(60)
"""


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_after_ctrl_c_the_command_waits_for_the_table(tmp_path: Path, number: signal.Signals) -> None:
    table = tmp_path / "table"
    code = (
        "import os, sys; from miner.cli.gpu_check import _run_to_its_end; "
        "sys.exit(_run_to_its_end([sys.executable, *sys.argv[1:]], os.environ))"
    )
    command = [sys.executable, "-c", code, "-c", SLOW_TO_END, str(table)]
    with subprocess.Popen(command, cwd=runs.carried.ROOT) as child:
        while not (table.exists() and table.read_text()) and child.poll() is None:
            time.sleep(0.02)
        child.send_signal(number)
        assert child.wait() == 3
    assert table.read_text() == "the table"


@pytest.mark.training
@pytest.mark.thorough
def test_it_runs_to_its_end_on_a_cpu(training_python: str, tmp_path: Path) -> None:
    command = [
        training_python,
        "-m",
        "benchmarks",
        "gpu",
        "--small",
        "--out",
        str(tmp_path),
        "--seconds",
        "1500",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=runs.carried.ROOT)
    report = GpuReport.model_validate_json((tmp_path / "gpu.json").read_bytes())
    failed = {part.name: part.reason for part in report.parts if part.state is not PartState.DONE}
    assert (done.returncode, failed) == (0, {}), (tmp_path / "log").read_text()[-3000:]
    verdicts = {figure.name: figure.verdict(report.gpu) for part in report.parts for figure in part.figures}
    wrong = [name for name, verdict in verdicts.items() if "NOT" in verdict]
    assert wrong == []
    assert {"losses beside the CPU's, at most apart", "dense mask beside rows alone"} <= set(verdicts)
