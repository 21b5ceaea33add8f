"""Run the smallest possible training, exactly as a real one, to learn what can be trained here."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from core.domain.choices import Engine
from core.domain.errors import GodMinerError
from core.system.files import write_atomically
from miner.backends.base import (
    IMAGE_OF,
    AttemptSpec,
    Backend,
    BackendRejected,
    BackendUnreachable,
    EndCause,
    RunPhase,
    RunStatus,
)
from miner.backends.registry import BACKENDS_FOLDER, build_backend, plugin_of
from miner.backends.run_folder import log_tail
from miner.settings import BackendKind, Settings
from miner.support.findings import Finding, fail, ok, warn

log = logging.getLogger(__name__)

#: Importing torch from a cold disk takes a minute.
TRIAL_TIMEOUT_S = 180.0
POLL_S = 0.1
#: A failed trial is repeated after RETRY_S; one that found something missing after RECHECK_S (a disk may have
#: been slow, or it was fixed elsewhere), and at once when the image or the interpreter changes.
RETRY_S, RECHECK_S = 300.0, 3600.0
#: The shortest pause after any trial, also one that found out nothing.
AGAIN_S = 10.0
#: How long an image's identity is taken as current: it is read less often than the backend is polled.
IDENTITY_S = 30.0
RESULTS_FILE = "trials.json"
#: Reported until the first trial of an image has ended.
BEING_TRIED = "what trains them is being tried out; this takes up to a few minutes after a change"
#: How the reported text begins when the trial itself has failed.
TRIAL_FAILED = "the trial run of the"
_ENGINES_OF = {
    image: tuple(engine for engine in IMAGE_OF if IMAGE_OF[engine] == image) for image in IMAGE_OF.values()
}

#: By engine: what is missing; without an entry it can train.
MissingByEngine = Mapping[Engine, str]


class TrialFailed(GodMinerError):
    """The trial run failed; a real training would have failed in the same way."""

    code = "trial_failed"


@dataclass(frozen=True, slots=True)
class Trial:
    """A command to run as a training would be run."""

    argv: tuple[str, ...]
    image: str = "text"
    gpus: tuple[str, ...] = ()
    shm_bytes: int | None = None
    key: str = ""


async def run_trial(backend: Backend, parent: Path, trial: Trial) -> str:
    """Run a trial in a new directory within `parent`; return its output, whatever its exit code."""
    folder = Path(tempfile.mkdtemp(prefix=".trial-", dir=parent))
    spec = AttemptSpec(
        trial.key or trial_key(),
        trial.argv,
        folder,
        env={"HF_HUB_OFFLINE": "1"},
        image=trial.image,
        gpus=trial.gpus,
        shm_bytes=trial.shm_bytes,
        hostile=backend.can_sandbox,
        timeout_s=TRIAL_TIMEOUT_S,
    )
    try:
        ref = await backend.submit(spec)
        try:
            status = await _wait_for_end(backend, ref, folder)
        finally:
            await backend.stop(ref, force=True)
            await _wait_for_end(backend, ref, folder)
            await backend.remove(ref)
        output = log_tail(folder).strip()
        if status.why not in (EndCause.OK, EndCause.FAILED) or not output:
            raise TrialFailed(f"it ended with {status.why} (code {status.code}): {output or status.detail}")
        return output
    except (BackendRejected, BackendUnreachable, TimeoutError) as error:
        raise TrialFailed(str(error) or "it took too long") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def trial_key() -> str:
    return f"trial-{secrets.token_hex(8)}"


async def _wait_for_end(backend: Backend, ref: str, folder: Path) -> RunStatus:
    limit_s = TRIAL_TIMEOUT_S + 10
    async with asyncio.timeout(limit_s) as limit:
        while True:
            status = await backend.poll(ref, folder)
            if status.phase not in (RunPhase.RUNNING, RunPhase.QUEUED):
                return status
            if status.phase is RunPhase.QUEUED:
                # A cluster's queue is no fault of the image; the backend ends a wait that takes too long.
                limit.reschedule(asyncio.get_running_loop().time() + limit_s)
            await asyncio.sleep(POLL_S)


async def missing_in_image(
    backend: Backend, parent: Path, image: str, *, gpus: tuple[str, ...] = (), key: str = ""
) -> MissingByEngine:
    """Ask `trainer.runner.check_engines` in this image what its engines lack. `TrialFailed`."""
    argv = ("python", "-m", "trainer.runner.check_engines", image, *(["gpu"] if gpus else []))
    output = await run_trial(backend, parent, Trial(argv, image, gpus, key=key))
    try:
        # Libraries may write something after it, as they are unloaded.
        lines = [line for line in output.splitlines() if line.startswith("{")]
        answer = json.loads(lines[-1])
        return {name: str(answer[name]) for name in _ENGINES_OF[image] if answer[name]}
    except (ValueError, LookupError, TypeError):
        raise TrialFailed(output.splitlines()[-1][-300:]) from None


class BackendTrials:
    """Try each image once, in a task of its own, and keep the result until the image changes."""

    def __init__(self, backend: Backend, data_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._backend = backend
        self._data_dir = data_dir
        self._file = data_dir / BACKENDS_FOLDER / RESULTS_FILE
        self._clock = clock
        #: By identity, as on disk.
        self._results: dict[str, dict[str, str]] = _read_results(self._file)
        #: By identity: why a trial failed, and when to repeat one that failed or found something missing.
        self._failures: dict[str, str] = {}
        self._repeat_at: dict[str, float] = {}
        #: Identities whose last trial has ended while the backend did not answer.
        self._unanswered: set[str] = set()
        #: By image: its identity, and when to read it again.
        self._identities: dict[str, tuple[str, float]] = {}
        self._task: asyncio.Task[None] | None = None
        #: The key of the running trial: recovery must not take it for a run that was left behind.
        self.running_key: str | None = None

    async def missing(self) -> MissingByEngine:
        """Return what is known to keep each engine from training now; `BackendUnreachable`.

        Starts the next trial that is due without waiting for it: the caller also watches the backend.
        """
        absent = await self._backend.missing_images()
        missing: dict[Engine, str] = {}
        due: list[tuple[str, str]] = []
        for image, engines in _ENGINES_OF.items():
            if image in absent:
                missing |= dict.fromkeys(engines, absent[image])
                self._identities.pop(image, None)
                continue
            identity = await self._recent_identity(image)
            known = self._known(image, identity)
            missing |= dict.fromkeys(engines, BEING_TRIED) if known is None else known
            if (known is None or known) and self._is_due(identity, known):
                due.append((image, identity))
        if due and not self.is_running:
            longest = min(due, key=lambda image: self._repeat_at.get(image[1], -math.inf))
            self._task = asyncio.create_task(self._try(*longest), name="trial")
        return missing

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    async def pause(self, seconds: float) -> None:
        """Wait for so long, or until the running trial has ended."""
        if self._task is not None and self.is_running:
            await asyncio.wait({self._task}, timeout=seconds)
        else:
            await asyncio.sleep(seconds)

    async def close(self) -> None:
        """End the running trial."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _identity(self, image: str) -> str:
        return f"{self._backend.name} {image} {await self._backend.identity(image)}"

    async def _recent_identity(self, image: str) -> str:
        """The image's identity, at most IDENTITY_S old."""
        identity, until = self._identities.get(image, ("", -math.inf))
        if self._clock() >= until:
            identity = await self._identity(image)
            self._identities[image] = identity, self._clock() + IDENTITY_S
        return identity

    def _known(self, image: str, identity: str) -> MissingByEngine | None:
        """The result of the last trial, or None if there was none."""
        if identity in self._results:
            return {Engine(name): why for name, why in self._results[identity].items()}
        if identity in self._failures:
            return dict.fromkeys(_ENGINES_OF[image], self._failures[identity])
        return None

    async def _try(self, image: str, identity: str) -> None:
        """Run one trial. One that finds out nothing is repeated as well, but never at once."""
        try:
            await self._try_once(image, identity)
        except BackendUnreachable as error:
            # The backend went away meanwhile: that says nothing about the image, unless it does so each time.
            if identity in self._unanswered:
                self._failed(image, identity, str(error))
            self._unanswered.add(identity)
        except Exception as error:
            log.exception("the trial of the %s image failed unexpectedly", image)
            self._failed(image, identity, f"{type(error).__name__}: {error}")
        finally:
            self._identities.pop(image, None)
            soonest = self._clock() + AGAIN_S
            self._repeat_at[identity] = max(self._repeat_at.get(identity, soonest), soonest)

    async def _try_once(self, image: str, identity: str) -> None:
        missing, failure = await self._run(image)
        if await self._identity(image) != identity:
            return  # another image by now
        self._unanswered.discard(identity)
        if failure and identity not in self._results:
            self._failed(image, identity, failure)
            self._repeat_at[identity] = self._clock() + RETRY_S
            return
        self._repeat_at[identity] = self._clock() + RECHECK_S
        if not failure:
            self._failures.pop(identity, None)
            log.info("%s was tried out: %s", identity, missing or "everything is there")
            self._remember(image, identity, missing)

    def _failed(self, image: str, identity: str, why: str) -> None:
        """Record a failure, unless an earlier trial has a result, which still counts."""
        if identity not in self._results:
            self._failures[identity] = f"{TRIAL_FAILED} {image} image failed (see god-miner doctor): {why}"

    async def _run(self, image: str) -> tuple[MissingByEngine, str]:
        """Return what the image lacks, and why the trial failed (empty if it did not)."""
        self.running_key = trial_key()
        try:
            return await missing_in_image(self._backend, self._data_dir, image, key=self.running_key), ""
        except TrialFailed as error:
            return {}, str(error)
        except Exception as error:  # a full disk, a backend's odd answer: repeated later
            log.exception("the trial run of the %s image failed", image)
            return {}, f"{type(error).__name__}: {error}"
        finally:
            self.running_key = None

    def _is_due(self, identity: str, known: MissingByEngine | None) -> bool:
        first = -math.inf if known is None else self._clock() + RECHECK_S
        return self._clock() >= self._repeat_at.setdefault(identity, first)

    def _remember(self, image: str, identity: str, missing: MissingByEngine) -> None:
        """Keep the newest result of each image, on disk as well."""
        prefix = f"{self._backend.name} {image} "
        known = _read_results(self._file) | self._results  # another backend's trials write it too
        others = {name: result for name, result in known.items() if not name.startswith(prefix)}
        self._results = {**others, identity: {str(engine): why for engine, why in missing.items()}}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file, json.dumps(self._results, indent=2).encode())


