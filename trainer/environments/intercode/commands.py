"""The process that runs commands: each in a child that may change one folder, reach no other process and no
network, and has an end.

Like the supervisor of reward code it runs isolated from other modules and imports the standard library and
what is written for that alone. It answers each line of JSON on its socket with one.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from core.system.privileges import become_user
from core.system.wrapper import adopt_orphans, descendants
from trainer.rewards.isolation import FIRST_UID, Isolation, can_work, isolate_process
from trainer.rewards.worker import end_all, limit_resources

SHELL = "/bin/bash"
#: Bytes of each stream, and processes at a time, after which a command is ended.
MOST_OUTPUT, MOST_PROCESSES = 1 << 20, 200
TICK_S = 0.25
#: Above the users of reward code. Each of these processes has its own, by its process id.
FIRST_COMMANDS_UID = FIRST_UID + 100_000_000
_CANNOT_RUN, _KILLED = 126, 137
_READY = b"ready"


def main() -> None:
    trainer = socket.socket(fileno=os.dup(0))
    folder, forbidden_file = sys.argv[1:3]
    devnull = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(devnull, stream)
    adopt_orphans()
    uid = _own_user(folder)
    with trainer, trainer.makefile("rw", encoding="utf-8", errors="replace") as lines:
        isolation = _tried(folder, forbidden_file, uid)
        _answer(lines, {"isolation": isolation.means, "exposed": isolation.exposed, "uid": uid})
        for line in lines:
            request = json.loads(line)
            isolate = partial(_isolate, folder, forbidden_file, uid, request["workdir"])
            _answer(lines, _run(request["command"], request["seconds"], uid, isolate))


def _answer(lines: Any, answer: dict[str, Any]) -> None:
    lines.write(json.dumps(answer) + "\n")
    lines.flush()


def _own_user(folder: str) -> int | None:
    """Return a user for the commands and give it the folder; None if we may not become another user."""
    uid = FIRST_COMMANDS_UID + os.getpid()
    if os.geteuid() != 0:
        return None
    with contextlib.suppress(OSError):
        os.chown(folder, uid, uid)
        if can_work(uid, [], folder):
            return uid
        os.chown(folder, 0, 0)
    return None


def _isolate(folder: str, forbidden_file: str, uid: int | None, workdir: str) -> Isolation:
    supervisor = os.getppid()
    limit_resources(own_user=uid is not None)
    if uid is not None:
        become_user(uid)
    os.chdir(workdir)
    return isolate_process(
        folder,
        own_user=uid is not None,
        forbidden_file=forbidden_file,
        supervisor=supervisor,
        for_shell=True,
    )


def _tried(folder: str, forbidden_file: str, uid: int | None) -> Isolation:
    """Find out in a child how commands can be isolated, because isolation cannot be removed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, json.dumps(_isolate(folder, forbidden_file, uid, folder)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        found = file.read()
    os.waitpid(child, 0)
    means, exposed = json.loads(found or b'["nothing", ["everything"]]')
    return Isolation(means, tuple(exposed))


def _run(command: str, seconds: float, uid: int | None, isolate: Callable[[], object]) -> dict[str, Any]:
    """Its output and exit code; `started` is false for what no shell can be started with."""
    pipes = [os.pipe() for _ in range(3)]
    if uid is not None:
        for _, writing in pipes[:2]:
            os.fchown(writing, uid, uid)  # for programs that open /dev/stdout or /dev/stderr by name
    child = os.fork()
    if child == 0:
        code = _CANNOT_RUN
        try:
            os.setsid()
            os.dup2(pipes[0][1], 1)
            os.dup2(pipes[1][1], 2)
            os.dup2(pipes[2][1], 3)
            os.closerange(4, 1 << 12)
            isolate()
            os.write(3, _READY)
            os.set_inheritable(3, False)
            os.execv(SHELL, [SHELL, "-c", command])  # noqa: S606 - what this process is for
        except (OSError, ValueError):
            with contextlib.suppress(OSError):
                os.write(3, b" not")
        finally:
            os._exit(code)
    for _, writing in pipes:
        os.close(writing)
    try:
        outputs, ended = _collect(child, [pipes[0][0], pipes[1][0]], seconds)
        with open(pipes[2][0], "rb") as file:
            started = file.read() == _READY
        stdout, stderr = (bytes(output).decode("utf-8", "replace") for output in outputs)
        return {
            "started": started,
            "stdout": stdout,
            "stderr": stderr,
            "code": _KILLED if ended is None else ended,
            "late": ended is None,
        }
    finally:
        for reading, _ in pipes[:2]:
            os.close(reading)


def _collect(child: int, streams: list[int], seconds: float) -> tuple[list[bytearray], int | None]:
    """Return the output until the command and all that it started have closed theirs, and the exit code,
    or None if the command had to be ended."""
    outputs = [bytearray() for _ in streams]
    until, counted, complete = time.monotonic() + seconds, time.monotonic(), False
    with selectors.DefaultSelector() as waiting:
        for place, stream in enumerate(streams):
            waiting.register(stream, selectors.EVENT_READ, place)
        while (left := until - time.monotonic()) > 0:
            for key, _ in waiting.select(min(left, TICK_S)):
                data = os.read(key.fd, 1 << 16)
                outputs[key.data] += data
                if not data:
                    waiting.unregister(key.fd)
            if complete := not waiting.get_map():
                break
            if max(map(len, outputs)) > MOST_OUTPUT:
                break
            if time.monotonic() - counted > TICK_S:
                counted = time.monotonic()
                if len(descendants()) > MOST_PROCESSES:
                    break
    code = _exit_code(child, until) if complete else None
    if _children_left():
        end_all(child)
    if code is None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
    return outputs, code


def _children_left() -> bool:
    """Orphans come to this process: where it has no child, nothing is left of the command."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _exit_code(child: int, until: float) -> int | None:
    """It has closed its outputs, and ends soon as a rule."""
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if time.monotonic() > until:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            return None
        time.sleep(0.001)
