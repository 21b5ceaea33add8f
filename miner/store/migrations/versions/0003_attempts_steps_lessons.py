"""What running jobs needs: more of attempts and jobs, steps, lessons"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:

    op.create_table(
        "lessons",
        sa.Column("shape", sa.String(), nullable=False),
        sa.Column("learned", sa.String(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("shape"),
    )
    op.create_table(
        "steps",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=True),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("began_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("outcome", sa.String(), nullable=True),
        sa.Column("detail", sa.String(), server_default="", nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"],
            ["jobs.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("steps", schema=None) as batch_op:
        batch_op.create_index("ix_steps_job_id", ["job_id"], unique=False)

    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.add_column(sa.Column("detail", sa.String(), server_default="", nullable=False))
        batch_op.add_column(sa.Column("counted_from", sa.Integer(), server_default="0", nullable=False))
        batch_op.add_column(sa.Column("ended_at", sa.Double(), nullable=True))

    with op.batch_alter_table("attempts", schema=None) as batch_op:
        batch_op.add_column(sa.Column("key", sa.String(), server_default="", nullable=False))
        batch_op.add_column(sa.Column("gpus", sa.String(), server_default="[]", nullable=False))
        batch_op.add_column(sa.Column("end_by", sa.Double(), nullable=True))
        batch_op.add_column(sa.Column("detail", sa.String(), server_default="", nullable=False))
