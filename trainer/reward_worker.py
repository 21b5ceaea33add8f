"""The process that reward code runs in: PYTHON -I reward_worker.py, told what to call line by line.

Started by `trainer.sandbox` with a clean environment, in a folder and a session of its own; it holds no token
and no model, imports nothing of this project, and may be killed at any moment. It answers every line with
one: `{"rewards": [...]}` or `{"problem": "..."}`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

MEMORY = 16 << 30
FILE = 64 << 20
OPEN_FILES = 256
LONGEST_PROBLEM = 500
_PARENT_DIED = 1  # PR_SET_PDEATHSIG

Asked = dict[str, Any]


def limit() -> None:
    """What a reward may use; and when the training is killed, this process goes with it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGKILL)
    for kind, most in (
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, FILE),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(OSError, ValueError):
            hard = resource.getrlimit(kind)[1]
            allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (allowed, allowed))


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
        result = called(functions[place], asked["completions"], asked["columns"])
        return {"rewards": numbers(result, len(asked["completions"]))}
    except ModuleNotFoundError as error:
        lacking = f"imports {error.name}, which is not installed where this training runs"
        return {"problem": f"{lacking} (images: build argument REWARD_PACKAGES)"[:LONGEST_PROBLEM]}
    except BaseException as error:  # noqa: BLE001 - reward code raises what it likes, SystemExit included
        return {"problem": f"{type(error).__name__}: {error}"[:LONGEST_PROBLEM]}


def main() -> None:
    limit()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # what a reward prints is neither a reply nor worth a log
        os.dup2(nowhere, stream)
    functions: dict[int, Callable[..., Any]] = {}
    with open(os.dup(0), encoding="utf-8") as questions:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for line in questions:
            replies.write(json.dumps(answer(json.loads(line), functions)) + "\n")
            replies.flush()


if __name__ == "__main__":
    sys.path[:] = [place for place in sys.path if place]
    main()
