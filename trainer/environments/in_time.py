"""A call with a time limit: a foreign model's template or tokenizer may never end."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from trainer.errors import BadModel

T = TypeVar("T")


def in_time(call: Callable[[], T], seconds: float) -> T:
    """Call in a thread of its own; raise `TimeoutError` if that takes too long.

    Python code, such as a template, is then ended by an exception. Native code cannot be: its thread goes on,
    but does not keep the process alive."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except Exception as error:  # noqa: BLE001 - the caller gets it
            answer.set_exception(error)
        except BaseException as error:  # noqa: BLE001 - a tokenizer's panic, or our SystemExit
            answer.set_exception(BadModel(f"{type(error).__name__}: {error}"[:500]))

    thread = threading.Thread(target=work, name="in-time", daemon=True)
    thread.start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        if not answer.done():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
            )
        raise
