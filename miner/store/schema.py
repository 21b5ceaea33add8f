"""The tables, typed. Migrations in `migrations/` bring a file to this shape; a test holds the two together.

Times are seconds since the epoch (UTC). Hotkeys are stored in the network's own spelling (prefix 42) so
that one key has one row. Requests are kept raw, as received: a newer validator's extra fields are in there.
"""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, LargeBinary, UniqueConstraint, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    pass


class Offer(Base):
    """An offer as first received; a repeat only moves `last_seen_at` and `times_seen`."""

    __tablename__ = "offers"
    __table_args__ = (
        UniqueConstraint("validator", "task_id"),
        Index("ix_offers_received_at", "received_at"),
        Index("ix_offers_decision_id", "decision_id"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    validator: Mapped[str]
    task_id: Mapped[str]
    task_type: Mapped[str]
    model: Mapped[str]
    params: Mapped[int | None]
    hours: Mapped[float]
    ds_size: Mapped[int | None]
    received_at: Mapped[float]
    last_seen_at: Mapped[float]
    times_seen: Mapped[int] = mapped_column(default=1)
    raw: Mapped[bytes] = mapped_column(LargeBinary)
    #: The decision that stands: the one last sent.
    decision_id: Mapped[int | None]


class Decision(Base):
    """What was decided about an offer, and why, or about a start that no accepted offer went before. Like
    offers share a refusal, which names none of them. It is decided anew when the validator asks again later.
    """

    __tablename__ = "decisions"
    __table_args__ = (
        Index("ix_decisions_offer_id", "offer_id"),
        Index("ix_decisions_job_id", "job_id"),
        Index("ix_decisions_shared", "decided_at", sqlite_where=text("offer_id IS NULL AND job_id IS NULL")),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    offer_id: Mapped[int | None] = mapped_column(ForeignKey("offers.id"))
    job_id: Mapped[int | None] = mapped_column(ForeignKey("jobs.id"))
    accepted: Mapped[bool]
    message: Mapped[str]
    score: Mapped[float | None]
    #: JSON: factor name → value and contribution.
    factors: Mapped[str]
    #: JSON: the verdict of each rule.
    reasons: Mapped[str]
    #: JSON: everything that has no column of its own, such as the placement.
    details: Mapped[str]
    policy: Mapped[str]
    policy_hash: Mapped[str]
    profile_hash: Mapped[str | None]
    decided_at: Mapped[float]


class Reservation(Base):
    """The GPUs and the window that a task has or had: one row for each task. The fleet's memory decides what
    is free; this is what a restart takes up."""

    __tablename__ = "reservations"
    __table_args__ = (Index("ix_reservations_state", "state"), Index("ix_reservations_offer_id", "offer_id"))

    validator: Mapped[str] = mapped_column(primary_key=True)
    task_id: Mapped[str] = mapped_column(primary_key=True)
    #: None: started without an offer.
    offer_id: Mapped[int | None] = mapped_column(ForeignKey("offers.id"))
    state: Mapped[str]
    #: JSON list of GPU ids; empty for a job that has no place yet.
    gpus: Mapped[str]
    starts_at: Mapped[float]
    ends_at: Mapped[float]
    priority: Mapped[float]
    #: Accepted: its window stands. A start that nobody accepted waits in the queue.
    firm: Mapped[bool]
    held_at: Mapped[float]
    #: An offer's place is given up when no start has come by then.
    lapses_at: Mapped[float]


class Job(Base):
    """A started task. One per validator and `task_id`, whatever is repeated."""

    __tablename__ = "jobs"
    __table_args__ = (UniqueConstraint("validator", "task_id"), Index("ix_jobs_state", "state"))

    id: Mapped[int] = mapped_column(primary_key=True)
    task_id: Mapped[str]
    validator: Mapped[str]
    task_type: Mapped[str]
    model: Mapped[str]
    hours: Mapped[float]
    expected_repo_name: Mapped[str | None]
    state: Mapped[str]
    end_reason: Mapped[str | None]
    #: For people: what the end reason came of, or what is being waited for.
    detail: Mapped[str] = mapped_column(default="", server_default="")
    #: Attempts up to this number belong to an earlier life: somebody asked for another try since.
    counted_from: Mapped[int] = mapped_column(default=0, server_default="0")
    ended_at: Mapped[float | None]
    started_at: Mapped[float]
    deadline_at: Mapped[float]
    #: How often the validator has sent the start; the newest one's repository name and deadline count.
    starts: Mapped[int] = mapped_column(default=1)
    request: Mapped[bytes] = mapped_column(LargeBinary)
    submission_repo: Mapped[str | None]
    submission_hash: Mapped[str | None]
    submitted_at: Mapped[float | None]
    #: Changes with every change of the row; a worker that holds an older one may not write.
    lock_token: Mapped[int] = mapped_column(default=1)
    updated_at: Mapped[float]


class Attempt(Base):
    """One try at a job, with its own folder. The row is there before the engine hears of it."""

    __tablename__ = "attempts"
    __table_args__ = (UniqueConstraint("job_id", "number"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[int] = mapped_column(ForeignKey("jobs.id"))
    number: Mapped[int]
    engine: Mapped[str]
    #: The engine-side name, used once for ever.
    key: Mapped[str] = mapped_column(default="", server_default="")
    engine_ref: Mapped[str | None]
    folder: Mapped[str]
    #: JSON list of the ids of the GPUs that it holds.
    gpus: Mapped[str] = mapped_column(default="[]", server_default="[]")
    started_at: Mapped[float]
    #: What the trainer was told: the last save is over by then.
    end_by: Mapped[float | None]
    ended_at: Mapped[float | None]
    end_reason: Mapped[str | None]
    detail: Mapped[str] = mapped_column(default="", server_default="")


class Step(Base):
    """A piece of work on a job, written down before it begins and after it ends."""

    __tablename__ = "steps"
    __table_args__ = (Index("ix_steps_job_id", "job_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[int] = mapped_column(ForeignKey("jobs.id"))
    #: The attempt that it belongs to, where it does.
    attempt: Mapped[int | None]
    name: Mapped[str]
    began_at: Mapped[float]
    ended_at: Mapped[float | None]
    #: "ok", an end reason, or "interrupted": the daemon ended in the middle.
    outcome: Mapped[str | None]
    detail: Mapped[str] = mapped_column(default="", server_default="")


class Lesson(Base):
    """What runs of one shape have taught, for the next plan of that shape."""

    __tablename__ = "lessons"

    shape: Mapped[str] = mapped_column(primary_key=True)
    #: JSON of `core.planning.learned.Learned`.
    learned: Mapped[str]
    updated_at: Mapped[float]


class Event(Base):
    """What happened, in order: the operator's history and the alerts' source."""

    __tablename__ = "events"
    __table_args__ = (Index("ix_events_task_id", "task_id"), Index("ix_events_at", "at"))

    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[float]
    kind: Mapped[str]
    task_id: Mapped[str | None]
    #: JSON.
    data: Mapped[str]


class Nonce(Base):
    """A nonce that was used, until its window has passed for good."""

    __tablename__ = "nonces"
    __table_args__ = (Index("ix_nonces_expires_at", "expires_at"), {"sqlite_with_rowid": False})

    signer: Mapped[bytes] = mapped_column(LargeBinary, primary_key=True)
    nonce: Mapped[str] = mapped_column(primary_key=True)
    expires_at: Mapped[float]
