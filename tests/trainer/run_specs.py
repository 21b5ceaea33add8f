"""A run whose files all lie in one folder; it needs nothing of the training stack."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from core.domain.tasks import TaskType
from core.runs.run_files import RunSpec


def run_spec(folder: Path, seconds: float = 60.0, after: float = 20.0, **changes: Any) -> RunSpec:
    """A text run that ends in `seconds`, its deadline `after` that."""
    now = time.time()
    values: dict[str, Any] = {
        "task_id": "77",
        "task_type": TaskType.INSTRUCT,
        "model_id": "org/model",
        "model_path": str(folder / "model"),
        "data_path": str(folder / "rows.json"),
        "work_dir": str(folder / "work"),
        "submission_dir": str(folder / "submission"),
        "progress_path": str(folder / "progress.jsonl"),
        "result_path": str(folder / "result.json"),
        "stop_path": str(folder / "stop"),
        "began_at": now,
        "end_by": now + seconds,
        "deadline_at": now + seconds + after,
    }
    return RunSpec(**{**values, **changes})
