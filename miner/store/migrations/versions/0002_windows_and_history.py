"""GPUs and windows of reservations, several decisions per offer, tasks told apart by their validator"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    # Keys change, which SQLite can't do in place: each table is written anew. Foreign keys are not enforced
    # on this connection, and they name tables, not the copies.
    _decisions()
    _reservations()
    _jobs()
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.create_index("ix_events_at", ["at"], unique=False)


def _decisions() -> None:
    op.create_table(
        "new_decisions",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("offer_id", sa.Integer(), nullable=True),
        sa.Column("job_id", sa.Integer(), nullable=True),
        sa.Column("accepted", sa.Boolean(), nullable=False),
        sa.Column("message", sa.String(), nullable=False),
        sa.Column("score", sa.Double(), nullable=True),
        sa.Column("factors", sa.String(), nullable=False),
        sa.Column("reasons", sa.String(), nullable=False),
        sa.Column("details", sa.String(), nullable=False),
        sa.Column("policy", sa.String(), nullable=False),
        sa.Column("policy_hash", sa.String(), nullable=False),
        sa.Column("profile_hash", sa.String(), nullable=True),
        sa.Column("decided_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["offer_id"],
            ["offers.id"],
        ),
        sa.ForeignKeyConstraint(
            ["job_id"],
            ["jobs.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.execute(
        "INSERT INTO new_decisions (offer_id, accepted, message, score, factors, reasons, details, policy, "
        "policy_hash, profile_hash, decided_at) SELECT offer_id, accepted, message, score, factors, reasons, "
        "'{}', policy, policy_hash, profile_hash, decided_at FROM decisions ORDER BY decided_at"
    )
    op.drop_table("decisions")
    op.rename_table("new_decisions", "decisions")
    op.create_index("ix_decisions_offer_id", "decisions", ["offer_id"], unique=False)
    op.create_index("ix_decisions_job_id", "decisions", ["job_id"], unique=False)
    op.add_column("offers", sa.Column("decision_id", sa.Integer(), nullable=True))
    op.execute("UPDATE offers SET decision_id = (SELECT id FROM decisions WHERE offer_id = offers.id)")


def _reservations() -> None:
    op.create_table(
        "new_reservations",
        sa.Column("validator", sa.String(), nullable=False),
        sa.Column("task_id", sa.String(), nullable=False),
        sa.Column("offer_id", sa.Integer(), nullable=True),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("gpus", sa.String(), nullable=False),
        sa.Column("starts_at", sa.Double(), nullable=False),
        sa.Column("ends_at", sa.Double(), nullable=False),
        sa.Column("priority", sa.Double(), nullable=False),
        sa.Column("firm", sa.Boolean(), nullable=False),
        sa.Column("held_at", sa.Double(), nullable=False),
        sa.Column("lapses_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["offer_id"],
            ["offers.id"],
        ),
        sa.PrimaryKeyConstraint("validator", "task_id"),
    )
    # What was held without GPUs is held on one, for the hours that were offered.
    op.execute(
        "INSERT INTO new_reservations SELECT offers.validator, reservations.task_id, offers.id, state, gpus, "
        "held_at, held_at + 3600 * offers.hours, 0, 1, held_at, lapses_at "
        "FROM reservations JOIN offers ON offers.id = reservations.offer_id"
    )
    op.drop_table("reservations")
    op.rename_table("new_reservations", "reservations")
    op.create_index("ix_reservations_state", "reservations", ["state"], unique=False)
    op.create_index("ix_reservations_offer_id", "reservations", ["offer_id"], unique=False)


def _jobs() -> None:
    op.create_table(
        "new_jobs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("task_id", sa.String(), nullable=False),
        sa.Column("validator", sa.String(), nullable=False),
        sa.Column("task_type", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("hours", sa.Double(), nullable=False),
        sa.Column("expected_repo_name", sa.String(), nullable=True),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("end_reason", sa.String(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("deadline_at", sa.Double(), nullable=False),
        sa.Column("starts", sa.Integer(), nullable=False),
        sa.Column("request", sa.LargeBinary(), nullable=False),
        sa.Column("submission_repo", sa.String(), nullable=True),
        sa.Column("submission_hash", sa.String(), nullable=True),
        sa.Column("submitted_at", sa.Double(), nullable=True),
        sa.Column("lock_token", sa.Integer(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("validator", "task_id"),
    )
    op.execute("INSERT INTO new_jobs SELECT * FROM jobs")
    op.drop_table("jobs")
    op.rename_table("new_jobs", "jobs")
    op.create_index("ix_jobs_state", "jobs", ["state"], unique=False)
