"""What Docker's refusals mean, and the way out of those that operators meet."""

from __future__ import annotations

import re

from miner.engines.base import Rejected, Unreachable
from miner.engines.docker.client import Refused

#: Said by an engine that is itself in trouble, or just stopping: another time it will do it.
_PASSING = re.compile(
    r"containerd|context (canceled|deadline exceeded)|connection (refused|reset)|transport is closing"
    r"|shutting down|shutdown in progress|no space left|resource temporarily unavailable"
    r"|removal .* in progress",
    re.IGNORECASE,
)

_WAYS_OUT = (
    (
        "could not select device driver",
        "install the NVIDIA container toolkit, then restart Docker; or set ENGINE=process",
    ),
    ("unknown device", "the card is not there any more: see nvidia-smi -L"),
    ("setting rlimit", "Docker may not raise that limit here: lower it in TRAINING_ULIMITS"),
    ("No such image", "god-miner images build"),
    ("executable file not found", "the image has no python3: god-miner images check"),
    ("cpus are not available", "the plan names cores that Docker does not have: see `docker info`"),
    ("bind source path does not exist", "Docker must run on this machine and see the same files"),
)


def meaning(refused: Refused, doing: str) -> Rejected | Unreachable:
    text = str(refused).strip()
    if refused.status >= 500 and _PASSING.search(text):
        return Unreachable(f"Docker is in trouble ({doing}): {text[:500]}")
    way_out = next((f"; {way}" for sign, way in _WAYS_OUT if sign.lower() in text.lower()), "")
    return Rejected(f"Docker refuses ({doing}): {text[:500]}{way_out}")
