"""Our picture trainer beside ai-toolkit's recipe, and beside the best state of a training that goes on.

Needs a Python with ComfyUI's packages in GOD_MINER_COMFYUI_PYTHON and a checkout in GOD_MINER_COMFYUI. Small
models of ComfyUI are trained on plain drawings; a cell is a style to adapt one to. Both sides have equal CPU
time, loading included; adapters are scored on unseen pictures by an evaluation that shares no code with the
trainer.

The clock is set as a tournament's: it has about as many steps as an hour of an H100 has (1,200 to 2,850), and
loading takes a few percent of it. The peer has what the field does: a fixed number of steps for each picture,
at a constant rate, of which the checkpoint after the last one counts. It has the better of two rates in
hindsight, and beside it the state at the clock's end, as the field's number may be wrong here: a cell is won
only against the better of all four. With --quick a shorter clock, in which no training comes to its optimum,
and cells to tune with, which the others are not for.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.pictures.cells import FAMILIES, PICTURES, SIDE, PictureCell, WorkOrder
from benchmarks.report import Report

PYTHON, CHECKOUT = "GOD_MINER_COMFYUI_PYTHON", "GOD_MINER_COMFYUI"
ROOT = Path(__file__).parents[2]
ENGINES = ROOT / "scripts" / "real_image_engines"
#: Bases are kept here, since they take longer than anything else.
BASES = ROOT / "benchmarks" / "results" / f"picture_bases_{SIDE}"
#: CPU seconds of a base's training, of both sides', of these with --quick, and of the long run.
BASE_S, SECONDS, SHORT_S, LONG_S = 45.0, 60.0, 30.0, 90.0
#: Added to the numbers of cells to tune with.
TUNING = 100
#: Models as small as these learn at higher rates than real ones. Ours are multiplied by a round number, as
#: the recipe's rate is a guess in a tournament too; the peer, whose usual rate is 1e-4, has two that do well
#: here: at 1e-2 it is hardly better than the base.
SCALE, PEER_RATES = 25.0, (1e-3, 3e-3)
#: Scores nearer than this are a draw.
DRAW = 0.001
#: Of the best state of a long run.
NEAR = 1.01


def run(quick: bool) -> Report:
    python, checkout = (os.environ.get(name) for name in (PYTHON, CHECKOUT))
    if not python or not checkout:
        raise SystemExit(
            f"{PYTHON} and {CHECKOUT} are not set: name a Python with ComfyUI's packages and its checkout"
        )
    seconds = SHORT_S if quick else SECONDS
    report = Report(
        title=f"score on unseen pictures after {seconds:.0f} CPU seconds; lower is better",
        columns=(
            "cell",
            "base",
            "the field's steps",
            "to the clock",
            "ours",
            "gap",
            "verdict",
            "best of a long run",
            "ours to it",
        ),
    )
    with tempfile.TemporaryDirectory() as folder:
        workers = {
            family: _start(python, _order(family, Path(checkout), folder, quick), Path(folder))
            for family in FAMILIES
        }
        rows = [row for family in FAMILIES for row in _finished(workers[family], Path(folder), family)]
    report.data["figures"] = rows
    _judge(report, rows)
    return report


def _order(family: str, checkout: Path, folder: str, quick: bool) -> WorkOrder:
    first = TUNING + 1 if quick else 1
    cells = tuple(PictureCell(family, seed, pictures) for seed, pictures in enumerate(PICTURES, first))
    return WorkOrder(
        family=family,
        cells=cells[:1] if quick else cells,
        checkout=str(checkout),
        folder=folder,
        bases=str(BASES),
        base_s=BASE_S,
        seconds=SHORT_S if quick else SECONDS,
        long_s=0 if quick else LONG_S,
        scale=SCALE,
        peer_rates=PEER_RATES,
    )


def _start(python: str, order: WorkOrder, folder: Path) -> subprocess.Popen[bytes]:
    places = os.pathsep.join((str(ENGINES / "smaller"), str(ENGINES), str(ROOT)))
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "OMP_NUM_THREADS"), "1")
    BASES.mkdir(parents=True, exist_ok=True)
    with (
        (folder / f"{order.family}.out").open("wb") as out,
        (folder / f"{order.family}.log").open("wb") as log,
    ):
        return subprocess.Popen(
            [python, "-m", "benchmarks.pictures.worker", order.write()],
            env={**os.environ, **offline, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": places},
            cwd=ROOT,
            stdout=out,
            stderr=log,
            start_new_session=True,
        )


def _finished(worker: subprocess.Popen[bytes], folder: Path, family: str) -> Iterator[dict[str, Any]]:
    if code := worker.wait():
        raise SystemExit(f"{family} ended with {code}:\n{(folder / f'{family}.log').read_text()[-3000:]}")
    for line in (folder / f"{family}.out").read_text().splitlines():
        if line.startswith("{"):
            yield json.loads(line)


def _judge(report: Report, rows: list[dict[str, Any]]) -> None:
    scores: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["kind"] == "score":
            sides = scores.setdefault(row["cell"], {})
            sides[row["side"]] = min(row["score"], sides.get(row["side"], row["score"]))
    verdicts, near = [], []
    for cell, sides in scores.items():
        gap = min(sides["field"], sides["last"]) / sides["ours"] - 1
        verdicts.append("better" if gap > DRAW else "worse" if gap < -DRAW else "-")
        long = ("-", "-")
        if "long" in sides:
            near.append(sides["ours"] <= NEAR * sides["long"])
            long = (f"{sides['long']:.4f}", f"{sides['ours'] / sides['long'] - 1:+.2%}")
        figures = (f"{sides[side]:.4f}" for side in ("base", "field", "last", "ours"))
        report.rows.append((cell, *figures, f"{gap:+.1%}", verdicts[-1], *long))
    report.notes.append(
        f"better in {verdicts.count('better')} of {len(verdicts)} cells, worse in {verdicts.count('worse')};"
        f" nearer than {DRAW:.1%} is a draw"
    )
    if near:
        report.notes.append(
            f"within {NEAR - 1:.0%} of the best state of a long run in {sum(near)} of {len(near)} cells"
        )
    report.notes.append(f"our rates times {SCALE:g}; the peer's score is the better of those at {PEER_RATES}")
