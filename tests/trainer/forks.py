"""Programs of the runner started by forking a process that has everything imported already."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Queue
from typing import NoReturn

from core.system.wrapper import descendant_pids
from tests.trainer import fork_server

ROOT = Path(__file__).parents[2]
#: For importing the training stack, half a minute on an idle machine.
START_LIMIT_S = 800.0
#: For a program that takes seconds on an idle machine.
RUN_LIMIT_S = 800.0


class ForkServer:
    """One for many trainings. Use as a context: `anew` in a process of its own making, else as a fork of this
    one, which has computed nothing yet."""

    def __init__(self, *, anew: bool = True) -> None:
        self._anew = anew
        self._codes: dict[int, int] = {}
        self._pids: Queue[int] = Queue()
        self._ready, self._ended = threading.Event(), False

    def __enter__(self) -> ForkServer:
        (asked, asks), (answers, answered) = os.pipe(), os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _serve((asked, answered), self._anew)
        os.close(asked)
        os.close(answered)
        self._asks, self._answers = os.fdopen(asks, "w"), os.fdopen(answers)
        threading.Thread(target=self._listen, daemon=True).start()
        if not self._ready.wait(START_LIMIT_S) or self._ended:
            raise RuntimeError("the training stack was not imported")
        return self

    def __exit__(self, *error: object) -> None:
        for pid in descendant_pids(self._pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._asks.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def _listen(self) -> None:
        for line in self._answers:
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
        self._ended = True
        self._ready.set()

    def start(self, command: Sequence[str], env: Mapping[str, str], cwd: Path, patch: str = "") -> Fork:
        """In the place of `Child`; `patch` names one of `tests.trainer.faults`."""
        log = cwd / "log"
        ask = {"command": list(command), "env": dict(env), "cwd": str(cwd), "log": str(log), "patch": patch}
        self._asks.write(json.dumps(ask) + "\n")
        self._asks.flush()
        return Fork(self._pids.get(timeout=RUN_LIMIT_S), self._codes, log)

    def run(self, command: Sequence[str], env: Mapping[str, str], cwd: Path) -> tuple[int, str]:
        """To its end: the exit code, and all that it said."""
        fork, until = self.start(command, env, cwd), time.monotonic() + RUN_LIMIT_S
        while fork.ended() is None and time.monotonic() < until:
            time.sleep(0.02)
        code = fork.close() if fork.ended() is None else fork.ended()
        assert code is not None
        return code, (cwd / "log").read_text("utf-8", "replace")


def _serve(ends: tuple[int, int], anew: bool) -> NoReturn:
    code = 1
    try:
        for end, descriptor in zip((*ends, os.open(os.devnull, os.O_WRONLY)), range(3), strict=True):
            os.dup2(end, descriptor)
        if anew:
            os.chdir(ROOT)
            environment = {
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
            }
            os.execve(sys.executable, [sys.executable, "-m", "tests.trainer.fork_server"], environment)
        fork_server.main()
        code = 0
    finally:
        os._exit(code)


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
