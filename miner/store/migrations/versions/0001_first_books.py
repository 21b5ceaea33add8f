"""The first books: offers, decisions, reservations, jobs, attempts, events, nonces"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = '0001'
down_revision = None


def upgrade() -> None:

    op.create_table('events',
    sa.Column('id', sa.Integer(), nullable=False),
    sa.Column('at', sa.Double(), nullable=False),
    sa.Column('kind', sa.String(), nullable=False),
    sa.Column('task_id', sa.String(), nullable=True),
    sa.Column('data', sa.String(), nullable=False),
    sa.PrimaryKeyConstraint('id')
    )
    with op.batch_alter_table('events', schema=None) as batch_op:
        batch_op.create_index('ix_events_task_id', ['task_id'], unique=False)

    op.create_table('jobs',
    sa.Column('id', sa.Integer(), nullable=False),
    sa.Column('task_id', sa.String(), nullable=False),
    sa.Column('validator', sa.String(), nullable=False),
    sa.Column('task_type', sa.String(), nullable=False),
    sa.Column('model', sa.String(), nullable=False),
    sa.Column('hours', sa.Double(), nullable=False),
    sa.Column('expected_repo_name', sa.String(), nullable=True),
    sa.Column('state', sa.String(), nullable=False),
    sa.Column('end_reason', sa.String(), nullable=True),
    sa.Column('started_at', sa.Double(), nullable=False),
    sa.Column('deadline_at', sa.Double(), nullable=False),
    sa.Column('starts', sa.Integer(), nullable=False),
    sa.Column('request', sa.LargeBinary(), nullable=False),
    sa.Column('submission_repo', sa.String(), nullable=True),
    sa.Column('submission_hash', sa.String(), nullable=True),
    sa.Column('submitted_at', sa.Double(), nullable=True),
    sa.Column('lock_token', sa.Integer(), nullable=False),
    sa.Column('updated_at', sa.Double(), nullable=False),
    sa.PrimaryKeyConstraint('id'),
    sa.UniqueConstraint('task_id')
    )
    with op.batch_alter_table('jobs', schema=None) as batch_op:
        batch_op.create_index('ix_jobs_state', ['state'], unique=False)

    op.create_table('nonces',
    sa.Column('signer', sa.LargeBinary(), nullable=False),
    sa.Column('nonce', sa.String(), nullable=False),
    sa.Column('expires_at', sa.Double(), nullable=False),
    sa.PrimaryKeyConstraint('signer', 'nonce'),
    sqlite_with_rowid=False
    )
    with op.batch_alter_table('nonces', schema=None) as batch_op:
        batch_op.create_index('ix_nonces_expires_at', ['expires_at'], unique=False)

    op.create_table('offers',
    sa.Column('id', sa.Integer(), nullable=False),
    sa.Column('validator', sa.String(), nullable=False),
    sa.Column('task_id', sa.String(), nullable=False),
    sa.Column('task_type', sa.String(), nullable=False),
    sa.Column('model', sa.String(), nullable=False),
    sa.Column('params', sa.Integer(), nullable=True),
    sa.Column('hours', sa.Double(), nullable=False),
    sa.Column('ds_size', sa.Integer(), nullable=True),
    sa.Column('received_at', sa.Double(), nullable=False),
    sa.Column('last_seen_at', sa.Double(), nullable=False),
    sa.Column('times_seen', sa.Integer(), nullable=False),
    sa.Column('raw', sa.LargeBinary(), nullable=False),
    sa.PrimaryKeyConstraint('id'),
    sa.UniqueConstraint('validator', 'task_id')
    )
    with op.batch_alter_table('offers', schema=None) as batch_op:
        batch_op.create_index('ix_offers_received_at', ['received_at'], unique=False)

    op.create_table('attempts',
    sa.Column('id', sa.Integer(), nullable=False),
    sa.Column('job_id', sa.Integer(), nullable=False),
    sa.Column('number', sa.Integer(), nullable=False),
    sa.Column('engine', sa.String(), nullable=False),
    sa.Column('engine_ref', sa.String(), nullable=True),
    sa.Column('folder', sa.String(), nullable=False),
    sa.Column('started_at', sa.Double(), nullable=False),
    sa.Column('ended_at', sa.Double(), nullable=True),
    sa.Column('end_reason', sa.String(), nullable=True),
    sa.ForeignKeyConstraint(['job_id'], ['jobs.id'], ),
    sa.PrimaryKeyConstraint('id'),
    sa.UniqueConstraint('job_id', 'number')
    )
    op.create_table('decisions',
    sa.Column('offer_id', sa.Integer(), nullable=False),
    sa.Column('accepted', sa.Boolean(), nullable=False),
    sa.Column('message', sa.String(), nullable=False),
    sa.Column('score', sa.Double(), nullable=True),
    sa.Column('factors', sa.String(), nullable=False),
    sa.Column('reasons', sa.String(), nullable=False),
    sa.Column('policy', sa.String(), nullable=False),
    sa.Column('policy_hash', sa.String(), nullable=False),
    sa.Column('profile_hash', sa.String(), nullable=True),
    sa.Column('decided_at', sa.Double(), nullable=False),
    sa.ForeignKeyConstraint(['offer_id'], ['offers.id'], ),
    sa.PrimaryKeyConstraint('offer_id')
    )
    op.create_table('reservations',
    sa.Column('offer_id', sa.Integer(), nullable=False),
    sa.Column('task_id', sa.String(), nullable=False),
    sa.Column('state', sa.String(), nullable=False),
    sa.Column('gpus', sa.String(), nullable=False),
    sa.Column('held_at', sa.Double(), nullable=False),
    sa.Column('lapses_at', sa.Double(), nullable=False),
    sa.ForeignKeyConstraint(['offer_id'], ['offers.id'], ),
    sa.PrimaryKeyConstraint('offer_id')
    )
    with op.batch_alter_table('reservations', schema=None) as batch_op:
        batch_op.create_index('ix_reservations_state', ['state'], unique=False)


