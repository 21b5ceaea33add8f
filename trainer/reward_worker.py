"""The process that reward code runs in, told what to call line by line.

Started by `trainer.reward_keeper` in a folder and a session of its own, and isolated (`trainer.isolation`)
before it reads its first line; it holds no token and no model, and may be killed at any moment. It answers
every line with one: `{"rewards": [...]}`, `{"problem": "..."}`, or both.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import resource
import signal
import socket
from collections.abc import Callable
from typing import Any

MEMORY = 16 << 30
FILE = 64 << 20
OPEN_FILES = 256
LONGEST_PROBLEM = 500
#: Processes and threads of a user of its own.
PROCESSES = 1024
_PARENT_DIED = 1  # PR_SET_PDEATHSIG

Asked = dict[str, Any]


def limit(*, own_user: bool) -> None:
    """What a reward may use; and when its keeper is killed, this process goes with it. The limit on processes
    counts all those of a user, so it is set only where that user has no others."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGKILL)
    for kind, most in (
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, FILE),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        *([(resource.RLIMIT_NPROC, PROCESSES)] if own_user else []),
    ):
        with contextlib.suppress(OSError, ValueError):
            hard = resource.getrlimit(kind)[1]
            allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (allowed, allowed))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory runs out, this goes before the training


def loaded(source: str, function: str) -> Callable[..., Any]:
    namespace: dict[str, Any] = {"__name__": "reward"}
    exec(compile(source, "<reward>", "exec"), namespace)  # noqa: S102 - what this process is for
    found = namespace[function]
    if not callable(found):
        raise TypeError(f"{function} is {type(found).__name__}, no function")
    return found  # type: ignore[no-any-return]


def called(function: Callable[..., Any], completions: list[str], columns: Asked) -> Any:
    """As validators do: with what the row knows, and without it where the function does not take it."""
    if not columns:
        return function(completions)
    try:
        return function(completions, **columns)
    except TypeError:
        return function(completions)


def numbers(result: Any, count: int) -> list[float | None]:
    """A number for each completion; what is none of a row's is None."""
    if isinstance(result, str | bytes | dict):
        raise TypeError(f"returned {type(result).__name__} instead of a list")
    values = list(result)
    if len(values) != count:
        raise ValueError(f"returned {len(values)} rewards for {count} completions")
    return [_number(value) for value in values]


def _number(value: Any) -> float | None:
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if found - found == 0 else None  # neither infinite nor NaN


def answer(asked: Asked, functions: dict[int, Callable[..., Any]]) -> Asked:
    try:
        place = asked["place"]
        if place not in functions:
            functions[place] = loaded(asked["source"], asked["function"])
        return _rewards(functions[place], asked["completions"], asked["columns"])
    except ModuleNotFoundError as error:
        lacking = f"imports {error.name}, which is not installed where this training runs"
        return {"problem": f"{lacking} (images: build argument REWARD_PACKAGES)"[:LONGEST_PROBLEM]}
    except BaseException as error:  # noqa: BLE001 - reward code raises what it likes, SystemExit included
        return {"problem": _shown(error)}


def _rewards(function: Callable[..., Any], completions: list[str], columns: Asked) -> Asked:
    """One completion that a function cannot take costs its own reward, not those of all: where a call raises,
    each completion is tried alone, and the reason of the first that fails is told."""
    count = len(completions)
    try:
        result = called(function, completions, columns)
    except ModuleNotFoundError:
        raise
    except Exception as first:
        found = [_alone(function, completions, columns, row) for row in range(count if count > 1 else 0)]
        if all(one is None for one in found):
            raise
        problem = (
            f"no reward for {found.count(None)} of {count} completions, each called alone: {_shown(first)}"
        )
        return {"rewards": found, "problem": problem[:LONGEST_PROBLEM]}
    return {"rewards": numbers(result, count)}


def _alone(function: Callable[..., Any], completions: list[str], columns: Asked, row: int) -> float | None:
    count = len(completions)
    own = {name: value[row : row + 1] if len(value) == count else value for name, value in columns.items()}
    try:
        return numbers(called(function, completions[row : row + 1], own), 1)[0]
    except Exception:  # noqa: BLE001 - whatever it is, this completion has no reward
        return None


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:LONGEST_PROBLEM]


def serve(conversation: socket.socket, hello: Asked) -> None:
    """Say what holds this process, then answer every line with one."""
    functions: dict[int, Callable[..., Any]] = {}
    with conversation, conversation.makefile("rw", encoding="utf-8", errors="replace") as lines:
        lines.write(json.dumps(hello) + "\n")
        lines.flush()
        for line in lines:
            lines.write(json.dumps(answer(json.loads(line), functions)) + "\n")
            lines.flush()
