"""Supervise one child from start to end: what may end it besides itself, and what its end means.

The training's own outcome counts first, then its failure records, then the exit code.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from core.domain.units import show_seconds
from core.runs.kernel_failures import kernel_failure
from core.runs.run_files import RunEnd, TrainerExitCode
from core.system.wrapper import dump_stacks, oom_kills, reap
from trainer.handoff import TrainingFailure, TrainingOutcome
from trainer.runner.processes import StopRequest, TreeUse, tree_use
from trainer.session.failures import is_disk_full

POLL_S = 0.2
#: Zombies of the launcher's making are cleared this often.
REAP_S = 10.0
#: From the request to stop to being killed: an evaluation, a save and a checkpoint, each bounded by the
#: session.
STOP_S = 75.0
#: Stacks are dumped, and have this long to reach the log, before a hanging training is ended.
DUMP_S = 2.0


#: A child that imports may take longer than planned, on a cold disk or a busy machine: 15 s of CPU time, in
#: which Axolotl and our plugin read 244 MB, took 308 s at a twentieth of a core. The longest that they read
#: nothing was 3.3 s of CPU time. An engine that trains without our plugin computes and reads next to nothing.
IMPORT_BUSY_S, IMPORT_BYTES = 30.0, 1_000_000
#: A child that neither computes nor reads waits for something that does not come. Its launcher looks after it
#: all the same, which takes 0.6 s of CPU time in those seconds.
IMPORT_STILL_S, IMPORT_MOVE_S = 120.0, 2.0
#: Of the time, after which imports that go on are ended all the same.
IMPORT_SHARE = 0.75
LOOK_S = 2.0


NOTHING_YET = TreeUse(0.0, 0)


@dataclass
class ImportWatch:
    """Signs that a child still imports: it reads, and what it reads is worth its CPU time."""

    use: Callable[[], TreeUse]
    #: CPU time without a read after which it does something else.
    busy_s: float
    #: When it last computed or read.
    moved_at: float = 0.0
    _looked_at: float = -LOOK_S
    _last: TreeUse = NOTHING_YET
    #: At that time.
    _moved: TreeUse = NOTHING_YET
    #: At the last megabyte.
    _read: TreeUse = NOTHING_YET

    def look(self, now: float) -> None:
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at, found = now, self.use()
        self._last = found
        computed = abs(found.cpu_s - self._moved.cpu_s)
        if computed >= IMPORT_MOVE_S or found.read_bytes != self._moved.read_bytes:
            self.moved_at, self._moved = now, found
        # Less than before: a process has ended, with what it read.
        if (
            found.read_bytes - self._read.read_bytes >= IMPORT_BYTES
            or found.read_bytes < self._read.read_bytes
        ):
            self._read = found

    def trouble(self, now: float) -> str:
        """Return what shows that it imports no longer; empty if nothing does."""
        if now - self.moved_at > IMPORT_STILL_S:
            return f"it has neither computed nor read for {show_seconds(IMPORT_STILL_S)}"
        if (busy := self._last.cpu_s - self._read.cpu_s) > self.busy_s:
            return f"it has read nothing in its last {show_seconds(busy)} of CPU time"
        return ""


class SupervisedProcess(Protocol):
    """A child process under supervision."""

    @property
    def tail(self) -> Iterable[str]:
        """The last lines of its output."""

    @property
    def pid(self) -> int: ...

    def ended(self) -> int | None: ...

    def close(self) -> int: ...


class Termination(NamedTuple):
    """Why we ended a child."""

    end: RunEnd
    detail: str


class ProcessEnd(NamedTuple):
    code: int
    #: None: it ended by itself.
    termination: Termination | None
    tail: tuple[str, ...]
    #: How often the kernel killed something of this container for memory meanwhile.
    oom_kills: int = 0


@dataclass
class SupervisionLimits:
    """Limits at which a child is ended. Times are seconds since the epoch."""

    #: A child that still runs then is ended.
    hard_end: float
    #: Until this exists, nothing has been trained that is worth waiting for.
    begun: Path | None = None
    #: Must exist after this many seconds, unless the child still imports: our plugin writes it once it is
    #: loaded.
    marker: Path | None = None
    marker_s: float = 600.0
    #: How many processes import at once.
    processes: int = 1
    #: A training hangs when none of these files has changed for `hang_s`, and `heard` is as long ago.
    signs: tuple[Path, ...] = ()
    hang_s: float = 3600.0
    heard: Callable[[], float] = lambda: 0.0
    #: What a request to stop interrupts where `begun` does not exist.
    doing: Callable[[], str] = lambda: "before the first step"
    #: Another reason to end it, asked on every poll.
    more: Callable[[], Termination | None] = lambda: None


def supervise(
    child: SupervisedProcess,
    limits: SupervisionLimits,
    stop: StopRequest,
    now: Callable[[], float] = time.time,
) -> ProcessEnd:
    """Wait for the child's end, and end it when one of the limits is reached."""
    imports = ImportWatch(lambda: tree_use(child.pid), IMPORT_BUSY_S * limits.processes)
    supervision = _Supervision(limits, stop, now, imports, began=now())
    termination = None
    kills = oom_kills()
    reaped = now()
    while child.ended() is None and (termination := supervision.check()) is None:
        time.sleep(POLL_S)
        if now() - reaped > REAP_S:
            reap(child.pid)
            reaped = now()
    if termination is not None and termination.end is not RunEnd.STOPPED and dump_stacks():
        # Image engines handle no SIGUSR1, and what is left of the time is for their last file.
        time.sleep(DUMP_S)
    code = child.close()
    return ProcessEnd(code, termination, tuple(child.tail), oom_kills() - kills)


