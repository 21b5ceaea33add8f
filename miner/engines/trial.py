"""A trial: the smallest run there is, started exactly as a training, to learn what can be trained here."""

from __future__ import annotations

import asyncio
import json
import logging
import math
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
#: After any trial, also one that has found out nothing.
AGAIN_S = 10.0
#: Between two questions which image is there: less often than whether the engine answers.
LOOK_S = 30.0
RESULTS_FILE = "trials.json"
#: Until the first trial of what would be started has ended.
BEING_TRIED = "what trains them is being tried out; this takes up to a few minutes after a change"
#: How what it lacks begins where that is not known, as its trial has failed.
TRIAL_FAILED = "the trial run of the"
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
    """Tries each image once, in its own task, and remembers the result until the image changes."""

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
        #: Identities whose last trial has ended while the engine did not answer.
        self._unanswered: set[str] = set()
        #: By image: its identity, and when to ask for it again.
        self._seen: dict[str, tuple[str, float]] = {}
        self._task: asyncio.Task[None] | None = None
        #: The run of the present trial, so that nobody takes it for one that was left behind.
        self.running: str | None = None

    async def lacks(self) -> Lacks:
        """By training engine, what keeps it from training as far as is known now; `Unreachable`.

        Starts the next trial that is due, and does not wait for it: whoever asks also watches the engine.
        """
        absent = await self._engine.lacks()
        found: dict[TrainingEngine, str] = {}
        due: list[tuple[str, str]] = []
        for image, engines in _ENGINES_OF.items():
            if image in absent:
                found |= dict.fromkeys(engines, absent[image])
                self._seen.pop(image, None)
                continue
            identity = await self._lately(image)
            known = self._known(image, identity)
            found |= dict.fromkeys(engines, BEING_TRIED) if known is None else known
            if (known is None or known) and self._is_due(identity, known):
                due.append((image, identity))
        if due and not self.trying:
            longest = min(due, key=lambda one: self._repeat_at.get(one[1], -math.inf))
            self._task = asyncio.create_task(self._try(*longest), name="trial")
        return found

    @property
    def trying(self) -> bool:
        return self._task is not None and not self._task.done()

    async def pause(self, seconds: float) -> None:
        """Wait, but not longer than until the present trial has ended."""
        if self._task is not None and self.trying:
            await asyncio.wait({self._task}, timeout=seconds)
        else:
            await asyncio.sleep(seconds)

    async def close(self) -> None:
        """End the present trial, and its run."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _identity(self, image: str) -> str:
        return f"{self._engine.name} {image} {await self._engine.identity(image)}"

    async def _lately(self, image: str) -> str:
        """Its identity, at most LOOK_S old."""
        identity, until = self._seen.get(image, ("", -math.inf))
        if self._clock() >= until:
            identity = await self._identity(image)
            self._seen[image] = identity, self._clock() + LOOK_S
        return identity

    def _known(self, image: str, identity: str) -> Lacks | None:
        """What the last trial has found; None: there was none."""
        if identity in self._results:
            return {TrainingEngine(name): why for name, why in self._results[identity].items()}
        if identity in self._failures:
            return dict.fromkeys(_ENGINES_OF[image], self._failures[identity])
        return None

    async def _try(self, image: str, identity: str) -> None:
        """A trial that finds out nothing is repeated, too, but never at once."""
        try:
            await self._try_once(image, identity)
        except Unreachable as error:
            # The engine went away meanwhile: that says nothing about the image, unless it does so each time.
            if identity in self._unanswered:
                self._failed(image, identity, str(error))
            self._unanswered.add(identity)
        except Exception as error:
            log.exception("the trial of the %s image came to nothing", image)
            self._failed(image, identity, f"{type(error).__name__}: {error}")
        finally:
            self._seen.pop(image, None)
            soonest = self._clock() + AGAIN_S
            self._repeat_at[identity] = max(self._repeat_at.get(identity, soonest), soonest)

    async def _try_once(self, image: str, identity: str) -> None:
        found, failure = await self._run(image)
        if await self._identity(image) != identity:
            return  # another image by now
        self._unanswered.discard(identity)
        if failure and identity not in self._results:
            self._failed(image, identity, failure)
            self._repeat_at[identity] = self._clock() + RETRY_S
            return
        self._repeat_at[identity] = self._clock() + RECHECK_S
        if failure:
            return
        self._failures.pop(identity, None)
        log.info("%s was tried out: %s", identity, found or "everything is there")
        self._remember(image, identity, found)

    def _failed(self, image: str, identity: str, why: str) -> None:
        """What it found when it ran still counts."""
        if identity not in self._results:
            self._failures[identity] = f"{TRIAL_FAILED} {image} image failed (see god-miner doctor): {why}"

    async def _run(self, image: str) -> tuple[Lacks, str]:
        """What the image lacks, and why the trial failed ("": it did not)."""
        self.running = trial_key()
        try:
            return await lacking_in(self._engine, self._data_dir, image, key=self.running), ""
        except TrialFailed as error:
            return {}, str(error)
        except Exception as error:  # a full disk, an engine's odd answer: repeated later
            log.exception("the trial run of the %s image failed", image)
            return {}, f"{type(error).__name__}: {error}"
        finally:
            self.running = None

    def _is_due(self, identity: str, known: Lacks | None) -> bool:
        first = -math.inf if known is None else self._clock() + RECHECK_S
        return self._clock() >= self._repeat_at.setdefault(identity, first)

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
