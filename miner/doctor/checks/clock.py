"""The clock: validators' requests are refused when it is two minutes off, so it had better be right."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from miner.doctor.examine import Check, Surroundings
from miner.doctor.finding import Finding, fail, ok, skip, warn
from miner.settings import ChainKind, Settings, without_keys

#: Requests are taken within 120 s; half of that is left to the validator's own clock.
WRONG_SECONDS, OFF_SECONDS = 60.0, 10.0
SYNC = "timedatectl set-ntp true, or run chrony; in a container, on its host"

#: The nodes behind the names, as the SDK has them; importing it only for this would take seconds.
NODES = {
    "finney": "wss://entrypoint-finney.opentensor.ai:443",
    "test": "wss://test.finney.opentensor.ai:443",
    "archive": "wss://archive.chain.opentensor.ai:443",
    "devnet": "wss://dev.chain.opentensor.ai:443",
    "local": "ws://127.0.0.1:9944",
}


def run(surroundings: Surroundings) -> Iterator[Finding]:
    yield _compared(surroundings.settings)
    yield _kept_by_a_time_service()


def judged(offset: float, source: str) -> Finding:
    """`offset` is how many seconds this clock is ahead."""
    detail = f"{abs(offset):.0f} s {'ahead of' if offset >= 0 else 'behind'} {source}"
    if abs(offset) >= WRONG_SECONDS:
        return fail("clock", f"{detail}: validators' requests look too old or too new", SYNC)
    if abs(offset) >= OFF_SECONDS:
        return warn("clock", detail, SYNC)
    return ok("clock", f"within {max(abs(offset), 1):.0f} s of {source}")


def _compared(settings: Settings) -> Finding:
    if settings.chain is ChainKind.FILE:
        return skip("clock", "CHAIN=file: no other clock to compare with")
    address = settings.subtensor_address or NODES[settings.subtensor_network]
    offset = _offset(address)
    shown = without_keys(address)
    if offset is None:
        return skip(
            "clock", f"{shown} tells no time to compare with", "compare `date -u` with another machine"
        )
    return judged(offset, shown)


def _offset(address: str) -> float | None:
    """How far we are ahead of a node, from the Date header that any HTTP server sends with any answer."""
    import httpx

    parts = urlsplit(address)
    url = parts._replace(scheme="https" if parts.scheme == "wss" else "http").geturl()
    before = time.time()
    try:
        answer = httpx.get(url, timeout=10.0, follow_redirects=False)
        told = parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (httpx.HTTPError, KeyError, ValueError):
        return None
    # The header is cut to whole seconds: on average half a second too old.
    return (before + time.time()) / 2 - (told + 0.5)


def _kept_by_a_time_service() -> Finding:
    program = shutil.which("timedatectl")
    if program is None:
        return skip(
            "time service", "timedatectl is not here to ask", "make sure that the host keeps its clock right"
        )
    try:
        asked = subprocess.run(
            [program, "show", "--property=NTPSynchronized", "--value"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return skip(
            "time service", "timedatectl does not answer", "make sure that the host keeps its clock right"
        )
    answer = asked.stdout.strip()
    if asked.returncode != 0 or answer not in ("yes", "no"):
        return skip("time service", "timedatectl can not tell (no systemd, as in containers)")
    if answer == "no":
        return warn("time service", "the clock is not synchronised", SYNC)
    return ok("time service", "the clock is synchronised")


CHECK = Check("clock", run, 30.0)
