"""Find what would keep this miner from working, and say how to fix it."""

from miner.doctor.checks import machine, notifications, packages, subnet, training
from miner.doctor.examine import CheckContext, DoctorCheck, examine
from miner.settings import Settings
from miner.support.findings import Finding, FindingStatus, is_healthy

#: Those for every machine, in the order of their findings.
CHECKS: tuple[DoctorCheck, ...] = (
    machine.SETTINGS_CHECK,
    machine.HOST_CHECK,
    packages.PACKAGES_CHECK,
    machine.DATA_DIR_CHECK,
    machine.STORE_CHECK,
    subnet.WALLET_CHECK,
    subnet.CHAIN_CHECK,
    subnet.HUB_CHECK,
    machine.CLOCK_CHECK,
    subnet.PORTS_CHECK,
    training.GPUS_CHECK,
    training.TUNING_CHECK,
    training.BACKEND_CHECK,
    training.LINKS_CHECK,
    notifications.NOTIFICATIONS_CHECK,
    machine.PM2_CHECK,
)


def all_checks(settings: Settings) -> list[DoctorCheck]:
    """Every check, with those of the clusters that the settings name."""
    clusters = [training.cluster_check(kind) for kind in settings.backends if kind.is_cluster]
    at = CHECKS.index(training.BACKEND_CHECK) + 1
    return [*CHECKS[:at], *clusters, *CHECKS[at:]]


__all__ = ["CheckContext", "DoctorCheck", "Finding", "FindingStatus", "all_checks", "examine", "is_healthy"]
