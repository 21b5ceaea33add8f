"""Attempts as local processes, for machines without Docker, such as rented pods."""

from miner.engines.process.engine import ProcessEngine

__all__ = ["ProcessEngine"]