def _read_results(path: Path) -> dict[str, dict[str, str]]:
    """The stored results; where they cannot be read, everything is tried again."""
    try:
        stored = json.loads(path.read_bytes())
        return {
            str(identity): {Engine(name): str(why) for name, why in result.items()}
            for identity, result in stored.items()
        }
    except (OSError, ValueError, AttributeError):
        return {}


# What the doctor reports of a trial

_PROTECTION = "from trainer.rewards.sandbox import describe_isolation as about; print('isolation:', about())"
_GPU_DEVICE = Path("/dev/nvidia0")


def trial_finding(
    settings: Settings, kind: BackendKind, gpus: tuple[str, ...] | None = None, key: str = ""
) -> Finding:
    """Start the smallest training with this backend. `gpus`: if they are not this machine's; `key`: the
    run's, if the caller needs it."""
    if gpus is None:
        gpus = ("0",) if _GPU_DEVICE.exists() else ()

    async def try_out() -> Mapping[Engine, str]:
        with temporary_data_dir(settings) as temporary:
            backend = await build_backend(settings, kind, temporary.data_dir)
            try:
                return await missing_in_image(backend, temporary.data_dir, "text", gpus=gpus, key=key)
            finally:
                await backend.close()

    try:
        lacks = asyncio.run(try_out())
    except TrialFailed as error:
        return fail("trial run", str(error), "correct what it says; a training would end the same way")
    except GodMinerError as error:
        return fail("trial run", str(error), "correct what it says")
    trains = [engine for engine, short in IMAGE_OF.items() if short == "text" and engine not in lacks]
    missing = "; ".join(f"{engine}: {why}" for engine, why in lacks.items())
    if not trains:
        return fail("trial run", missing, plugin_of(kind).fix)
    gpu = "with a GPU" if gpus else "without a GPU: there is none"
    detail = f"{' and '.join(trains)} can train, {gpu}"
    if missing:
        return warn(
            "trial run",
            f"{detail}; {missing}",
            f"{plugin_of(kind).fix}, or profiles with engine: {trains[0]}",
        )
    return ok("trial run", detail)


