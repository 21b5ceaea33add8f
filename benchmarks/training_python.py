"""Workers in the training environment, whose Python is named in GOD_MINER_TRAINING_PYTHON."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VARIABLE = "GOD_MINER_TRAINING_PYTHON"
ROOT = Path(__file__).parents[1]
OFFLINE = (
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "HF_DATASETS_OFFLINE",
    "AXOLOTL_DO_NOT_TRACK",
    "DO_NOT_TRACK",
)


def training_python() -> str:
    python = os.environ.get(VARIABLE)
    if not python:
        raise SystemExit(f"{VARIABLE} is not set: run make training and name its python")
    return python


def reported(module: str, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a worker's output line by line; raise if it ends with an error."""
    more = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    env = {**os.environ, **dict.fromkeys(OFFLINE, "1"), **more}
    with tempfile.TemporaryFile("w+") as errors:
        worker = subprocess.Popen(
            [training_python(), "-m", module, json.dumps(asked)],
            env=env,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert worker.stdout is not None
        try:
            for line in worker.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
        finally:
            worker.stdout.close()
            code = worker.wait()
        if code:
            errors.seek(0)
            raise SystemExit(f"{module} ended with {code}:\n{errors.read()[-3000:]}")
