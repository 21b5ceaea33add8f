"""The worker that runs reward code, and the supervisor above it.

The supervisor starts the worker as another user where it may, and isolated; passes on requests and replies
without reading them; and kills everything that a reward has started as soon as its call is over. The worker
answers each line with one: {"rewards": [...]}, {"problem": "..."}, or both.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from core.system.files import remove_tree
from core.system.privileges import become_user
from core.system.wrapper import adopt_orphans, descendant_pids, reap
from trainer.rewards import isolation

MEMORY_LIMIT = 16 << 30
FILE_LIMIT = 64 << 20
OPEN_FILES = 256
MAX_PROBLEM_LENGTH = 500
#: Processes that a reward may have at a time. Where it has a user of its own the kernel counts, threads too.
PROCESS_LIMIT = 1024

RewardRequest = dict[str, Any]


def limit_resources(*, own_user: bool) -> None:
    """Limit what a reward may use. The limit on processes counts all those of a user, so it is set only if
    that user has no others. Must come before the change of user: another may not write into /proc/self."""
    for kind, most in (
        (resource.RLIMIT_AS, MEMORY_LIMIT),
        (resource.RLIMIT_FSIZE, FILE_LIMIT),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        *([(resource.RLIMIT_NPROC, PROCESS_LIMIT)] if own_user else []),
    ):
        with contextlib.suppress(OSError, ValueError):
            hard = resource.getrlimit(kind)[1]
            allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (allowed, allowed))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory runs out, this goes before the training


def load_function(source: str, function: str) -> Callable[..., Any]:
    namespace: dict[str, Any] = {"__name__": "reward"}
    # For a reviewer: reward functions come as source text, in the validator's own arguments of a GRPO task.
    exec(compile(source, "<reward>", "exec"), namespace)  # noqa: S102 - what this process is for
    loaded = namespace[function]
    if not callable(loaded):
        raise TypeError(f"{function} is {type(loaded).__name__}, no function")
    return loaded  # type: ignore[no-any-return]


def call_function(function: Callable[..., Any], completions: list[str], columns: RewardRequest) -> Any:
    """Call as validators do: with the columns of the row, or without if the function does not take them."""
    if not columns:
        return function(completions)
    try:
        return function(completions, **columns)
    except TypeError:
        return function(completions)


def as_numbers(result: Any, count: int) -> list[float | None]:
    """A number for each completion; None for a value that is not a number."""
    if isinstance(result, str | bytes | dict):
        raise TypeError(f"returned {type(result).__name__} instead of a list")
    values = list(result)
    if len(values) != count:
        raise ValueError(f"returned {len(values)} rewards for {count} completions")
    return [_number(value) for value in values]


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number - number == 0 else None  # neither infinite nor NaN


def answer_request(request: RewardRequest, functions: dict[int, Callable[..., Any]]) -> RewardRequest:
    try:
        place = request["place"]
        if place not in functions:
            functions[place] = load_function(request["source"], request["function"])
        return _rewards(functions[place], request["completions"], request["columns"])
    except ModuleNotFoundError as error:
        lacking = f"imports {error.name}, which is not installed where this training runs"
        return {"problem": f"{lacking} (images: build argument REWARD_PACKAGES)"[:MAX_PROBLEM_LENGTH]}
    except BaseException as error:  # noqa: BLE001 - reward code raises what it likes, SystemExit included
        return {"problem": _problem_text(error)}


def _rewards(function: Callable[..., Any], completions: list[str], columns: RewardRequest) -> RewardRequest:
    """One completion that a function cannot take costs its own reward, not those of all: where a call raises,
    each completion is tried alone, and the reply has the first reason."""
    count = len(completions)
    try:
        result = call_function(function, completions, columns)
    except ModuleNotFoundError:
        raise
    except Exception as first:
        rewards = [_alone(function, completions, columns, row) for row in range(count if count > 1 else 0)]
        if all(reward is None for reward in rewards):
            raise
        problem = f"for each completion at which it raises: {_problem_text(first)}"
        return {"rewards": rewards, "problem": problem[:MAX_PROBLEM_LENGTH]}
    return {"rewards": as_numbers(result, count)}


def _alone(
    function: Callable[..., Any], completions: list[str], columns: RewardRequest, row: int
) -> float | None:
    count = len(completions)
    own = {name: value[row : row + 1] if len(value) == count else value for name, value in columns.items()}
    try:
        return as_numbers(call_function(function, completions[row : row + 1], own), 1)[0]
    except Exception:  # noqa: BLE001 - whatever it is, this completion has no reward
        return None


def _problem_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_PROBLEM_LENGTH]


def serve(conversation: socket.socket, hello: RewardRequest) -> None:
    """Send how this process is isolated, then answer every line with one."""
    functions: dict[int, Callable[..., Any]] = {}
    with conversation, conversation.makefile("rw", encoding="utf-8", errors="replace") as lines:
        lines.write(json.dumps(hello) + "\n")
        lines.flush()
        for line in lines:
            lines.write(json.dumps(answer_request(json.loads(line), functions)) + "\n")
            lines.flush()


#: The user to become is chosen by whoever starts this with the right to become one.
UID_VARIABLE = "GOD_MINER_REWARD_UID"
#: The variables of ours that a reward's process gets. No GPU: the training's memory is planned to the last
#: gigabyte.
PASSED_VARIABLES = ("PATH", "LANG", "LC_ALL", "HF_HOME", "TORCH_HOME", "NLTK_DATA", "SYSTEMROOT")
FIXED_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
MAX_REPLY_BYTES = 16 << 20
#: How often the processes are counted, and how long those that were killed may take to go.
TICK_S, END_S = 0.25, 5.0
PIECE = 1 << 16


def main() -> None:
    trainer = socket.socket(fileno=os.dup(0))
    devnull = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(devnull, stream)
    adopt_orphans()
    scratch = tempfile.gettempdir()
    uid = isolation.usable_uid(int(os.environ.get(UID_VARIABLE, isolation.FIRST_UID)), scratch)
    folder = os.path.join(scratch, f"reward-{secrets.token_hex(8)}")
    forbidden_file = f"{folder}.ours"
    with open(os.open(forbidden_file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb"):
        pass
    ours, other = socket.socketpair()
    worker = os.fork()
    if worker == 0:
        _run_worker(other, uid, folder, forbidden_file)
    other.close()
    try:
        _relay(trainer, ours, worker)
    finally:
        end_all(worker)
        _remove_as(uid, folder)
        for leftover in (forbidden_file, forbidden_file + ".moved"):
            with contextlib.suppress(OSError):
                os.unlink(leftover)
    sys.exit(_exit_code(worker))


def _run_worker(conversation: socket.socket, uid: int | None, folder: str, forbidden_file: str) -> None:
    """Never returns: the fork of the supervisor must not go on as the supervisor."""
    code = 1
    try:
        os.setsid()
        supervisor = os.getppid()
        os.dup2(conversation.detach(), 3)
        os.closerange(4, 1 << 16)
        limit_resources(own_user=uid is not None)
        if uid is not None:
            become_user(uid)
        os.mkdir(folder, 0o700)
        os.chdir(folder)
        passed = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
        os.environ.clear()
        os.environ.update({**passed, **FIXED_VARIABLES, "HOME": folder, "TMPDIR": folder})
        tempfile.tempdir = None
        sys.path[:] = [place for place in sys.path if place and place != _root()]
        held = isolation.isolate_process(
            folder, own_user=uid is not None, forbidden_file=forbidden_file, supervisor=supervisor
        )
        for name in [name for name in sys.modules if name.partition(".")[0] in ("core", "trainer")]:
            del sys.modules[name]
        hello = {"isolation": held.means, "exposed": held.exposed}
        serve(socket.socket(fileno=3), hello)
        code = 0
    finally:
        os._exit(code)


def _root() -> str:
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def _relay(trainer: socket.socket, worker: socket.socket, pid: int) -> None:
    """Until one of the two is gone, sends too much, or has too many children."""
    questions, reply, counted = bytearray(), bytearray(), 0.0
    worker.setblocking(False)
    with selectors.DefaultSelector() as waiting:
        waiting.register(trainer, selectors.EVENT_READ)
        waiting.register(worker, selectors.EVENT_READ)
        while True:
            waiting.modify(worker, selectors.EVENT_READ | (selectors.EVENT_WRITE if questions else 0))
            ready = {key.fileobj: events for key, events in waiting.select(TICK_S)}
            if trainer in ready:
                data = trainer.recv(PIECE)
                if not data:
                    return
                questions += data
            if ready.get(worker, 0) & selectors.EVENT_WRITE:
                with contextlib.suppress(BlockingIOError):
                    del questions[: worker.send(questions)]
            if ready.get(worker, 0) & selectors.EVENT_READ:
                data = worker.recv(PIECE)
                reply += data
                if not data or len(reply) > MAX_REPLY_BYTES:
                    return
                if reply.endswith(b"\n"):
                    end_all(pid, spare=True)
                    trainer.sendall(reply)
                    reply.clear()
            if time.monotonic() - counted > TICK_S:
                counted = time.monotonic()
                below = descendant_pids()
                if pid not in below:
                    return
                if len(below) > PROCESS_LIMIT:
                    end_all(pid)
                    trainer.sendall(b'{"problem": "started more than %d processes"}\n' % PROCESS_LIMIT)
                    return


def end_all(worker: int, *, spare: bool = False) -> None:
    """Kill everything below this process, or all but the worker itself. All are stopped first: otherwise a
    process could fork faster than it is killed."""
    until = time.monotonic() + END_S
    while (
        left := [pid for pid in descendant_pids() if not (spare and pid == worker)]
    ) and time.monotonic() < until:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        reap(worker)
        time.sleep(0.002)


def _exit_code(worker: int) -> int:
    with contextlib.suppress(ChildProcessError):
        code = os.waitstatus_to_exitcode(os.waitpid(worker, os.WNOHANG)[1])
        return code if code >= 0 else 128 - code
    return 1


def _remove_as(uid: int | None, folder: str) -> None:
    """Delete the folder as the user who owns it: root without its capabilities may not enter it."""
    child = os.fork()
    if child == 0:
        try:
            if uid is not None:
                become_user(uid)
            remove_tree(folder)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
