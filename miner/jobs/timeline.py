"""The time limits that a job's worker uses, and the timeline that follows from a deadline."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Self

from core.runs.remedies import MAX_ATTEMPTS
from miner.settings import Settings

#: Largest share of the job's whole time for each part, so that a job of seconds still trains.
MAX_MARGIN_SHARE, MAX_RESERVE_SHARE, MAX_PUBLISH_SHARE, MAX_GRACE_SHARE = 0.25, 0.25, 0.25, 0.125
#: A trainer whose own clock is right has ended by then without being asked.
SLACK_S = 10.0


@dataclass(frozen=True, slots=True)
class JobTimings:
    """Limits and intervals. The defaults are those of a miner; tests have shorter ones."""

    #: Between two reads of a run's files.
    poll_s: float = 1.0
    #: Between two polls of the backend about a run that is going well.
    backend_poll_s: float = 5.0
    #: Between two checks whether the backend answers at all.
    backend_check_s: float = 5.0
    #: The first pause before a retry; it doubles up to the cap.
    pause_s: float = 5.0
    pause_cap_s: float = 120.0
    #: The submission is complete this long before the deadline.
    margin_s: float = 180.0
    #: Time for a training's last save after it was asked to end.
    grace_s: float = 90.0
    #: No step for this many times the median step, and for at least this long, is a standstill.
    stall_factor: float = 20.0
    stall_min_s: float = 600.0
    #: Limit until the first step, and for anything that is not a step: evaluation, saving.
    start_limit_s: float = 3600.0
    #: Between dumping the stacks of a hung training and ending it.
    dump_s: float = 5.0
    #: Least time for a new attempt if there is a model to publish already.
    attempt_needs_s: float = 300.0
    max_attempts: int = MAX_ATTEMPTS
    #: Publish a first model while the training goes on.
    publish_early: bool = True
    #: Uploads while training take at most this share of the time.
    early_share: float = 0.25

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        return cls(
            grace_s=settings.stop_grace_seconds,
            max_attempts=settings.max_attempts,
            publish_early=settings.publish_early,
        )

    def pause(self, failures: int, random: Random) -> float:
        """Seconds to wait after this many failures in a row: doubling, with jitter."""
        span: float = min(self.pause_s * 2 ** min(failures - 1, 20), self.pause_cap_s)
        return span * random.uniform(0.5, 1.0)


@dataclass(frozen=True, slots=True)
class JobTimeline:
    """Moments, seconds since the epoch, in their order."""

    #: The trainer's own deadline: its last save is over by then.
    end_by: float
    #: It is asked to end.
    stop_at: float
    #: It is ended.
    kill_at: float
    #: The submission is complete.
    publish_by: float
    deadline: float


def job_timeline(
    start: float, deadline: float, timings: JobTimings, *, reserve_s: float = 0.0, publish_s: float = 60.0
) -> JobTimeline:
    """Count backwards from the deadline. Each part takes at most its share of the job's whole time."""
    whole = max(deadline - start, 0.0)
    margin = min(timings.margin_s, MAX_MARGIN_SHARE * whole)
    publish = min(publish_s, MAX_PUBLISH_SHARE * whole)
    grace = min(timings.grace_s, MAX_GRACE_SHARE * whole)
    slack = min(SLACK_S, grace / 2)
    reserve = min(reserve_s, MAX_RESERVE_SHARE * whole)
    publish_by = deadline - margin
    kill_at = publish_by - publish
    end_by = min(deadline - reserve - publish, kill_at - grace) - slack
    return JobTimeline(end_by, end_by + slack, kill_at, publish_by, deadline)
