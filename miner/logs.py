"""Logs: one line per event, for people or for machines, with the task and job at hand, without secrets."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from core.units import rfc3339
from miner.redact import HIDDEN, Redactor

if TYPE_CHECKING:
    from miner.settings import Settings

#: What each line may carry besides its text, in this order.
CONTEXT_FIELDS = ("task_id", "job_id", "hotkey", "request_id")

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_context: ContextVar[Mapping[str, Any]] = ContextVar("log_context", default=_NOTHING)
_redact = Redactor()

#: They log every request or frame at INFO, and URLs with it.
_CHATTY = ("httpx", "httpcore", "websockets", "uvicorn.access", "asyncio", "alembic", "bittensor")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_COLOURS = {"DEBUG": "2", "INFO": "32", "WARNING": "33", "ERROR": "31", "CRITICAL": "1;31"}

#: Letters that end a line, move the cursor or turn the reading direction.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_NEEDS_QUOTES = re.compile(r"""[\s="']|^$""")
_DEEPEST = 6


def configure(
    settings: Settings, stream: TextIO | None = None, *, split: bool = False, least: int = logging.NOTSET
) -> None:
    """Sends every logger to one stream (stderr) in the wanted format. Later calls replace earlier ones.

    `split` is the daemon's way: what is no warning goes to stdout, since pm2 shows stderr as errors. `least`:
    nothing below that level, where a live view says the rest.
    """
    global _redact
    _redact = Redactor(settings.secrets())
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _Handler)]:
        root.removeHandler(old)
    target = sys.stderr if stream is None else stream
    wanted = [(target, max(least, logging.WARNING if split else logging.NOTSET))]
    wanted += [(sys.stdout, logging.NOTSET)] if split else []
    for place, level in wanted:
        handler = _Handler(place)
        handler.setLevel(level)
        handler.setFormatter(_formatter(settings.log_format, place))
        if place is not target:
            handler.addFilter(lambda record: record.levelno < logging.WARNING)
        root.addHandler(handler)
    root.setLevel(settings.log_level)
    _take_over(settings.log_level)


def lean() -> None:
    """For a process that logs a line for every request: what no line of ours tells is not looked up, by the
    switches that the standard library has for it. Where in the code a line is from is a third of its cost."""
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def hide(secret: str) -> None:
    """Keeps one more secret out of the logs."""
    _redact.add(secret)


@contextlib.contextmanager
def bind(**fields: Any) -> Iterator[None]:
    """Adds fields, such as `task_id` and `job_id`, to every line logged inside the block."""
    known = {name: value for name, value in fields.items() if value is not None}
    token = _context.set({**_context.get(), **known})
    try:
        yield
    finally:
        _context.reset(token)


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "ts": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "msg": _message(record),
        }
        fields = _fields(record)
        line |= {name: fields[name] for name in CONTEXT_FIELDS if name in fields}
        line |= {name: value for name, value in fields.items() if name not in line}
        if exception := _exception(self, record):
            line["exception"] = exception
        return json.dumps(line)


class ConsoleFormatter(logging.Formatter):
    """One line for people; a traceback follows indented, so that no text can pass for a line of its own."""

    def __init__(self, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname:<7}"
        if self._colour:
            level = f"\x1b[{_COLOURS.get(record.levelname, '0')}m{level}\x1b[0m"
        fields = "".join(f" {name}={_on_one_line(_plain(value))}" for name, value in _fields(record).items())
        text = f"{_time(record)} {level} {record.name}: {_on_one_line(_message(record))}{fields}"
        if exception := _exception(self, record):
            text += "".join(f"\n    | {_on_one_line(line)}" for line in exception.split("\n"))
        return text


class _Handler(logging.StreamHandler[TextIO]):
    """Ours, so that a second `configure` knows which one to replace."""

    def handleError(self, record: logging.LogRecord) -> None:
        """The stream is broken. The inherited way would print the message and its arguments, unhidden."""
        kind = sys.exc_info()[0]
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"a log line of {record.name} could not be written: {kind and kind.__name__}\n")


def _formatter(wanted: str, stream: TextIO) -> logging.Formatter:
    terminal = hasattr(stream, "isatty") and stream.isatty()
    if wanted == "json" or (wanted == "auto" and not terminal):
        return JsonFormatter()
    return ConsoleFormatter(colour=terminal and not os.environ.get("NO_COLOR"))


def _take_over(level: str) -> None:
    """Routes what would print by itself: uvicorn's handlers, warnings, uncaught exceptions."""
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.NOTSET if level == "DEBUG" else logging.WARNING)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda args: _log_uncaught(
        args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback
    )


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt | SystemExit):
        return
    logging.getLogger("miner").critical("uncaught exception", exc_info=(kind, error, traceback))


def _time(record: logging.LogRecord) -> str:
    return rfc3339(record.created)


def _message(record: logging.LogRecord) -> str:
    try:
        text = record.getMessage()
    except Exception as error:  # noqa: BLE001 - a wrong format string must neither lose the line nor show it raw
        text = f"{record.msg} {_text(record.args)} (log call is wrong: {error})"
    return _redact(text)


def _exception(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = []
    if record.exc_info:
        parts.append(formatter.formatException(record.exc_info))
    if record.stack_info:
        parts.append(record.stack_info)
    return _redact("\n".join(parts))


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    own = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    return {name: _clean(value) for name, value in {**_context.get(), **own}.items()}


def _clean(value: Any, depth: int = 0) -> Any:
    """A value as JSON can carry it, with no secret at any depth."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth < _DEEPEST:
        if isinstance(value, Mapping):
            return {_redact(_text(key)): _clean(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [_clean(item, depth + 1) for item in value]
    return _redact(_text(value))


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 - somebody's __str__ is broken; the line is worth more
        return f"<{type(value).__name__} that can not be shown: {type(error).__name__}>"


def _plain(value: Any) -> str:
    """Quoted where it could pass for the next field."""
    return value if isinstance(value, str) and not _NEEDS_QUOTES.search(value) else json.dumps(value)


def _on_one_line(text: str) -> str:
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


__all__ = [
    "CONTEXT_FIELDS",
    "HIDDEN",
    "ConsoleFormatter",
    "JsonFormatter",
    "bind",
    "configure",
    "hide",
    "lean",
]
