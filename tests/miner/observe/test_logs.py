"""Log lines carry what is needed, cannot be forged, and hold no secret."""

import base64
import io
import json
import logging
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from miner.observe import logs
from miner.settings import Settings, load_settings

ROOT = Path(__file__).parents[3]
PASSWORD = 'pa"ss wörd\\/+x'
TOKEN = "operator-token-0123456789"
GITHUB = "ghx_someGithubToken/with+odd=letters"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    before = (root.handlers[:], root.level, sys.excepthook, threading.excepthook)
    yield
    root.handlers[:], (sys.excepthook, threading.excepthook) = before[0], before[2:]
    root.setLevel(before[1])
    logging.captureWarnings(False)


def settings(**more: object) -> Settings:
    return load_settings(env={}, env_file=None, wallet_password=PASSWORD, operator_token=TOKEN, **more)


def logged(log_format: str, stream: io.StringIO | None = None) -> io.StringIO:
    stream = stream or io.StringIO()
    logs.configure(settings(log_format=log_format), stream)
    return stream


def test_a_json_line_carries_the_context_and_the_exception() -> None:
    out = logged("json")
    try:
        with logs.bind(task_id="t-1", job_id=None), logs.bind(job_id="j-2"):
            raise ValueError("no room")
    except ValueError:
        with logs.bind(task_id="t-1"):
            logging.getLogger("miner.x").exception("it %s", "broke", extra={"hotkey": "5abc", "gpu": 3})
    (line,) = out.getvalue().splitlines()
    found = json.loads(line)
    assert list(found)[:6] == ["ts", "level", "logger", "msg", "task_id", "hotkey"]
    assert found["ts"].endswith("Z")
    assert found["msg"] == "it broke"
    assert found["gpu"] == 3
    assert "ValueError: no room" in found["exception"]


def test_the_daemon_logs_what_is_below_a_warning_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(settings(log_format="json"), split=True)
    for level in (logging.INFO, logging.WARNING, logging.ERROR):
        logging.getLogger("miner").log(level, "at %d", level)
    out, err = capsys.readouterr()
    assert [json.loads(line)["level"] for line in out.splitlines()] == ["INFO"]
    assert [json.loads(line)["level"] for line in err.splitlines()] == ["WARNING", "ERROR"]
    logs.configure(settings(log_format="console"), split=True)
    logging.getLogger("miner").info("in words")
    assert "INFO    miner: in words" in capsys.readouterr().out
    # Beside a live view only errors are logged.
    logs.configure(settings(log_format="console"), least=logging.ERROR)
    logging.getLogger("miner").warning("the view says it")
    logging.getLogger("miner").error("nobody foresaw it")
    out, err = capsys.readouterr()
    assert (out, "nobody foresaw it" in err, "the view says it" in err) == ("", True, False)


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_lean_lines_say_the_same(monkeypatch: pytest.MonkeyPatch, log_format: str) -> None:
    for switch in ("_srcfile", "logThreads", "logProcesses", "logMultiprocessing"):
        monkeypatch.setattr(logging, switch, getattr(logging, switch))
    out = logged(log_format)
    for lean in (False, True):
        if lean:
            logs.skip_call_sites()
        logging.getLogger("miner.x").warning("it %s", "broke", extra={"task_id": "t"})
    one, two = (line[line.index("Z") :] for line in out.getvalue().splitlines())
    assert one == two


def test_bound_fields_end_with_their_block_and_a_later_configuration_replaces_the_first() -> None:
    replaced, out = logged("json"), logged("json")
    with logs.bind(task_id="outer"):
        with logs.bind(task_id="inner", job_id=0):
            logging.warning("one")
        logging.warning("two")
    logging.warning("three")
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(line.get("task_id"), line.get("job_id")) for line in lines] == [
        ("inner", 0),
        ("outer", None),
        (None, None),
    ]
    assert replaced.getvalue() == ""


def test_nothing_from_outside_can_forge_a_json_field() -> None:
    out = logged("json")
    logging.getLogger("a").error(
        'x", "level": "INFO', extra={"level": "INFO", "ts": "1999", "logger": "forged"}
    )
    found = json.loads(out.getvalue())
    assert (found["level"], found["logger"]) == ("ERROR", "a")
    assert found["ts"] > "2020"


def test_nothing_from_outside_can_forge_a_console_line() -> None:
    out = logged("console")
    evil = "a\nERROR forged\r\x1b[2J\u2028next\x85\u202eright to left"
    logging.warning("offer from %s", evil, extra={"hotkey": f"5x job_id=forged {evil}"})
    try:
        raise RuntimeError("two\n2026-01-01T00:00:00.000Z INFO    miner: forged")
    except RuntimeError:
        logging.exception("broke")
    line, second, *traceback = out.getvalue().splitlines()
    assert "\\n" in line
    assert "\\x1b[2J" in line
    assert "\u202e" not in line
    assert 'hotkey="5x job_id=forged' in line
    assert "broke" in second
    assert traceback
    assert all(line.startswith("    | ") for line in traceback)


def test_colour_and_words_are_for_people_who_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for log_format, stream, is_json, has_colour in (
        ("console", io.StringIO(), False, False),
        ("console", Terminal(), False, True),
        ("auto", io.StringIO(), True, False),
        ("auto", Terminal(), False, True),
    ):
        logged(log_format, stream)
        logging.warning("hello")
        assert (stream.getvalue().startswith("{"), "\x1b[" in stream.getvalue()) == (is_json, has_colour)
    monkeypatch.setenv("NO_COLOR", "1")
    logged("console", plain := Terminal())
    logging.warning("hello")
    assert "\x1b[" not in plain.getvalue()


