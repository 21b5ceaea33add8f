"""All checks. A new one is a `DoctorCheck` in a module here and a line in `ALL_CHECKS`."""

from miner.doctor.checks import engine, machine, network, planning, storage, subnet
from miner.doctor.examine import DoctorCheck

ALL_CHECKS: tuple[DoctorCheck, ...] = (
    machine.SETTINGS_CHECK,
    machine.HOST_CHECK,
    storage.DATA_DIR_CHECK,
    storage.STORE_CHECK,
    subnet.WALLET_CHECK,
    subnet.CHAIN_CHECK,
    network.HUB_CHECK,
    machine.CLOCK_CHECK,
    network.PORTS_CHECK,
    planning.GPUS_CHECK,
    planning.TUNING_CHECK,
    engine.ENGINE_CHECK,
    machine.PM2_CHECK,
)