@dataclass
class _Supervision:
    limits: SupervisionLimits
    stop: StopRequest
    now: Callable[[], float]
    imports: ImportWatch
    began: float
    asked_at: float | None = None

    def check(self) -> Termination | None:
        now, limits = self.now(), self.limits
        if self.stop.asked:
            self.asked_at = self.asked_at or now
            if limits.begun is None or not limits.begun.exists():
                return Termination(RunEnd.STOPPED, f"asked to stop {limits.doing()}")
            if now - self.asked_at > STOP_S:
                return Termination(
                    RunEnd.STOPPED, f"asked to stop, still running {show_seconds(STOP_S)} later"
                )
        if now > limits.hard_end:
            return Termination(
                RunEnd.CLOCK, "the time was over and the training still ran: ended from outside"
            )
        if limits.marker is not None and not limits.marker.exists() and (why := self._stuck_in_imports(now)):
            return Termination(
                RunEnd.CRASHED,
                f"the engine has not loaded our plugin, and nothing would keep the time: {why}",
            )
        heard = max(limits.heard(), self.imports.moved_at)
        quiet = now - max([self.began, heard, *(_changed_at(path) for path in limits.signs)])
        if quiet > limits.hang_s:
            return Termination(RunEnd.HUNG, f"no sign of life for {show_seconds(quiet)}")
        return limits.more()

    def _stuck_in_imports(self, now: float) -> str:
        """Why a child without our plugin is not waited for any longer; empty while it is."""
        self.imports.look(now)
        if now - self.began <= self.limits.marker_s:
            return ""
        if now - self.began > IMPORT_SHARE * (self.limits.hard_end - self.began):
            return f"{IMPORT_SHARE:.0%} of the time is over"
        return self.imports.trouble(now)


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


#: The kernel kills with SIGKILL when a container's memory is used up; this is how launchers report it.
_KILLED = re.compile(r"exitcode\s*:\s*-9|SIGKILL|Signal 9", re.IGNORECASE)
#: The launcher lists who failed by itself, and not whom it ended on that account.
_EXIT_9 = re.compile(r"exitcode\s*:\s*-9\b")
_EXIT_FULL = re.compile(rf"exitcode\s*:\s*{TrainerExitCode.DISK_FULL}\b")
_LAST_LINES = 12


