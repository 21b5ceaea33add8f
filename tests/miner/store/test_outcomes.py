from __future__ import annotations

import time
from pathlib import Path

import pytest

from core.models import Family
from core.tasks import TaskType
from miner.jobs.states import EndReason, JobState
from miner.offers.ask import understand
from miner.offers.history import History, Outcome
from miner.store.outcomes import outcomes
from tests.miner.offers.builders import HOUR, NOON, decided, offer, picture_offer, policy
from tests.miner.offers.filled import answer, books, job

LATER = NOON + 100 * HOUR


def test_jobs_that_ended_are_told_oldest_first_with_what_was_offered(tmp_path: Path) -> None:
    with books(tmp_path) as connection:
        second = offer(task_id="b", model="someone/no-size", model_params_count=13 * 10**9)
        answer(connection, second, NOON + HOUR)
        failed = job(connection, second, NOON + HOUR, state=JobState.FAILED, reason=EndReason.OOM)
        done = job(connection, offer(task_id="a"), NOON)
        assert outcomes(connection, LATER) == [
            Outcome(done, TaskType.INSTRUCT, "instruct", Family.LLAMA, 8 * 10**9, True, NOON + HOUR),
            Outcome(
                failed, TaskType.INSTRUCT, "instruct", Family.UNKNOWN, 13 * 10**9, False, NOON + 2 * HOUR
            ),
        ]


@pytest.mark.parametrize(
    "asked",
    [
        offer(),
        offer(model="a/tiny-1b", model_params_count=70 * 10**9),
        offer(model="a/mystery"),
        picture_offer(),
        picture_offer(model="a/stable-diffusion-v1-5"),
    ],
    ids=lambda it: it.model,
)
def test_a_job_is_filed_where_a_decision_looks_for_it(tmp_path: Path, asked: object) -> None:
    assert isinstance(asked, type(offer()))
    ask = understand(asked)
    with books(tmp_path) as connection:
        answer(connection, asked)
        job(connection, asked, request={"model_type": ask.image_type} if ask.image_type else None)
        (found,) = outcomes(connection, LATER)
    assert (found.kind, found.family, found.params) == (ask.kinds[0], ask.model.family, ask.params)
    chances = History([found]).chances(ask.kinds, ask.model.family, ask.params, policy().terms.success, LATER)
    assert min(chances.task.jobs, chances.family.jobs, chances.size.jobs) > 0.5


@pytest.mark.parametrize(
    ("request_body", "kind"),
    [
        ({"model_type": "qwen-image"}, "qwen-image"),
        ({"model_type": "unheard-of"}, "flux"),
        ({}, "flux"),
        ([1], "flux"),
        ("x", "flux"),
    ],
)
def test_a_picture_s_type_is_the_start_s_or_else_the_name_s(
    tmp_path: Path, request_body: object, kind: str
) -> None:
    with books(tmp_path) as connection:
        job(connection, picture_offer(), request=request_body)
        assert [one.kind for one in outcomes(connection, LATER)] == [kind]


def test_what_tells_nothing_of_our_chances_is_left_out(tmp_path: Path) -> None:
    with books(tmp_path) as connection:
        job(connection, offer(task_id="a"), state=JobState.CANCELLED, reason=EndReason.CANCELLED)
        job(connection, offer(task_id="b"), state=JobState.TRAINING)
        job(connection, offer(task_id="c"), state=JobState.FAILED, reason=EndReason.INFEASIBLE)
        refused = offer(task_id="d")
        answer(connection, refused, decision=decided(refused, policy(rules__max_jobs=0)))
        job(connection, refused, state=JobState.FAILED, reason=EndReason.INFEASIBLE)
        assert outcomes(connection, LATER) == []
        answer(connection, offer(task_id="e"))
        promised = job(connection, offer(task_id="e"), state=JobState.FAILED, reason=EndReason.INFEASIBLE)
        assert [one.job_id for one in outcomes(connection, LATER)] == [promised]


def test_only_what_changed_since_is_told_again_and_never_of_the_future(tmp_path: Path) -> None:
    with books(tmp_path) as connection:
        old = job(connection, offer(task_id="a"), NOON)
        new = job(connection, offer(task_id="b"), NOON + 50 * HOUR)
        assert [one.job_id for one in outcomes(connection, LATER, since=NOON + 10 * HOUR)] == [new]
        assert [one.job_id for one in outcomes(connection, LATER, most=1)] == [new]
        early = outcomes(connection, NOON + 2 * HOUR)
        assert [(one.job_id, one.ended_at) for one in early] == [(old, NOON + HOUR), (new, NOON + 2 * HOUR)]


def test_ten_thousand_jobs_are_read_before_the_daemon_s_start_is_late(tmp_path: Path) -> None:
    with books(tmp_path) as connection:
        first = job(connection, offer(task_id="a"))
        connection.execute("BEGIN")
        columns = "validator, task_type, model, hours, state, started_at, deadline_at, starts, request"
        connection.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 10000) "
            f"INSERT INTO jobs (task_id, lock_token, updated_at, {columns}) "
            f"SELECT 'task-' || i, 1, {NOON} + i, {columns.replace('model,', 'model || (i % 500),')} "
            "FROM jobs, n WHERE id = ?",
            (first,),
        )
        connection.execute("COMMIT")
        began = time.process_time()
        history = History(outcomes(connection, LATER))
        assert len(history) == 10_001
        # Bounds are wide: this machine may be a slow one. It is a fifth of a second on an ordinary one.
        assert time.process_time() - began < 3
