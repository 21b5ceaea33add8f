"""All checks. A new one is a `Check` in a module here and a line in `ALL`."""

from miner.doctor.checks import (
    chain,
    clock,
    data_dir,
    engine,
    environment,
    gpus,
    host,
    hub,
    pm2,
    ports,
    store,
    tuning,
    wallet,
)
from miner.doctor.examine import Check

ALL: tuple[Check, ...] = (
    environment.CHECK,
    host.CHECK,
    data_dir.CHECK,
    store.CHECK,
    wallet.CHECK,
    chain.CHECK,
    hub.CHECK,
    clock.CHECK,
    ports.CHECK,
    gpus.CHECK,
    tuning.CHECK,
    engine.CHECK,
    pm2.CHECK,
)
