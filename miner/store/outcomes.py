"""Jobs that have ended, as the history of success wants them. A job ends when its row last changed."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from functools import lru_cache

from core.model_facts import image_facts
from core.model_names import family_from_name, image_type_from_name
from core.models import Family
from core.tasks import ImageModelType, TaskType
from miner.jobs.states import EndReason, JobState
from miner.offers.ask import size_of
from miner.offers.history import Outcome
from miner.offers.policies.words import kinds_of

#: More than this is not looked back on; by then the oldest weigh nothing.
MOST_OUTCOMES = 50_000

#: An operator's cancellation tells nothing of our chances, nor a start that could not be done at all and was
#: never promised. The request is read for pictures alone: it names the image type.
_SELECT = f"""
SELECT jobs.id, jobs.task_type, jobs.model, jobs.state, jobs.updated_at, offers.params,
    CASE WHEN jobs.task_type = '{TaskType.IMAGE}' THEN jobs.request END AS request
FROM jobs
LEFT JOIN offers ON offers.validator = jobs.validator AND offers.task_id = jobs.task_id
LEFT JOIN decisions ON decisions.id = offers.decision_id
WHERE jobs.state IN ('{JobState.DONE}', '{JobState.FAILED}') AND jobs.updated_at >= ?
    AND (jobs.end_reason IS NOT '{EndReason.INFEASIBLE}' OR decisions.accepted)
ORDER BY jobs.updated_at DESC LIMIT ?
"""  # noqa: S608 - our enums


def outcomes(
    connection: sqlite3.Connection, now: float, *, since: float = 0.0, most: int = MOST_OUTCOMES
) -> list[Outcome]:
    """The newest, oldest of them first. What a clock ahead of ours has written counts as of now."""
    rows = connection.execute(_SELECT, (since, most)).fetchall()
    return [one for row in reversed(rows) for one in _outcome(row, now)]


def _outcome(row: sqlite3.Row, now: float) -> Iterator[Outcome]:
    try:
        task_type = TaskType(row["task_type"])
    except ValueError:  # of a version that knew more types
        return
    image_type = _image_type(row) if task_type is TaskType.IMAGE else None
    kind, family, params = _subject(task_type, row["model"], row["params"], image_type)
    yield Outcome(
        job_id=row["id"],
        task_type=task_type,
        kind=kind,
        family=family,
        params=params,
        published=row["state"] == JobState.DONE,
        ended_at=min(row["updated_at"], now),
    )


def _image_type(row: sqlite3.Row) -> ImageModelType:
    try:
        return ImageModelType(json.loads(row["request"])["model_type"])
    except (ValueError, KeyError, TypeError):
        return image_type_from_name(row["model"])


@lru_cache(maxsize=4096)
def _subject(
    task_type: TaskType, model: str, params: int | None, image_type: ImageModelType | None
) -> tuple[str, Family, int | None]:
    """As `understand` sees an offer of it; without the shape of the model, which takes a millisecond."""
    kind = kinds_of(task_type, image_type, model)[0]
    if image_type is not None:
        facts = image_facts(model, image_type)
        return kind, facts.family, facts.params_total
    return kind, family_from_name(model), size_of(model, params).params