def reward_isolation(settings: Settings, kind: BackendKind) -> Iterator[Finding]:
    """Find what isolates reward code; nothing if such tasks are refused, or if the trial run failed too."""

    async def try_out() -> str:
        with temporary_data_dir(settings) as temporary:
            backend = await build_backend(settings, kind, temporary.data_dir)
            try:
                trial = Trial(("python", "-c", _PROTECTION))
                return await run_trial(backend, temporary.data_dir, trial) if backend.can_sandbox else ""
            finally:
                await backend.close()

    try:
        protection = asyncio.run(try_out()).rpartition("isolation: ")[2]
    except (TrialFailed, GodMinerError):
        return
    if protection.startswith("exposed"):
        advice = "Linux 6.2 or newer with Landlock, or god-miner as root with bubblewrap"
        yield warn("reward isolation", f"reward code is not kept from the training: {protection}", advice)
    elif protection.startswith("user "):
        yield ok("reward isolation", f"reward code runs as {protection}")


@contextmanager
def temporary_data_dir(settings: Settings) -> Iterator[Settings]:
    """The settings with a temporary data directory beside the real one, where Docker sees it."""
    beside = next(place for place in (settings.data_dir, *settings.data_dir.parents) if place.is_dir())
    with tempfile.TemporaryDirectory(prefix=".god-miner-doctor-", dir=beside) as folder:
        yield settings.model_copy(update={"data_dir": Path(folder)})
