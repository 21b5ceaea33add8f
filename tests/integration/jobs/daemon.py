"""`god-miner run` with the fault tests' trainer in the place of the real one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from miner.__main__ import main
from miner.backends import registry
from miner.backends.slurm import backend
from miner.jobs import launch
from miner.jobs.timeline import JobTimings
from miner.settings import Settings

settings_timings = JobTimings.from_settings


def quick_timings(settings: Settings) -> JobTimings:
    timings = settings_timings(settings)
    return replace(timings, poll_s=0.05, backend_poll_s=0.25, dump_s=0.25, pause_s=0.1, stall_min_s=60.0)


if __name__ == "__main__":
    JobTimings.from_settings = quick_timings  # type: ignore[method-assign, assignment]
    backend.POLL_S = 0.2
    registry.MAX_PROCESSES = 256
    payload = Path(__file__).with_name("payload.py").read_text()
    launch.TRAINERS["text"] = ("python", "-c", payload)
    main()
