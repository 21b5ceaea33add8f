"""A trial: the smallest run there is, started exactly as a training, to learn what can be trained here."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from core.choices import Engine as TrainingEngine
from core.errors import GodMinerError
from core.files import write_atomically
from miner.engines.base import IMAGE_OF, Engine, EngineSpec, Phase, Rejected, Status, Unreachable, Why
from miner.engines.logs import log_tail

log = logging.getLogger(__name__)

#: Importing torch from a cold disk takes a minute.
LIMIT_S = 180.0
PAUSE_S = 0.1
#: A failed trial is repeated after RETRY_S; one that found something missing after RECHECK_S (a disk may have
#: been slow, or it was mended elsewhere), and at once when the image or the interpreter changes.
RETRY_S, RECHECK_S = 300.0, 3600.0
RESULTS_FILE = "trials.json"
_ENGINES_OF = {
    image: tuple(engine for engine in IMAGE_OF if IMAGE_OF[engine] == image) for image in IMAGE_OF.values()
}

#: By training engine: what it lacks; without an entry it can train.
Lacks = Mapping[TrainingEngine, str]


class TrialFailed(GodMinerError):
    """A real training would have met the same."""

    code = "trial_failed"


async def trial(
    engine: Engine,
    beside: Path,
    argv: tuple[str, ...],
    *,
    image: str = "text",
    gpus: tuple[str, ...] = (),
    key: str = "",
) -> str:
    """Run this command and return its output, whatever its exit code. Its folder is made in `beside`."""
    folder = Path(tempfile.mkdtemp(prefix=".trial-", dir=beside))
    spec = EngineSpec(
        key or trial_key(),
        argv,
        folder,
        env={"HF_HUB_OFFLINE": "1"},
        image=image,
        gpus=gpus,
        hostile=engine.can_sandbox,
        limit_s=LIMIT_S,
    )
    try:
        ref = await engine.submit(spec)
        try:
            status = await _end(engine, ref, folder)
        finally:
            await engine.stop(ref, force=True)
            await _end(engine, ref, folder)
            await engine.remove(ref)
        output = log_tail(folder).strip()
        if status.why not in (Why.OK, Why.FAILED) or not output:
            raise TrialFailed(f"it ended with {status.why} (code {status.code}): {output or status.detail}")
        return output
    except (Rejected, Unreachable, TimeoutError) as error:
        raise TrialFailed(str(error) or "it took too long") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def trial_key() -> str:
    return f"trial-{secrets.token_hex(8)}"


async def _end(engine: Engine, ref: str, folder: Path) -> Status:
    async with asyncio.timeout(LIMIT_S + 10):
        while True:
            status = await engine.poll(ref, folder)
            if status.phase not in (Phase.RUNNING, Phase.QUEUED):
                return status
            await asyncio.sleep(PAUSE_S)


async def lacking_in(
    engine: Engine, beside: Path, image: str, *, gpus: tuple[str, ...] = (), key: str = ""
) -> Lacks:
    """What the training engines of this image lack, by a run of `trainer.ready` in it; `TrialFailed`."""
    argv = ("python", "-m", "trainer.ready", image)
    output = await trial(engine, beside, argv, image=image, gpus=gpus, key=key)
    try:
        # Libraries may say something after it, as they are unloaded.
        lines = [line for line in output.splitlines() if line.startswith("{")]
        answer = json.loads(lines[-1])
        return {name: str(answer[name]) for name in _ENGINES_OF[image] if answer[name]}
    except (ValueError, LookupError, TypeError):
        raise TrialFailed(output.splitlines()[-1][-300:]) from None


class Trials:
    """Tries each image once and remembers the result until what it would start changes."""

    def __init__(self, engine: Engine, data_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._data_dir = data_dir
        self._file = data_dir / "engines" / RESULTS_FILE
        self._clock = clock
        #: By identity, as on disk.
        self._results: dict[str, dict[str, str]] = _read(self._file)
        #: By identity: why a trial failed, and when to repeat one that failed or found something missing.
        self._failures: dict[str, str] = {}
        self._repeat_at: dict[str, float] = {}
        #: The run of the present trial, so that nobody takes it for one that was left behind.
        self.running: str | None = None

    async def lacks(self) -> Lacks:
        """By training engine, what keeps it from training; `Unreachable`."""
        absent = await self._engine.lacks()
        found: dict[TrainingEngine, str] = {}
        for image, engines in _ENGINES_OF.items():
            if image in absent:
                found |= dict.fromkeys(engines, absent[image])
            else:
                found |= await self._tried(image)
        return found

    async def _tried(self, image: str) -> Lacks:
        identity = f"{self._engine.name} {image} {await self._engine.identity(image)}"
        known = self._results.get(identity)
        if known is not None and not (known and self._is_due(identity)):
            return {TrainingEngine(name): why for name, why in known.items()}
        if identity in self._failures and not self._is_due(identity):
            return dict.fromkeys(_ENGINES_OF[image], self._failures[identity])
        self.running = trial_key()
        try:
            found = await lacking_in(self._engine, self._data_dir, image, key=self.running)
        except TrialFailed as error:
            if known is not None:  # what it found when it ran still counts
                self._repeat_at[identity] = self._clock() + RECHECK_S
                return {TrainingEngine(name): why for name, why in known.items()}
            failure = f"the trial run of the {image} image failed (see god-miner doctor): {error}"
            self._failures[identity] = failure
            self._repeat_at[identity] = self._clock() + RETRY_S
            return dict.fromkeys(_ENGINES_OF[image], failure)
        finally:
            self.running = None
        self._failures.pop(identity, None)
        self._repeat_at[identity] = self._clock() + RECHECK_S
        log.info("%s was tried out: %s", identity, found or "everything is there")
        self._remember(image, identity, found)
        return found

    def _is_due(self, identity: str) -> bool:
        return self._clock() >= self._repeat_at.setdefault(identity, self._clock() + RECHECK_S)

    def _remember(self, image: str, identity: str, found: Lacks) -> None:
        """The newest of each image."""
        prefix = f"{self._engine.name} {image} "
        kept = {name: lacks for name, lacks in self._results.items() if not name.startswith(prefix)}
        self._results = {**kept, identity: {str(engine): why for engine, why in found.items()}}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file, json.dumps(self._results, indent=2).encode())


def _read(path: Path) -> dict[str, dict[str, str]]:
    """What cannot be read is tried out again."""
    try:
        stored = json.loads(path.read_bytes())
        return {
            str(identity): {TrainingEngine(name): str(why) for name, why in lacks.items()}
            for identity, lacks in stored.items()
        }
    except (OSError, ValueError, AttributeError):
        return {}
