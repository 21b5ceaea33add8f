"""Runs inside the training environment: one seeded training on the CPU, as a daemon starts it.

training-python -m scripts.goldens_losses 'native InstructTextTask full'
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PATIENCE_S = 400.0
TARGETS = {"max_steps": 12, "eval_steps": 4, "save_steps": 4, "learning_rate": 5e-3}
REWARDED = {"grpo_generations": 4, "grpo_max_completion": 16, "micro_batch_size": 4, "max_steps": 4}


def train(folder: Path, engine: str, kind: str, method: str) -> dict[str, Any]:
    """Return what was reported of each step and each evaluation, to five digits."""
    from core.domain.choices import Method
    from core.domain.tasks import TaskType
    from core.runs.progress import EvalEvent, StepEvent, parse_events
    from core.runs.run_files import RunResult
    from tests.trainer.tasks import planned, task, write_profile

    task_type = TaskType(kind)
    parts = {"targets": {"engine": engine, **TARGETS}}
    if task_type.generates:
        parts["sections"] = {"grpo": {"targets": REWARDED}}
    profile = write_profile(folder / "profile.yaml", **parts)
    run = planned(task(folder, task_type, 900.0), profile, method=Method(method))
    (folder / "run.json").write_text(run.to_json(), encoding="utf-8")
    with (folder / "log").open("w") as log:
        done = subprocess.run(
            [sys.executable, "-m", "trainer.text", "--run", str(folder / "run.json")],
            env={**os.environ, "HOME": str(folder), "OMP_NUM_THREADS": "1"},
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE_S,
            check=False,
        )
    if not Path(run.result_path).exists():
        raise RuntimeError((folder / "log").read_text("utf-8", "replace")[-3000:])
    result = RunResult.model_validate_json(Path(run.result_path).read_bytes())
    events = [line.event for line in parse_events(Path(run.progress_path).read_bytes())]
    steps = [event for event in events if isinstance(event, StepEvent)]
    scores = [event.score for event in events if isinstance(event, EvalEvent)]
    return {
        "exit": done.returncode,
        "end": result.end.value,
        "steps": result.steps,
        "loss": [rounded(event.loss) for event in steps],
        "grad_norm": [rounded(event.grad_norm) for event in steps],
        "rate": [rounded(event.lr) for event in steps],
        "held_out": [[score.step, rounded(score.value)] for score in scores],
        "submission": sorted(path.name for path in Path(run.submission_dir).iterdir()),
    }


def rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="goldens-") as made:
        print(json.dumps(train(Path(made), *sys.argv[1].split())))
