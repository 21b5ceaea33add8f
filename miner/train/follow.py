"""Starting a program of the training environment and telling what it says, until it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from core.progress import Event, NoteEvent, StageEvent, StepEvent, events_in
from core.run_files import LOG_FILE, RunResult, RunSpec
from core.units import show_bytes, show_seconds
from miner.train.runs import PROFILE_FILE

#: Of our environment the child needs no more; it has no business with the wallet or the hub.
PASSED = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "CUDA_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS",
)
FIXED = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
}
_POLL_S = 0.2
#: Steps are told this often.
STEPS_S = 2.0


def environment(profile: Path | None = None) -> dict[str, str]:
    import core

    passed = {name: os.environ[name] for name in PASSED if name in os.environ}
    source = str(Path(core.__file__).resolve().parents[1])
    chosen = {"GOD_MINER_PROFILE": str(profile)} if profile is not None else {}
    return {**passed, **FIXED, **chosen, "PYTHONPATH": source}


def train(python: Path, folder: Path, run: RunSpec, told: Callable[[Event], None]) -> int:
    """The run to its end; its exit code. Interrupted once, it saves and ends; twice, it is killed."""
    progress = Path(run.progress_path)
    start = progress.stat().st_size if progress.exists() else 0
    with (folder / LOG_FILE).open("ab") as log:
        child = subprocess.Popen(
            [python, "-m", "trainer.text", "--run", str(folder / "run.json")],
            env=environment(folder / PROFILE_FILE),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            for event in _followed(child, progress, start):
                told(event)
        finally:
            if child.poll() is None:
                child.kill()
        return child.wait()


def _followed(child: subprocess.Popen[bytes], progress: Path, start: int) -> Iterator[Event]:
    at, asked = start, False
    while True:
        try:
            ended = child.poll() is not None
            for line in events_in(_from(progress, at), at):
                at = line.offset
                if line.event is not None:
                    yield line.event
            if ended:
                return
            time.sleep(_POLL_S)
        except KeyboardInterrupt:
            if asked:
                raise
            asked = True
            child.send_signal(signal.SIGTERM)
            sys.stderr.write("asked to stop: what it has is saved; once more to end it at once\n")


def _from(path: Path, at: int) -> bytes:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(at)
        return file.read()
    return b""


def lines(python: Path, arguments: Sequence[str], profile: Path | None = None) -> Iterator[str]:
    """The output of a program of the training environment, line by line; its errors go to ours."""
    command = [str(python), "-m", *arguments]
    with subprocess.Popen(
        command, env=environment(profile), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        yield from child.stdout
    if child.returncode:
        raise SystemExit(child.returncode)


class Teller:
    """What happens, a line each; steps only now and then."""

    def __init__(self, write: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> None:
        self._write, self._now, self._next = write, now, 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            now = self._now()
            if now < self._next and event.step != event.total:
                return
            self._next = now + STEPS_S
        if text := sentence(event):
            self._write(text)


def sentence(event: Event) -> str:
    match event.event:
        case "step":
            return _step(event) if isinstance(event, StepEvent) else ""
        case "stage":
            return f"{event.stage}: {event.text}" if isinstance(event, StageEvent) and event.text else ""
        case "note":
            return f"{event.kind}: {event.text}" if isinstance(event, NoteEvent) else ""
        case "eval":
            best = ", the best so far" if event.best else ""
            return f"step {event.score.step:,}: {event.score.metric} {event.score.value:.4f}{best}"
        case "checkpoint":
            return f"step {event.step:,}: state saved"
        case "oom":
            return f"out of memory in {event.moment}: {event.text}"
    return ""


def _step(event: StepEvent) -> str:
    total = f"/{event.total:,}" if event.total else ""
    parts = [f"step {event.step:,}{total}"]
    parts += [f"loss {event.loss:.4f}"] if event.loss is not None else ["loss no number"]
    parts += [f"lr {event.lr:.2e}"] if event.lr is not None else []
    parts += [f"{event.tokens_s:,.0f} tokens/s"] if event.tokens_s else []
    parts += [f"MFU {event.mfu:.0%}"] if event.mfu else []
    parts += [f"waits {event.wait:.1%}"] if event.wait is not None else []
    parts += [show_bytes(event.memory_bytes)] if event.memory_bytes else []
    parts += [f"{show_seconds(max(event.ends_at - event.t, 0))} left"] if event.ends_at else []
    return "  ".join(parts)


def result_of(run: RunSpec) -> RunResult | None:
    try:
        return RunResult.model_validate_json(Path(run.result_path).read_bytes())
    except (OSError, ValueError):
        return None
