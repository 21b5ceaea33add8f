"""Scores folders as long as it gets lines: importing the training stack once for each takes too long.

PYTHON -m tests.miner.tournament.score_server TASK.json BASE: a folder a line on stdin, a verdict a line on
stdout.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from core.domain.errors import GodMinerError
from core.runs.run_files import EvalTask
from trainer.scoring.eval import evaluate


def verdict(task: EvalTask, base: Path, folder: Path) -> str:
    try:
        report = evaluate(task, base, [folder], max_rows=12)
    except GodMinerError as error:
        return f"bad: {error}".replace("\n", " ")
    first, scored = report.models
    if not math.isfinite(scored.score):
        return f"bad: its score is {scored.score}"
    if scored.over_base is None or not (scored.over_base.wins or scored.over_base.mean_gap):
        return "bad: it is the base itself"
    return f"good: {scored.score:.5f}, the base {first.score:.5f}"


if __name__ == "__main__":
    task = EvalTask.read(Path(sys.argv[1]))
    for line in sys.stdin:
        print(verdict(task, Path(sys.argv[2]), Path(line.strip())), flush=True)
