"""Runs inside the training environment: whole runs as a daemon starts them, and what came of each.

    training-python -m benchmarks.end_to_end_worker '{"cases": [["DpoTask", "qwen", "2 split", "full"], …]}'

One JSON line per case.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from core.domain.choices import Method
from core.domain.tasks import TaskType
from core.runs.run_files import EvalTask, RunResult, RunSpec
from tests.trainer import tiny
from tests.trainer.sharding import VARIABLES, sharded
from tests.trainer.tasks import DATASETS, ROWS, planned, task, write_profile
from trainer.scoring.eval import ModelScore, evaluate

SECONDS, PATIENCE_S = 600.0, 480.0
#: Rows to score on: the run chose its checkpoint by rows of its own.
UNSEEN, UNSEEN_SEED = 128, 1000
#: A few steps are to raise rewards: each sees four prompts eight times. All weights move further than an
#: adapter's at the same rate, and each nat of KL costs half of all that rewards can give.
REWARDED = {
    "grpo_generations": 8,
    "grpo_max_completion": 32,
    "micro_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "max_steps": 40,
}
REWARDED_RATE = {Method.LORA: 5e-3, Method.FULL: 1e-3}


def main(asked: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory(prefix="end-to-end-") as folder:
        models = {kind: tiny.save(Path(folder) / kind, kind) for kind in ("llama", "qwen")}
        for number, (kind, model, processes, method) in enumerate(asked["cases"]):
            place = Path(folder) / str(number)
            found = _case(place, TaskType(kind), str(processes), Method(method), models[model])
            said = {"task": TaskType(kind).name.lower(), "processes": processes, "method": method}
            sys.stdout.write(json.dumps({**said, "model": model, **found}) + "\n")
            sys.stdout.flush()


def _case(folder: Path, kind: TaskType, processes: str, method: Method, model: Path) -> dict[str, Any]:
    count, _, split = processes.partition(" ")
    folder.mkdir()
    rewarded = {"targets": {**REWARDED, "learning_rate": REWARDED_RATE[method]}}
    parts = {"sections": {"grpo": rewarded}} if kind.generates else {}
    profile = write_profile(folder / "profile.yaml", **parts)
    run = task(folder, kind, SECONDS, model=model)
    run = planned(run, profile, processes=int(count), method=method)
    run = sharded(run, whole=True) if split else run
    path = folder / "run.json"
    path.write_text(run.to_json(), encoding="utf-8")
    began = time.monotonic()
    with (folder / "log").open("w") as log:
        done = subprocess.run(
            [sys.executable, "-m", "trainer.text", "--run", str(path)],
            env={**os.environ, "HOME": "/nonexistent", **(VARIABLES if split else {})},
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE_S,
            check=False,
        )
    seconds = time.monotonic() - began
    if not Path(run.result_path).exists():
        raise RuntimeError((folder / "log").read_text("utf-8", "replace")[-3000:])
    result = RunResult.model_validate_json(Path(run.result_path).read_bytes())
    base, ours = _scores(run)
    return {
        "exit": done.returncode,
        "end": result.end.value,
        "steps": result.steps,
        "seconds": seconds,
        "command": (Path(run.work_dir) / "launch-1" / "command.txt").read_text("utf-8"),
        "base": base.score,
        "ours": ours.score,
        "rewards": [base.rewards, ours.rewards],
        "kl": ours.kl,
        "reported": result.best and result.best.value,
        "lower": not kind.generates,
    }


def _scores(run: RunSpec) -> tuple[ModelScore, ModelScore]:
    """Score the base and the submission as `god-miner eval` does, on rows that the run never had."""
    unseen = Path(run.work_dir).with_name("unseen.json")
    unseen.write_text(json.dumps(ROWS[run.task_type](UNSEEN, seed=UNSEEN_SEED)), encoding="utf-8")
    asked = EvalTask(dataset_type=DATASETS[run.task_type], data=str(unseen), era=run.era)
    base, ours = evaluate(asked, Path(run.model_path), [Path(run.submission_dir)], allow_rewards=True).models
    return base, ours


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
