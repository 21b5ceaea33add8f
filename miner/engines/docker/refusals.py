"""What Docker's refusals mean, and the way out of those that operators meet."""

from __future__ import annotations

import re

from miner.engines.base import NoSpace, Rejected, Unreachable
from miner.engines.docker.client import Refused

#: Docker has one status for all that goes wrong in it. These say that the container itself can not be; with
#: any other it is Docker that is in trouble now: stopping, without its containerd, or confused about what it
#: had begun before it was killed ("task … already exists", "id already in use").
_FINAL = re.compile(
    r"could not select device driver|nvidia-container|unknown device|runtime create failed|runc create failed"
    r"|invalid|not supported|cannot set both",
    re.IGNORECASE,
)
_LEFT_OVER = re.compile(r"already (exists|in use)")

_WAYS_OUT = (
    (
        "could not select device driver",
        "install the NVIDIA container toolkit, then restart Docker; or set ENGINE=process",
    ),
    ("unknown device", "the card is not there any more: see nvidia-smi -L"),
    ("setting rlimit", "Docker may not raise that limit here: lower it in TRAINER_ULIMITS"),
    ("No such image", "god-miner images build"),
    ("cpus are not available", "the plan names cores that Docker does not have: see `docker info`"),
    ("bind source path does not exist", "Docker must run on this machine and see the same files"),
)


def meaning(refused: Refused, doing: str) -> Rejected | Unreachable:
    text = str(refused).strip()
    if "no space left on device" in text.lower():
        return NoSpace(f"Docker's disk is full ({doing}): docker system df; god-miner images prune")
    if refused.status >= 500 and not _FINAL.search(text):
        return Unreachable(f"Docker is in trouble ({doing}): {text[:500]}")
    way_out = next((f"; {way}" for sign, way in _WAYS_OUT if sign.lower() in text.lower()), "")
    return Rejected(f"Docker refuses ({doing}): {text[:500]}{way_out}")


def is_left_over(refused: Refused) -> bool:
    """Something of an earlier start is in the way, which only a new container gets around."""
    return bool(_LEFT_OVER.search(str(refused)))
