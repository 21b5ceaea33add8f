"""Find what would keep this miner from working, and say how to fix it."""

from miner.doctor.checks import cluster, links, machine, notifications, packages, subnet, training
from miner.doctor.examine import CheckContext, DoctorCheck, Finding, FindingStatus, examine, is_healthy

ALL_CHECKS: tuple[DoctorCheck, ...] = (
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
    training.ENGINE_CHECK,
    cluster.CLUSTER_CHECK,
    links.LINKS_CHECK,
    notifications.NOTIFICATIONS_CHECK,
    machine.PM2_CHECK,
)

__all__ = ["ALL_CHECKS", "CheckContext", "DoctorCheck", "Finding", "FindingStatus", "examine", "is_healthy"]
