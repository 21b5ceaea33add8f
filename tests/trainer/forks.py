"""Programs of the runner started by forking a process that has everything imported already."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Queue

from core.system.wrapper import descendant_pids

ROOT = Path(__file__).parents[2]
#: For importing the training stack, half a minute on an idle machine.
START_LIMIT_S = 800.0
#: For a program that takes seconds on an idle machine.
RUN_LIMIT_S = 800.0


class ForkServer:
    """One for many trainings. Use as a context."""

    def __init__(self) -> None:
        self._codes: dict[int, int] = {}
        self._pids: Queue[int] = Queue()
        self._ready = threading.Event()

    def __enter__(self) -> ForkServer:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.fork_server"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()
        until = time.monotonic() + START_LIMIT_S
        while not self._ready.wait(1):
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the training stack was not imported; exit {self._process.poll()}")
        return self

    def __exit__(self, *error: object) -> None:
        for pid in descendant_pids(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                said = json.loads(line)
            except ValueError:
                continue
            if "ready" in said:
                self._ready.set()
            elif "pid" in said:
                self._codes.pop(said["pid"], None)  # of an earlier program: numbers come again
                self._pids.put(said["pid"])
            elif "ended" in said:
                self._codes[said["ended"]] = said["code"]

    def start(self, command: Sequence[str], env: Mapping[str, str], cwd: Path, patch: str = "") -> Fork:
        """In the place of `Child`; `patch` names one of `tests.trainer.faults`."""
        log = cwd / "log"
        ask = {"command": list(command), "env": dict(env), "cwd": str(cwd), "log": str(log), "patch": patch}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(ask) + "\n")
        self._process.stdin.flush()
        return Fork(self._pids.get(timeout=RUN_LIMIT_S), self._codes, log)

    def run(self, command: Sequence[str], env: Mapping[str, str], cwd: Path) -> tuple[int, str]:
        """To its end: the exit code, and all that it said."""
        fork, until = self.start(command, env, cwd), time.monotonic() + RUN_LIMIT_S
        while fork.ended() is None and time.monotonic() < until:
            time.sleep(0.02)
        code = fork.close() if fork.ended() is None else fork.ended()
        assert code is not None
        return code, (cwd / "log").read_text("utf-8", "replace")


class Fork:
    def __init__(self, pid: int, codes: dict[int, int], log: Path) -> None:
        self.pid, self._codes, self._log = pid, codes, log

    @property
    def tail(self) -> list[str]:
        return self._log.read_text("utf-8", "replace").splitlines()[-60:] if self._log.exists() else []

    def ended(self) -> int | None:
        return self._codes.get(self.pid)

    def kill(self) -> None:
        for pid in (*descendant_pids(self.pid), self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> int:
        until = time.monotonic() + 20
        while self.ended() is None and time.monotonic() < until:
            self.kill()
            time.sleep(0.02)
        return self._codes.get(self.pid, -9)
