"""Logs: one line per event, for people or machines, with the task and job in hand, without secrets."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType, TracebackType
from typing import Any, Protocol, TextIO

from core.domain.units import rfc3339
from miner.observe.redact import Redactor

#: Fields of a line besides its text, in this order.
CONTEXT_FIELDS = ("task_id", "job_id", "hotkey", "request_id")

_NO_FIELDS: Mapping[str, Any] = MappingProxyType({})
_context: ContextVar[Mapping[str, Any]] = ContextVar("log_context", default=_NO_FIELDS)
_redact = Redactor()

#: Loggers that report every request or frame at INFO, URLs included.
_VERBOSE_LIBRARIES = ("httpx", "httpcore", "websockets", "uvicorn.access", "asyncio", "bittensor")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_COLOURS = {"DEBUG": "2", "INFO": "32", "WARNING": "33", "ERROR": "31", "CRITICAL": "1;31"}

#: Letters that end a line, move the cursor or turn the reading direction.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_NEEDS_QUOTES = re.compile(r"""[\s="']|^$""")
_MAX_DEPTH = 6


class LogSettings(Protocol):
    """The settings that logging needs."""

    @property
    def log_format(self) -> str: ...

    @property
    def log_level(self) -> str: ...

    def secrets(self) -> Iterable[str]: ...


def configure(
    settings: LogSettings, stream: TextIO | None = None, *, split: bool = False, least: int = logging.NOTSET
) -> None:
    """Send every logger to one stream (stderr) in the configured format. Later calls replace earlier ones.

    `split` is for the daemon: lines below WARNING go to stdout, since pm2 shows stderr as errors. `least`:
    nothing below that level, for a command whose live view shows the rest.
    """
    global _redact
    _redact = Redactor(settings.secrets())
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _LogHandler)]:
        root.removeHandler(old)
    target = sys.stderr if stream is None else stream
    streams = [(target, max(least, logging.WARNING if split else logging.NOTSET))]
    streams += [(sys.stdout, logging.NOTSET)] if split else []
    for destination, level in streams:
        handler = _LogHandler(destination)
        handler.setLevel(level)
        handler.setFormatter(_formatter(settings.log_format, destination))
        if destination is not target:
            handler.addFilter(lambda record: record.levelno < logging.WARNING)
        root.addHandler(handler)
    root.setLevel(settings.log_level)
    _redirect_other_output(settings.log_level)


def skip_call_sites() -> None:
    """Stop looking up what no format of ours shows, for a process that logs every request.
    Finding the line of code is a third of a record's cost."""
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


@contextlib.contextmanager
def bind(**fields: Any) -> Iterator[None]:
    """Add fields, such as `task_id` and `job_id`, to every line logged inside the block."""
    known = {name: value for name, value in fields.items() if value is not None}
    token = _context.set({**_context.get(), **known})
    try:
        yield
    finally:
        _context.reset(token)


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
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
    """One line for people. A traceback follows indented, so that no text can pass for a line of its own."""

    def __init__(self, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname:<7}"
        if self._colour:
            level = f"\x1b[{_COLOURS.get(record.levelname, '0')}m{level}\x1b[0m"
        fields = "".join(
            f" {name}={_on_one_line(_quoted_if_needed(value))}" for name, value in _fields(record).items()
        )
        text = f"{_time(record)} {level} {record.name}: {_on_one_line(_message(record))}{fields}"
        if exception := _exception(self, record):
            text += "".join(f"\n    | {_on_one_line(line)}" for line in exception.split("\n"))
        return text


class _LogHandler(logging.StreamHandler[TextIO]):
    """Our own class, so that a second `configure` knows which handlers to replace."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore a broken stream. The inherited method would print message and arguments unredacted."""
        kind = sys.exc_info()[0]
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"a log line of {record.name} could not be written: {kind and kind.__name__}\n")


def _formatter(log_format: str, stream: TextIO) -> logging.Formatter:
    terminal = hasattr(stream, "isatty") and stream.isatty()
    if log_format == "json" or (log_format == "auto" and not terminal):
        return JsonFormatter()
    return ConsoleFormatter(colour=terminal and not os.environ.get("NO_COLOR"))


def _redirect_other_output(level: str) -> None:
    """Redirect everything that prints by itself: uvicorn's handlers, warnings, uncaught exceptions."""
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)
    for name in _VERBOSE_LIBRARIES:
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
    except Exception as error:  # noqa: BLE001 - a wrong format string must neither lose the line nor show it unredacted
        text = f"{record.msg} {_text(record.args)} (log call is wrong: {error})"
    return _redact(text)


def _exception(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = []
    if record.exc_info:
        parts.append(formatter.formatException(record.exc_info))
    if record.stack_info:
        parts.append(record.stack_info)
    return _redact("\n".join(parts))


def _fields(record: logging.LogRecord) -> dict[str, object]:
    own = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    return {name: _json_value(value) for name, value in {**_context.get(), **own}.items()}


def _json_value(value: Any, depth: int = 0) -> Any:
    """Make a value fit for JSON, without secrets at any depth."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth < _MAX_DEPTH:
        if isinstance(value, Mapping):
            return {_redact(_text(key)): _json_value(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [_json_value(item, depth + 1) for item in value]
    return _redact(_text(value))


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 - a broken __str__ must not lose the line
        return f"<{type(value).__name__} that cannot be shown: {type(error).__name__}>"


def _quoted_if_needed(value: Any) -> str:
    """Quote a value that could be mistaken for the next field."""
    return value if isinstance(value, str) and not _NEEDS_QUOTES.search(value) else json.dumps(value)


def _on_one_line(text: str) -> str:
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
