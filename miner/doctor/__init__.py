"""Looks for what would keep this miner from working, and says how to fix it."""

from miner.doctor.examine import Check, Surroundings, examine, is_healthy
from miner.doctor.finding import Finding, Status

__all__ = ["Check", "Finding", "Status", "Surroundings", "examine", "is_healthy"]
