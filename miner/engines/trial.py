"""A trial run: the smallest training there is, started exactly as a real one."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
from pathlib import Path

from core.errors import GodMinerError
from miner.engines.base import Engine, EngineSpec, Phase, Rejected, Status, Unreachable, Why
from miner.engines.logs import log_tail

LIMIT_S = 60.0
PAUSE_S = 0.1


class TrialFailed(GodMinerError):
    """What a real training would have met as well."""

    code = "trial_failed"


async def trial(
    engine: Engine,
    beside: Path,
    code: str,
    *,
    image: str = "text",
    gpus: tuple[str, ...] = (),
    hostile: bool = True,
) -> str:
    """Run this Python code and give what it printed. Its folder lies in `beside`, which the engine sees."""
    folder = Path(tempfile.mkdtemp(prefix=".trial-", dir=beside))
    key = f"trial-{secrets.token_hex(8)}"
    argv = ("python", "-c", code)
    spec = EngineSpec(key, argv, folder, image=image, gpus=gpus, hostile=hostile, limit_s=LIMIT_S)
    try:
        ref = await engine.submit(spec)
        try:
            status = await _end(engine, ref, folder)
        finally:
            await engine.stop(ref, force=True)
            await _end(engine, ref, folder)
            await engine.remove(ref)
        said = log_tail(folder).strip()
        if status.why is not Why.OK:
            raise TrialFailed(
                f"it ended with {status.why} (code {status.code}): {said[-300:] or status.detail}"
            )
        return said
    except (Rejected, Unreachable, TimeoutError) as error:
        raise TrialFailed(str(error) or "it took too long") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _end(engine: Engine, ref: str, folder: Path) -> Status:
    async with asyncio.timeout(LIMIT_S + 10):
        while True:
            status = await engine.poll(ref, folder)
            if status.phase not in (Phase.RUNNING, Phase.QUEUED):
                return status
            await asyncio.sleep(PAUSE_S)
