"""Find what would keep this miner from working, and say how to fix it."""

from miner.doctor.examine import CheckContext, DoctorCheck, Finding, FindingStatus, examine, is_healthy

__all__ = ["CheckContext", "DoctorCheck", "Finding", "FindingStatus", "examine", "is_healthy"]