#: Ends from outside that another rank's failure may have led to.
_CONSEQUENCES = (RunEnd.HUNG, RunEnd.CRASHED, RunEnd.OOM)


class LaunchResult(NamedTuple):
    end: RunEnd
    detail: str
    outcome: TrainingOutcome | None = None
    moment: str | None = None


def _killed(ended: ProcessEnd) -> LaunchResult:
    """Only the kernel's own count shows that it was for memory: anybody can send the signal."""
    if ended.oom_kills:
        text = "a training process was killed by the kernel: the host's memory ran out"
        return LaunchResult(RunEnd.OOM, text, moment="train")
    return LaunchResult(
        RunEnd.KILLED, "a training process was killed from outside (SIGKILL), and not for memory"
    )


def launch_result(
    ended: ProcessEnd,
    outcome: TrainingOutcome | None,
    failures: Sequence[TrainingFailure | None],
    marked: bool,
) -> LaunchResult:
    """`marked`: our plugin was loaded."""
    if outcome is not None:
        return LaunchResult(outcome.end, outcome.detail, outcome)
    first = min((failure for failure in failures if failure is not None), key=_weight, default=None)
    if first is not None and first.end is RunEnd.CRASHED and _was_killed(ended):
        return _killed(ended)
    if first is not None and first.end is RunEnd.CRASHED and (disk_full := _disk_full(ended)):
        return disk_full
    if first is not None and (ended.termination is None or ended.termination.end in _CONSEQUENCES):
        # One rank's failure leaves the others waiting: what hung afterwards is only a consequence.
        return LaunchResult(first.end, _detail_of(first), moment=first.moment)
    if ended.termination is not None:
        return LaunchResult(ended.termination.end, ended.termination.detail)
    if not marked:
        return _disk_full(ended) or LaunchResult(
            RunEnd.CRASHED, f"the engine never loaded our plugin{_last_words(ended)}"
        )
    if ended.code == -signal.SIGKILL or any(_KILLED.search(line) for line in ended.tail):
        return _killed(ended)
    return _disk_full(ended) or LaunchResult(
        RunEnd.CRASHED, f"the engine ended with {ended.code}{_last_words(ended)}"
    )


def _detail_of(failure: TrainingFailure) -> str:
    """A kernel is often named by the stack alone, and what follows depends on it."""
    detail = failure.detail
    if failure.end is not RunEnd.CRASHED or kernel_failure(detail) is not None:
        return detail
    named = kernel_failure(f"{detail}\n{failure.traceback}")
    if named is None:
        return detail
    return f"{detail} ({named.kind})" if named.line in detail else f"{detail} ({named})"


def _disk_full(ended: ProcessEnd) -> LaunchResult | None:
    """On a full disk the failure's own record is lost as well; its message is in the output."""
    line = next((line for line in ended.tail if is_disk_full(line)), None)
    full = line is not None or any(_EXIT_FULL.search(line) for line in ended.tail)
    return (
        LaunchResult(RunEnd.DISK_FULL, f"the disk is full: {line or 'a rank says so'}"[:500])
        if full
        else None
    )


def _was_killed(ended: ProcessEnd) -> bool:
    """A rank that was killed is the cause, and not what the others then say of a lost connection."""
    return any(_EXIT_9.search(line) for line in ended.tail)


def _weight(failure: TrainingFailure) -> tuple[bool, bool, float]:
    """Memory first: the ranks that did not run out fail as well, some of them sooner. Last those that only
    lost the connection to the others."""
    return failure.end is not RunEnd.OOM, failure.consequence, failure.at


def _last_words(ended: ProcessEnd) -> str:
    lines = [line for line in ended.tail if line.strip()][-_LAST_LINES:]
    return "; its last words:\n" + "\n".join(lines) if lines else " without a word"