def test_uvicorn_writes_through_ours_and_only_once_and_what_libraries_log_of_requests_at_debug_only() -> None:
    noisy = logging.getLogger("uvicorn.error")
    noisy.addHandler(logging.StreamHandler(other := io.StringIO()))
    noisy.propagate = False
    out = logged("json")
    noisy.info("started")
    for name in ("uvicorn.access", "httpx"):
        logging.getLogger(name).info("GET https://x/?secret=1")
    assert other.getvalue() == ""
    assert [json.loads(line)["msg"] for line in out.getvalue().splitlines()] == ["started"]
    logs.configure(settings(log_level="debug", log_format="json"), out)
    logging.getLogger("httpx").info("HTTP Request")
    assert "HTTP Request" in out.getvalue()


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError(TOKEN)


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_wrong_log_call_neither_loses_the_line_nor_prints_secrets(log_format: str) -> None:
    out = logged(log_format)
    root = logging.getLogger()
    root.handlers[:] = root.handlers[-1:]  # pytest's own handlers raise where logging's do not
    logging.warning("%d jobs", TOKEN)
    logging.warning("odd", extra={"thing": Unprintable(), "number": float("nan")})
    assert len(out.getvalue().splitlines()) == 2
    assert "jobs" in out.getvalue()
    assert TOKEN not in out.getvalue()


def test_a_broken_stream_does_not_print_the_line_unhidden(capsys: pytest.CaptureFixture[str]) -> None:
    out = logged("json")
    out.close()
    logging.warning("the token is %s", TOKEN)
    said = capsys.readouterr().err
    assert "could not be written" in said
    assert TOKEN not in said


def test_warnings_and_threads_that_die_are_logged() -> None:
    out = logged("json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(f"odd {TOKEN}", UserWarning, stacklevel=1)
        thread = threading.Thread(target=lambda: int(TOKEN))
        thread.start()
        thread.join()
    assert "odd ***" in out.getvalue()
    assert "uncaught exception" in out.getvalue()
    assert TOKEN not in out.getvalue()


PROGRAM = """
import base64, json, logging, sys, warnings
from urllib.parse import quote, quote_plus
from miner.observe import logs
from miner.settings import load_settings
settings = load_settings(env_file=None)
logs.configure(settings)
log = logging.getLogger("miner.leaky")
print(settings, repr(settings), file=sys.stderr)
def fail(secret):
    try:
        open("/nowhere/" + secret)
    except OSError as error:
        raise RuntimeError(f"could not use {secret!r}") from error
for secret in settings.secrets():
    raw = secret.encode()
    for text in (secret, repr(secret), json.dumps(secret), quote(secret), quote_plus(secret), repr(raw),
                 base64.b64encode(raw).decode(), base64.b64encode(b"user:" + raw).decode()):
        log.warning("plain " + text)
        log.warning("as argument %s %r", text, {"nested": [text]})
        log.warning("extra", extra={"field": {"deep": [text, text.encode()]}, "hotkey": text})
        with logs.bind(task_id=text):
            logging.getLogger("uvicorn.error").error("bound")
    log.error("%d", secret)
    warnings.warn(secret)
    try:
        fail(secret)
    except RuntimeError as error:
        error.add_note("note " + secret)
        log.exception("chained", stack_info=True)
        try:
            raise ExceptionGroup("several", [error, ValueError(secret)])
        except ExceptionGroup:
            log.exception("group")
fail(secret)
"""


@pytest.mark.process
@pytest.mark.parametrize("log_format", ["json", "console"])
def test_no_secret_given_to_a_real_program_is_in_anything_it_prints(log_format: str, tmp_path: Path) -> None:
    given = {
        "WALLET_PASSWORD": PASSWORD,
        "OPERATOR_TOKEN": TOKEN,
        "TRAINING_REPO_TEXT_URL": "https://github.com/a/b",
        "TRAINING_REPO_TEXT_COMMIT": "0" * 40,
        "TRAINING_REPO_TEXT_TOKEN": GITHUB,
        "SUBTENSOR_ADDRESS": "wss://me:nodepass%40word@node.example.org",
        "LOG_FORMAT": log_format,
        "PYTHONPATH": str(ROOT),
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
    }
    program = tmp_path / "leaky.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program)], env=given, capture_output=True, text=True, timeout=300, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert "uncaught exception" in said
    assert said.count("***") > 100
    for secret in (PASSWORD, TOKEN, GITHUB, "nodepass"):
        for spelling in (
            secret,
            repr(secret)[1:-1],
            json.dumps(secret)[1:-1],
            json.dumps(repr(secret))[2:-2],
            quote(secret, safe=""),
            base64.b64encode(secret.encode()).decode().rstrip("="),
            base64.b64encode(b"user:" + secret.encode()).decode()[8:-4],
        ):
            assert spelling not in said, f"{spelling!r} of {secret!r}"
    if log_format == "json":
        lines = [line for line in done.stderr.splitlines() if not line.startswith("data_dir=")]
        assert all(json.loads(line)["level"] for line in lines)
