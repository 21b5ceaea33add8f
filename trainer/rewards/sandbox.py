"""Call reward code in a child process with a time limit: a reward can fail, but not end the training.

A function that raises, returns something other than one number per completion, takes too long, or kills its
process, gives zeros. The reason goes into the log and into progress.jsonl, once for each reason. One that
times out three times in a row is not called again: its time is better spent on training."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from core.runs.progress import NoteEvent, encode_event
from trainer.rewards.worker import MAX_REPLY_BYTES, PASSED_VARIABLES

log = logging.getLogger(__name__)

#: Seconds for a call: the first of a function loads what it imports.
FIRST_CALL, CALL, EACH = 90.0, 10.0, 0.3
#: Times in a row after which a function that never comes back is not called again.
PATIENCE = 3
#: Reasons that are reported at most: a message may differ at every call.
MAX_REPORTED = 50
#: The supervisor has so long to end before it is killed.
END_S = 15.0
#: The supervisor's program; it runs isolated from other modules.
_SUPERVISOR = "import sys; sys.path.insert(0, {root!r}); from trainer.rewards.worker import main; main()"
ROOT = Path(__file__).resolve().parents[2]
#: The socket of a backend that starts the supervisor as root, outside of the trainer's own processes.
SOCKET_VARIABLE = "GOD_MINER_REWARDS"


class NoRewardReply(Exception):
    """The process did not reply in time, or is gone."""


#: The problem of a call that took all of its time.
LATE = "it did not come back in time"


class RewardProcess:
    """One child process behind its supervisor; started when first needed."""

    def __init__(self) -> None:
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        #: The process that started it. Its forks have the same socket, which is not theirs to end.
        self._owner = 0
        #: How it is isolated, as it reports before it reads anything; and what it could still reach.
        self.isolation = ""
        self.exposed: tuple[str, ...] = ()

    def request(self, question: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Its reply. `NoRewardReply`, with the process ended, when there is none."""
        until = time.monotonic() + seconds
        try:
            connection = self._socket if self._socket is not None else self._start(until)
            line = _exchange(connection, json.dumps(question).encode() + b"\n", until)
            reply = json.loads(line)
            if not isinstance(reply, dict):
                raise NoRewardReply("it replied with something else than a reply")
        except (OSError, ValueError, RecursionError, NoRewardReply) as error:
            code = self.end()
            reason = str(error) if isinstance(error, NoRewardReply) else "its process ended"
            # One that is late was ended by us: its exit code means nothing.
            raise NoRewardReply(f"{reason} (exit {code})" if code and reason != LATE else reason) from error
        return reply

    def _start(self, until: float) -> socket.socket:
        """Through the backend's socket where there is one: it starts the supervisor as another user."""
        self._owner = os.getpid()
        path = os.environ.get(SOCKET_VARIABLE)
        if path:
            try:
                self._socket = socket.socket(socket.AF_UNIX)
                self._socket.connect(path)
                return self._read_hello(self._socket, until)
            except (OSError, ValueError, NoRewardReply) as error:
                log.warning("reward code is not started as another user: %s", error)
                self.end()
        self._socket, supervisor_socket = socket.socketpair()
        with supervisor_socket:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-c", _SUPERVISOR.format(root=str(ROOT))],
                env=_environment(),
                stdin=supervisor_socket.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        return self._read_hello(self._socket, until)

    def _read_hello(self, connection: socket.socket, until: float) -> socket.socket:
        hello = json.loads(_exchange(connection, b"", until))
        self.isolation, self.exposed = str(hello["isolation"]), tuple(map(str, hello["exposed"]))
        return connection

    def end(self) -> int | None:
        """The exit code, 128 and the signal's number for a signal; None where nobody knows it."""
        connection, self._socket = self._socket, None
        supervisor, self._supervisor = self._supervisor, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # a fork, as of a data loader, would keep it open
            connection.close()
        if supervisor is None:
            return None
        try:
            return supervisor.wait(END_S)
        except subprocess.TimeoutExpired:
            supervisor.kill()
            return supervisor.wait()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            if self._owner == os.getpid():
                self.end()


def _environment() -> dict[str, str]:
    passed = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
    return {**passed, "TMPDIR": tempfile.gettempdir()}


def _exchange(connection: socket.socket, question: bytes, until: float) -> bytes:
    """Both directions at once: a child that reads nothing must not keep us writing for ever."""
    connection.setblocking(False)
    reply, rest = bytearray(), memoryview(question)
    with selectors.DefaultSelector() as waiting:
        waiting.register(connection, selectors.EVENT_READ)
        while not reply.endswith(b"\n"):
            left = until - time.monotonic()
            if left <= 0:
                raise NoRewardReply(LATE)
            waiting.modify(connection, selectors.EVENT_READ | (selectors.EVENT_WRITE if rest else 0))
            for _, events in waiting.select(left):
                if events & selectors.EVENT_WRITE:
                    rest = rest[connection.send(rest[: 1 << 16]) :]
                if events & selectors.EVENT_READ:
                    read = connection.recv(1 << 16)
                    if not read:
                        raise NoRewardReply("its process ended")
                    reply += read
                    if len(reply) > MAX_REPLY_BYTES:
                        raise NoRewardReply("its reply is too long")
    return bytes(reply)


