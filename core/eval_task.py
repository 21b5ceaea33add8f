"""What `god-miner eval` scores models on: a file that names a task's rows and how they are read.

    {"dataset_type": {...}, "data": "rows.json"}            # and where it matters "era", "kl_coefficient"

`dataset_type` as validators send it; `data` is looked for beside the file. A `run.json` of an attempt is as
good: then the attempt's own data are scored on, which the model may have been trained on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError

from core.errors import ConfigError, Problem
from core.evaluation import Era
from core.facts import Record
from core.run_files import RunSpec
from core.tasks import TASK_TYPE_OF, DatasetType, TaskType


class EvalTask(Record):
    """Rows, and what an evaluation does with them."""

    dataset_type: DatasetType
    #: A file of rows, or a folder of such.
    data: str = Field(min_length=1)
    era: Era = Era.OFFERS
    kl_coefficient: float | None = Field(default=None, ge=0)

    @property
    def task_type(self) -> TaskType | None:
        """None for what is not scored on rows."""
        return TASK_TYPE_OF.get(self.dataset_type.kind)

    @classmethod
    def read(cls, file: Path) -> Self:
        """`ConfigError` naming what is wrong. The data's path comes out absolute."""
        found = _read(file)
        try:
            if "work_dir" in found:
                return cls._of_run(RunSpec.model_validate(found), file)
            task = cls.model_validate(found)
        except ValidationError as error:
            details = error.errors(include_url=False, include_context=False, include_input=False)
            problems = [
                Problem(".".join(map(str, one["loc"])) or file.name, "", one["msg"]) for one in details
            ]
            raise ConfigError(str(file), problems) from None
        return task.model_copy(update={"data": str((file.parent / task.data).resolve())})

    @classmethod
    def _of_run(cls, spec: RunSpec, file: Path) -> Self:
        if spec.dataset is None:
            rule = "image tasks are scored where their model's engine is installed, see docs/training.md"
            raise ConfigError(str(file), [Problem("task_type", str(spec.task_type), rule)])
        coefficient = spec.kl_coefficient
        return cls(dataset_type=spec.dataset, data=spec.data_path, era=spec.era, kl_coefficient=coefficient)


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(str(file), [Problem(file.name, "", f"cannot be read as JSON: {error}")]) from None
    if not isinstance(found, dict):
        raise ConfigError(str(file), [Problem(file.name, type(found).__name__, "a JSON object is needed")])
    return found
