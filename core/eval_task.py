"""What `god-miner eval` scores models on: a file that names a task's rows and how they are read.

    {"dataset_type": {...}, "dataset": "rows.json"}         # and where it matters "era", "kl_coefficient"

`dataset_type` as validators send it; `dataset` (or `data`) is looked for beside the file. The task file of
`god-miner run --task` will do: what only a training needs of it is left aside. So will a `run.json` of an
attempt: then the attempt's own data are scored on, which the model may have been trained on.
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
from core.tasks import TASK_TYPE_OF, DatasetType, FileFormat, TaskType


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
            task = cls.model_validate(_rows_of(found, file))
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


#: What a task file says to a training alone.
_OF_TRAINING = {"model", "model_folder", "hours_to_complete", "task_id", "expected_repo_name", "file_format"}


def _rows_of(found: dict[str, Any], file: Path) -> dict[str, Any]:
    kept = {key: value for key, value in found.items() if key not in _OF_TRAINING}
    if "dataset" in kept and "data" not in kept:
        kept["data"] = kept.pop("dataset")
        if found.get("file_format") == FileFormat.HF or str(kept["data"]).startswith(("http://", "https://")):
            rule = "is not on this machine; `eval` scores on a file of rows"
            raise ConfigError(str(file), [Problem("dataset", str(kept["data"]), rule)])
    return kept


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(str(file), [Problem(file.name, "", f"cannot be read as JSON: {error}")]) from None
    if not isinstance(found, dict):
        raise ConfigError(str(file), [Problem(file.name, type(found).__name__, "a JSON object is needed")])
    return found
