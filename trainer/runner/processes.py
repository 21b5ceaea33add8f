"""Start and end child processes: their environment, all that they start, and the request to stop.

Launchers put workers into sessions of their own, so signals to a group do not reach them. This process
becomes the parent of every orphan below it (`core.system.wrapper`); killing the tree leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import SystemRandom
from types import FrameType
from typing import IO, NamedTuple

from core.system import wrapper

log = logging.getLogger(__name__)

#: Lines of the engine's output that are kept for the report of a crash.
TAIL_LINES = 60
#: Longer lines are cut.
MAX_LINE_LENGTH = 20_000
#: A process that was killed is gone within this, unless it hangs in the kernel.
KILL_S = 10.0
#: Below those that Linux gives to connections, and to servers that ask for any.
_PORTS = range(10_000, 20_000)


def free_port() -> int:
    """Return a port that is free now; accelerate takes it a few seconds later. The system gives it to nobody
    who asks for any port. Not by `random`: a training's seed would give all trainings the same."""
    for port in SystemRandom().sample(_PORTS, len(_PORTS)):
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port of {_PORTS.start}-{_PORTS.stop - 1} is free on 127.0.0.1")


def kill_descendants(own: int | None = None) -> None:
    """Kill every process below this one, also those started meanwhile; reap all but the child `own`."""
    wrapper.kill_until_gone(wrapper.descendant_pids, KILL_S)
    wrapper.reap(own)


class TreeUse(NamedTuple):
    """CPU time and bytes read of a process and all below it, as far as they still run."""

    cpu_s: float
    read_bytes: int


def tree_use(root: int) -> TreeUse:
    """Add up what the system counts. Some systems count no reads; then these stay 0."""
    ticks, read = 0, 0
    for pid in (root, *wrapper.descendant_pids(root)):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2].split()
            ticks += int(fields[11]) + int(fields[12])
            # From files and pipes, and from disks by way of mapped files.
            for line in Path(f"/proc/{pid}/io").read_text().splitlines():
                name, _, number = line.partition(": ")
                read += int(number) if name in ("rchar", "read_bytes") else 0
    return TreeUse(ticks / os.sysconf("SC_CLK_TCK"), read)


class EngineProcess:
    """A program in a session of its own. Its output goes where ours goes; the last lines are kept."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: Path,
        on_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`on_line` gets every line, those of a progress bar too, in a thread of its own."""
        self._on_line = on_line
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process = subprocess.Popen(
            list(command),
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._copy_output, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def close(self) -> int:
        """Kill whatever is left of it, read the rest of its output, and return the exit code."""
        kill_descendants(self.pid)
        code = self._process.wait()
        self._reader.join(timeout=KILL_S)
        return code

    def _copy_output(self, stream: IO[bytes]) -> None:
        rest = b""
        while piece := os.read(stream.fileno(), 1 << 16):
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.buffer.write(piece)
                sys.stdout.buffer.flush()
            # A progress bar rewrites its line with a return and no new one.
            *lines, rest = (rest + piece).replace(b"\r", b"\n").split(b"\n")
            for line in lines:
                self._handle_line(line)
            rest = rest[-MAX_LINE_LENGTH:]
        self._handle_line(rest)

    def _handle_line(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").strip()[:MAX_LINE_LENGTH]
        if text:
            self.tail.append(text[:500])
            try:
                self._on_line(text)
            except Exception:  # without a reader the engine would block on its full pipe for ever
                log.exception("a line of the engine could not be handled: %s", text[:200])


class StopRequest:
    """The request to save and stop: by a signal, or by the stop file that the daemon writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._signalled = False

    def listen(self) -> None:
        """Take signals as requests from here on. As process 1, the default is to ignore them."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGUSR1, _on_dump)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
        # Where the file cannot be written, the training is ended when STOP_S of `supervise` is over.
        with contextlib.suppress(OSError):
            self._path.touch()

    @property
    def asked(self) -> bool:
        return self._signalled or self._path.exists()


def _on_dump(number: int, frame: FrameType | None) -> None:
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    wrapper.dump_stacks()


ROOT = Path(__file__).resolve().parents[2]

#: No library reads from the network or reports to it.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "AXOLOTL_DO_NOT_TRACK": "1",
    "WANDB_MODE": "offline",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}

#: The driver's user-space half that CUDA's own images bring along, for hosts with an older branch of it.
COMPAT = Path("/usr/local/cuda/compat")
DRIVER = Path("/proc/driver/nvidia/version")


def child_environment(work: Path, more: Mapping[str, str], path: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the environment of a child that runs our code: the plan's variables over ours, our packages
    first on its path."""
    environment = _offline(work, more)
    inherited = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    environment["PYTHONPATH"] = os.pathsep.join([*path, str(ROOT), *inherited])
    # The working directory must not be searched: what is there may have the name of a module.
    environment["PYTHONSAFEPATH"] = "1"
    return environment


def engine_environment(work: Path, more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an image engine: it imports its own modules from its script's directory, and
    nothing of ours."""
    environment = _offline(work, more)
    environment.pop("PYTHONPATH", None)
    environment.pop("PYTHONSAFEPATH", None)
    return environment


def _offline(work: Path, more: Mapping[str, str]) -> dict[str, str]:
    caches = _caches(work)
    for folder in {*caches.values()}:
        Path(folder).mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **OFFLINE, **caches, **more}
    if _driver_is_older():
        paths = filter(None, [str(COMPAT), environment.get("LD_LIBRARY_PATH")])
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
    # torch looks up the user's name for its cache directory; a uid without an entry has none.
    environment.setdefault("USER", "trainer")
    environment.setdefault("LOGNAME", environment["USER"])
    return environment


def _driver_is_older() -> bool:
    """Return True if the host's driver is of an older branch than the image's CUDA needs: CUDA 13 needs 580,
    many hosts have 535 to 570. NVIDIA supports this on data center GPUs from 535 on; container toolkits of
    1.17.4 and some later ones do not set it up. With a driver as new or newer, the image's half would fail.
    """
    try:
        host = re.search(r"\b(\d{3,})\.\d", DRIVER.read_text("utf-8"))
    except OSError:
        return False
    brought = [int(path.name.split(".")[2]) for path in COMPAT.glob("libcuda.so.[0-9]*.*")]
    return host is not None and bool(brought) and max(brought) > int(host[1])


def _caches(work: Path) -> dict[str, str]:
    cache = work / "cache"
    # Sockets are made in the temporary directory, and their paths may have 107 bytes: a short one is kept.
    temporary = {} if _writable_temporary() else {"TMPDIR": str(cache / "tmp")}
    return {
        **temporary,
        "HOME": str(cache / "home"),
        "XDG_CACHE_HOME": str(cache),
        "HF_HOME": str(cache / "hf"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "MPLCONFIGDIR": str(cache / "matplotlib"),
        "NUMBA_CACHE_DIR": str(cache / "numba"),
        "WANDB_DIR": str(cache / "wandb"),
    }


def _writable_temporary() -> bool:
    try:
        with tempfile.TemporaryFile():
            return True
    except OSError:
        return False
