"""Alembic's entry: one SQLite file, one schema."""

from __future__ import annotations

from alembic import context
from sqlalchemy import create_engine, pool

from miner.store.schema import Base


def run() -> None:
    url = context.config.get_main_option("sqlalchemy.url")
    if url is None:
        raise RuntimeError("no database named: set sqlalchemy.url")
    engine = create_engine(url, poolclass=pool.NullPool)
    with engine.connect() as connection:
        # render_as_batch: SQLite alters a table by writing a new one.
        context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
        with context.begin_transaction():
            context.run_migrations()


run()