def describe_isolation() -> str:
    """Describe the isolation of reward code here; the text starts with `exposed` if it is not enough."""
    worker = RewardProcess()
    try:
        worker._start(time.monotonic() + FIRST_CALL)
    except (OSError, ValueError, KeyError, NoRewardReply) as error:
        return f"exposed: reward code cannot be started ({error})"
    finally:
        worker.end()
    return (
        f"exposed: {', '.join(worker.exposed)} ({worker.isolation})" if worker.exposed else worker.isolation
    )


class Rewards:
    """A task's reward functions, by their index in the request."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self._rewards: list[dict[str, Any]] = table["rewards"]
        self._only: list[str] | None = table["only"]
        self._decode: list[str] = table["decode"]
        self._progress: str | None = table["progress"]
        self._workers = [RewardProcess() for _ in self._rewards]
        self._called: set[int] = set()
        self._silent = [0] * len(self._rewards)
        self._reported: set[tuple[int, str]] = set()
        self._isolations: set[str] = set()

    @classmethod
    def open(cls, file: Path) -> Rewards:
        return cls(json.loads(file.read_text("utf-8")))

    def __len__(self) -> int:
        return len(self._rewards)

    @property
    def weights(self) -> list[float]:
        return [float(reward["weight"]) for reward in self._rewards]

    def call(self, place: int, completions: Sequence[str] | None, **columns: Any) -> list[float]:
        """One number for each completion, whatever happens."""
        texts = [
            completion if isinstance(completion, str) else str(completion) for completion in completions or ()
        ]
        rewards, problem = self.attempt(place, texts, columns)
        if problem is not None:
            self._report(place, problem)
        return rewards

    def attempt(
        self, place: int, completions: list[str], columns: Mapping[str, Any]
    ) -> tuple[list[float], str | None]:
        """The numbers, and what was wrong with them."""
        reward, zeros = self._rewards[place], [0.0] * len(completions)
        if reward["problem"] is not None:
            return zeros, str(reward["problem"])
        if self._silent[place] >= PATIENCE:
            return zeros, "is not called any more, it never came back"
        question = {
            "place": place,
            "source": reward["source"],
            "function": reward["function"],
            "completions": completions,
            "columns": self._known(reward, columns),
        }
        first = FIRST_CALL if place not in self._called else CALL
        try:
            reply = self._workers[place].request(question, first + EACH * len(completions))
        except NoRewardReply as error:
            self._silent[place] += 1
            return zeros, str(error)
        finally:
            self._report_isolation(self._workers[place])
        self._silent[place] = 0
        self._called.add(place)
        return _numbers(reply, zeros)

    def problems(self, completions: list[str], **columns: Any) -> list[str | None]:
        """Return what is wrong with each function when called with these, as validators try them."""
        return [self.attempt(place, completions, columns)[1] for place in range(len(self))]

    def _known(self, reward: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
        """The columns that the function takes and JSON can represent."""
        taken = {
            name: value
            for name, value in columns.items()
            if (reward["anything"] or name in reward["parameters"])
            and (self._only is None or (name in self._only and name in reward["parameters"]))
        }
        plain = {name: value for name, value in taken.items() if isinstance(value, list) and _plain(value)}
        return {
            name: [_decoded(item) for item in value] if name in self._decode else value
            for name, value in plain.items()
        }

    def _report_isolation(self, worker: RewardProcess) -> None:
        if not worker.isolation or worker.isolation in self._isolations:
            return
        self._isolations.add(worker.isolation)
        log.info("reward code runs as %s", worker.isolation)
        if worker.exposed:
            self._note(f"reward code could reach {', '.join(worker.exposed)}: it runs as {worker.isolation}")

    def _report(self, place: int, problem: str) -> None:
        if (place, problem) in self._reported or len(self._reported) >= MAX_REPORTED:
            return
        self._reported.add((place, problem))
        self._note(f"reward {place} gives zeros: {problem}")

    def _note(self, text: str) -> None:
        log.warning("%s", text)
        if self._progress is not None:
            event = NoteEvent(t=time.time(), kind="reward", text=text[:2000])
            with contextlib.suppress(OSError), open(self._progress, "ab", buffering=0) as file:
                file.write(encode_event(event))

    def close(self) -> None:
        for worker in self._workers:
            worker.end()


def _numbers(reply: Mapping[str, Any], zeros: list[float]) -> tuple[list[float], str | None]:
    own_problem = reply.get("problem")
    values = reply.get("rewards")
    if values is None and own_problem is not None:
        return zeros, str(own_problem)
    if not isinstance(values, list) or len(values) != len(zeros):
        return zeros, "replied with something else than its rewards"
    # The child has seen to it that they are numbers; but what runs in there can answer in its place.
    numbers = [_finite(value) for value in values]
    problem = "a reward that is no finite number counts as zero" if None in numbers else None
    return [value or 0.0 for value in numbers], str(own_problem) if own_problem is not None else problem


def _finite(value: Any) -> float | None:
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _decoded(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _plain(value: object) -> bool:
    """Return True if JSON can represent a value: cheaply, by the first item that is not None."""
    while isinstance(value, list):
        value = next((item for item in value if item is not None), None)
    return value is None or isinstance(value, str | int | float | dict)
