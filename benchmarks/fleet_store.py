"""Size of the store with jobs of a large cluster, written by the daemon's own functions."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from random import Random

from core.domain.decisions import Decision
from core.domain.job_states import EndReason, JobState
from core.domain.keys import GpuReservation, ReservationKind, TaskKey
from core.domain.tasks import TaskType
from core.domain.wire import MinerSubmission
from core.profile.resolve import load_profile
from core.runs.progress import EvalEvent, StepEvent
from core.runs.run_files import HeldOutScore
from miner.dev.samples import SampleTask, sample_task
from miner.fleet.base import FleetSnapshot
from miner.jobs.figures import STORED_POINTS, RunFigures
from miner.offers.decide import decide
from miner.offers.history import SuccessHistory
from miner.offers.past_offers import HistoricalOffer
from miner.offers.policies.load import load_policy
from miner.store import attempts, events, jobs, offers
from miner.store.jobs import StartRequest
from miner.store.offers import ReservationRow

#: What a job does, each step with its row.
_STEPS = ("fetch", "launch", "check", "publish")
_VALIDATOR = "5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY"
_LOGGED_STEPS, _EVALS = 2000, 20


class FleetWriter:
    """Writes offers and the jobs that some of them become, as the daemon would."""

    def __init__(
        self, connection: sqlite3.Connection, fleet: FleetSnapshot, policy: str, profile: str
    ) -> None:
        self._db, self._fleet = connection, fleet
        self._policy, self._profile = load_policy(policy), load_profile(profile)
        self._history, self._draw = SuccessHistory(), Random(11)
        self.offers = self.jobs = 0

    def write(self, wanted: Sequence[HistoricalOffer], jobs_each: int) -> None:
        """Decide this many offers in a row; the first accepted one becomes a job."""
        self._db.execute("BEGIN")
        left = 0
        for historical in wanted:
            left += 1
            decision = decide(
                historical.offer, historical.at, self._fleet, self._history, self._policy, self._profile
            )
            is_job = decision.accepted and left >= jobs_each
            self._offer(historical, decision, is_job)
            if is_job:
                self._job(historical, decision)
                left = 0
            if self.offers % 500 == 0:
                self._db.execute("COMMIT")
                self._db.execute("BEGIN")
        self._db.execute("COMMIT")

    def prune(self, before: float) -> int:
        """Delete what is older, as the daemon does; return the rows."""
        deleted = 0
        while rows := events.prune_history(self._db, before):
            deleted += rows
        return deleted

    def _offer(self, historical: HistoricalOffer, decision: Decision, is_job: bool) -> None:
        offer, now = historical.offer, historical.at
        reservation = self._reservation(offer.task_id, decision, ReservationKind.OFFER) if is_job else None
        received = offers.ReceivedOffer(_VALIDATOR, offer, offer.model_dump_json().encode(), now)
        offers.record_offer(self._db, received, decision, reservation, offers.StandingRule(False, 600.0))
        self.offers += 1

    def _reservation(self, task_id: str, decision: Decision, kind: ReservationKind) -> ReservationRow:
        placement = decision.placement
        assert placement is not None
        hold = GpuReservation(
            TaskKey(_VALIDATOR, task_id), kind, placement.gpus, placement.starts_at, placement.ends_at
        )
        return ReservationRow(hold, True, placement.starts_at + 900)

    def _job(self, historical: HistoricalOffer, decision: Decision) -> None:
        offer, now, db = historical.offer, historical.at + 30, self._db
        task = self._task(TaskType(offer.task_type))
        request = json.dumps({**task.start(), "task_id": offer.task_id}).encode()
        start = StartRequest(
            offer.task_id,
            TaskType(offer.task_type),
            offer.model,
            offer.hours_to_complete,
            "b3c0ac6a-1111-2222-3333-444455556666",
            now,
            request,
        )
        started = offers.record_offered_start(
            db,
            _VALIDATOR,
            start,
            self._reservation(offer.task_id, decision, ReservationKind.JOB),
            now=now,
            decision=None,
            infeasible=None,
        )
        job_id = started.job_id
        row = jobs.get_job(db, job_id)
        row = attempts.set_job_state(db, job_id, row.lock_token, JobState.PREPARING, now)
        for name in _STEPS[:2]:
            self._step(job_id, row.lock_token, name, now)
        assert decision.placement is not None
        key, end = f"{job_id}-1-0123456789abcdef", now + offer.hours_to_complete * 3000
        row = attempts.begin_attempt(
            db,
            job_id,
            row.lock_token,
            now,
            attempts.NewAttempt(
                1,
                "slurm",
                key,
                f"/shared/god-miner/jobs/{job_id}/attempt_1",
                decision.placement.gpus,
                end,
            ),
        )
        attempt = attempts.attempts_of(db, job_id)[0]
        attempts.set_backend_ref(db, attempt.id, key)
        attempts.end_attempt(db, attempt.id, end, EndReason.TRAINED, "all steps are done")
        attempts.save_figures(db, attempt.id, self._figures(now))
        row = attempts.set_job_state(db, job_id, row.lock_token, JobState.PUBLISHING, end)
        for name in _STEPS[2:]:
            self._step(job_id, row.lock_token, name, end)
        published = MinerSubmission(repo=f"miner/{start.expected_repo_name}", model_hash="0" * 64)
        jobs.record_submission(db, TaskKey(_VALIDATOR, offer.task_id), published, end)
        row = jobs.get_job(db, job_id)
        attempts.set_job_state(db, job_id, row.lock_token, JobState.DONE, end, reason=EndReason.PUBLISHED)
        self.jobs += 1

    def _step(self, job_id: int, token: int, name: str, now: float) -> None:
        step = attempts.begin_step(self._db, job_id, token, name, None, now)
        attempts.end_step(self._db, step, "ok", "", now + 30)

    def _task(self, kind: TaskType) -> SampleTask:
        return sample_task(kind, self._draw)

    def _figures(self, now: float) -> attempts.StoredFigures:
        """Make a loss curve of some thousand steps: noisy, so that nothing is thinned away."""
        draw, run = self._draw, RunFigures(None)
        for step in range(1, _LOGGED_STEPS + 1):
            at, loss = now + step * 3.1, 2.1 * math.exp(-step / 900) + draw.gauss(0.9, 0.05)
            run.add(
                StepEvent(
                    t=at,
                    step=step,
                    total=_LOGGED_STEPS,
                    epoch=step / 700,
                    loss=loss,
                    lr=2e-4 * (1 - step / _LOGGED_STEPS),
                    grad_norm=draw.lognormvariate(0, 0.4),
                    tokens_s=draw.gauss(13_000, 300),
                    samples_s=draw.gauss(12, 1),
                    mfu=draw.gauss(0.42, 0.01),
                    memory_bytes=draw.randrange(60 * 10**9, 70 * 10**9),
                    wait=draw.random() / 50,
                )
            )
            if step % (_LOGGED_STEPS // _EVALS) == 0:
                score = HeldOutScore(value=loss, step=step)
                run.add(EvalEvent(t=at, score=score, best=True, seconds=30.0))
        return run.snapshot(seconds=6200.0, points=STORED_POINTS).to_stored()


def size_of(path: Path) -> int:
    return sum(part.stat().st_size for part in path.parent.glob(f"{path.name}*"))
