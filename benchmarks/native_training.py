"""Our own trainer against Hugging Face's and Axolotl: the same model, rows, batch, optimizer and steps.

Needs the training environment's Python in GOD_MINER_TRAINING_PYTHON; runs `native_worker.py` there. Rounds
alternate, each with its own seed, medians are compared. No GPU, one thread: what shows is what each spends
around the same kernels. Rows come in random order, which is each trainer's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Report

VARIABLE = "GOD_MINER_TRAINING_PYTHON"
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "AXOLOTL_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
}
WORKER = Path(__file__).with_name("native_worker.py")
SHAPE = {"rows": 1000, "longest": 128, "layers": 2, "width": 64, "micro": 4, "grouped": False}
CASES = {"full": {"method": "full"}, "lora": {"method": "lora"}}


def run(quick: bool) -> Report:
    python = os.environ.get(VARIABLE)
    if not python:
        raise SystemExit(f"{VARIABLE} is not set: run make training and name its python")
    rounds, steps = (1, 60) if quick else (3, 150)
    report = Report(
        title=f"training {steps} steps of a little model on one CPU thread, medians of {rounds} rounds",
        columns=("method", "trainer", "tokens/s", "per CPU second", "ms/step", "held-out loss", "native is"),
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            _case(report, python, Path(folder), name, {**SHAPE, **case, "steps": steps}, rounds)
        for name, more in {"grouped by length": {"grouped": True}, "packed": {"packing": True}}.items():
            what = {**SHAPE, **CASES["full"], "steps": steps, **more}
            found = [
                _one(python, Path(folder) / "packed", "native", {**what, "seed": at}) for at in range(rounds)
            ]
            _row(report, "full", f"native, {name}", found, None)
        loader = _one(python, Path(folder) / "packed", "loader", {**SHAPE, **CASES["full"], "steps": steps})
        report.data["loader"] = loader
    report.notes.append("compared by CPU time, which what else the machine does changes least")
    fastest = max(float(row["tokens_s"]) for rows in report.data["rounds"].values() for row in rows)
    report.notes.append(
        f"the loader alone gives {loader['tokens_s']:,.0f} tokens/s, "
        f"{loader['tokens_s'] / fastest:,.0f} times what the fastest training took"
    )
    return report


def _case(report: Report, python: str, folder: Path, name: str, what: dict[str, Any], rounds: int) -> None:
    found: dict[str, list[dict[str, Any]]] = {"hf": [], "axolotl": [], "native": []}
    for seed in range(rounds):
        for kind, rows in found.items():
            rows.append(_one(python, folder / name, kind, {**what, "seed": seed}))
    ours = median(row["tokens_cpu_s"] for row in found["native"])
    for kind, rows in found.items():
        _row(report, name, kind, rows, None if kind == "native" else ours)


def _row(report: Report, name: str, kind: str, rows: list[dict[str, Any]], ours: float | None) -> None:
    speed = median(row["tokens_cpu_s"] for row in rows)
    losses = [row["held_out"] for row in rows]
    report.data.setdefault("rounds", {})[f"{name} {kind}"] = rows
    report.rows.append(
        (
            name,
            kind,
            f"{median(row['tokens_s'] for row in rows):,.0f}",
            f"{speed:,.0f}",
            f"{median(row['step_ms'] for row in rows):.1f}",
            f"{median(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})",
            "-" if ours is None else f"{ours / speed:.2f}x as fast",
        )
    )


def _one(python: str, folder: Path, kind: str, what: dict[str, Any]) -> dict[str, Any]:
    root = WORKER.parents[1]
    done = subprocess.run(
        [python, str(WORKER), kind, str(folder), json.dumps(what)],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{kind} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
