"""Where submissions go: can it be reached, whose token is it, may it write there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from miner.doctor.examine import Check, Surroundings
from miner.doctor.finding import Finding, fail, ok, warn
from miner.settings import ChainKind, Settings

if TYPE_CHECKING:
    from miner.publish import PublishTo

LIMIT_SECONDS = 75.0
_MAKE_TOKEN = "make a token with write permission in the hub's settings and put HF_TOKEN=… into .env"  # noqa: S105


def run(surroundings: Surroundings) -> Iterator[Finding]:
    from miner.publish import PublishTo

    settings = surroundings.settings
    to = PublishTo.of(settings)
    if to.local is not None:
        yield _folder(Path(to.local), settings)
    elif to.token is None:
        yield fail("hub", f"HF_TOKEN is not set: nothing can be published to {to.endpoint}", _MAKE_TOKEN)
    else:
        yield _account(to)


def _folder(folder: Path, settings: Settings) -> Finding:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK) or not there.is_dir():
        return fail("hub", f"HUB=local:{folder}: {there} can't be written to", f"chown or chmod {there}")
    if settings.chain is ChainKind.BITTENSOR:
        detail = f"submissions go to {folder}, where no validator finds them"
        return warn("hub", detail, "set HUB=huggingface and HF_TOKEN to mine in earnest")
    return ok("hub", f"submissions go to the folder {folder}")


def _account(to: PublishTo) -> Finding:
    from miner.jobs.ports import StepFailed
    from miner.jobs.states import EndReason
    from miner.publish import HubPublisher

    try:
        found = asyncio.run(HubPublisher(to).account())
    except StepFailed as error:
        refused = error.reason is EndReason.HUB_REFUSED
        fix = _MAKE_TOKEN if refused else "look at the network, HF_ENDPOINT and the proxy settings"
        return fail("hub", str(error), fix)
    if not found.may_write:
        return fail("hub", found.detail, f"{_MAKE_TOKEN}; or correct HF_USER")
    return ok("hub", found.detail)


CHECK = Check("hub", run, LIMIT_SECONDS)
