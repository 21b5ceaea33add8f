"""What a task is trained from and scored on: the operator's model and data, or made-up ones."""

from __future__ import annotations

import json
import random
from pathlib import Path

from core.data.rows import BadRows, JsonRows
from miner.engines.docker.client import DockerClient
from miner.tournament.rehearsal import stand_in_worker
from miner.tournament.rehearsal.cache_layout import BadInput
from miner.tournament.rehearsal.container import run_helper
from miner.tournament.rehearsal.options import RehearsalInputs, RehearsalOptions
from miner.tournament.rehearsal.stand_ins import (
    TEST_PROMPTS,
    TEST_ROWS,
    TRAIN_ROWS,
    stand_in_pictures,
    stand_in_rows,
)
from miner.tournament.rules import TournamentTask

#: Of an operator's rows so many are kept for the score, as validators do.
TEST_SHARE, MOST_TEST_ROWS = 0.1, 1000
STATISTICS = "statistics.json"
_WORKER = Path(stand_in_worker.__file__)
_STATISTICS_KINDS = {"InstructTextTask": "instruct", "ChatTask": "instruct", "DpoTask": "dpo"}
_STATISTICS_KINDS |= {"GrpoTask": "grpo", "EnvTask": "env"}


def check_inputs(options: RehearsalOptions) -> None:
    """`BadInput` for a path that is not there, and for a model that cannot be made up."""
    for task in options.tasks:
        given = options.inputs.get(task.name, RehearsalInputs())
        if task.image_type is not None and given.model is None:
            raise BadInput(
                f"there is no stand-in for a model of {task.name}: name one by --model {task.name}=DIRECTORY"
            )
        for path in (given.model, given.data):
            if path is not None and not path.exists():
                raise BadInput(f"{task.name}: {path} is not there")


def training_data(task: TournamentTask, given: RehearsalInputs, folder: Path) -> tuple[Path, Path | None]:
    """What is trained on, and the rows to score on. `folder` gets what is made."""
    if task.image_type is not None:
        if given.data:
            return given.data, None
        target = folder / "pictures.zip"
        target.write_bytes(stand_in_pictures())
        return target, None
    train, test = folder / "train.json", folder / "test.json"
    if given.data is None:
        rows = stand_in_rows(task, TRAIN_ROWS, seed=1)
        # Answers to prompts are generated, token by token.
        kept = stand_in_rows(task, TEST_PROMPTS if task.task_type == "GrpoTask" else TEST_ROWS, seed=2)
    else:
        rows, kept = _split(given.data)
    train.write_text(json.dumps(rows), encoding="utf-8")
    test.write_text(json.dumps(kept), encoding="utf-8")
    return train, test


def make_model_and_statistics(
    client: DockerClient, image: str, task: TournamentTask, given: RehearsalInputs, rows: Path, made: Path
) -> list[str]:
    """For texts, in the image: a tiny model in `made`, if the operator names none, and what validators know
    of model and data. Return what of it is missing."""
    made.mkdir(exist_ok=True)
    seen = {_WORKER: "/worker.py", rows: "/rows.json"}
    model = "/rehearsal/model"
    if given.model is not None:
        seen, model = {**seen, given.model: "/model"}, "/model"
    kind = _STATISTICS_KINDS[str(task.task_type)]
    command = ["python", "/worker.py", kind, "/rows.json", model, f"/rehearsal/{STATISTICS}"]
    code, output = run_helper(client, image, command, made, read_only=seen)
    if code == 0:
        return []
    last = "; ".join(output.strip().splitlines()[-3:])[-500:]
    if given.model is None:
        raise BadInput(f"the image cannot make a model (exit code {code}): name one by --model; {last}")
    return [f"no statistics of model and data: the image cannot make them; {last}"]


def _split(path: Path) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """An operator's rows: those to train on, and those to score on."""
    try:
        with path.open("rb") as file:
            rows = list(JsonRows(file))
    except (OSError, BadRows) as error:
        raise BadInput(f"{path} cannot be read as rows: {error}") from None
    count = min(max(1, int(len(rows) * TEST_SHARE)), MOST_TEST_ROWS)
    random.Random(0).shuffle(rows)  # noqa: S311 - repeatable
    return rows[count:], rows[:count]
