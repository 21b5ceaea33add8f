"""Refusals that many like offers share: found by the offers that name them, and by their age"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_index("ix_offers_decision_id", "offers", ["decision_id"], unique=False)
    op.create_index(
        "ix_decisions_shared",
        "decisions",
        ["decided_at"],
        unique=False,
        sqlite_where=sa.text("offer_id IS NULL AND job_id IS NULL"),
    )
