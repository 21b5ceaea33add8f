"""The wrapper, run as a script: records, output, signals, and nothing left behind."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.system import wrapper

pytestmark = pytest.mark.process


#: Less than what hangs sleeps, so that it is never waited for to its end.
PATIENCE = 120.0
UP = "import signal, time, os; open('up', 'w').write(str(os.getpid()));"


class Wrapped:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str, options: tuple[str, ...] = (), **more: Any) -> subprocess.Popen[bytes]:
        script = [sys.executable, "-I", "-S", wrapper.__file__, "--dir", str(self.folder), *options, "--"]
        process = subprocess.Popen([*script, *command], **more)
        self.started.append(process)
        return process

    def run(self, code: str, *options: str, **more: Any) -> int:
        return self.start("python", "-c", code, options=options, **more).wait(PATIENCE)

    def read(self, name: str) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.folder / name).read_text())
        return record

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def until(self, name: str) -> None:
        """Wait until the file is there, with content."""
        ends = time.monotonic() + PATIENCE
        path = self.folder / name
        while not (path.exists() and path.read_text()):
            assert time.monotonic() < ends, name
            time.sleep(0.005)


@pytest.fixture
def wrapped(tmp_path: Path) -> Iterator[Wrapped]:
    folder = tmp_path / "run"
    folder.mkdir()
    wrapped = Wrapped(folder)
    yield wrapped
    for process in wrapped.started:
        process.kill()
        process.wait()


def test_start_and_end_are_recorded_and_the_code_is_passed_on(wrapped: Wrapped) -> None:
    assert wrapped.run("raise SystemExit(7)") == 7
    start, end = wrapped.read("start.json"), wrapped.read("exit.json")
    assert 0 < start["at"] <= end["at"]
    assert start["pid"] == wrapped.started[0].pid
    assert start["boot"] == wrapper.boot_id()
    assert end["code"] == 7
    assert (end["signals"], end["timeout"], end["oom_kills"]) == ([], False, 0)
    assert [path.name for path in wrapped.folder.iterdir() if path.name.startswith(".")] == []


def test_python_is_the_interpreter_of_the_wrapper(wrapped: Wrapped) -> None:
    wrapped.run("import sys; print(sys.executable)")
    assert wrapped.log.strip() == sys.executable


def test_a_command_that_cannot_be_run_is_named_in_the_log(wrapped: Wrapped) -> None:
    assert wrapped.start("/no/such").wait(PATIENCE) == 127
    assert wrapped.start(str(wrapped.folder)).wait(PATIENCE) == 126
    assert "/no/such cannot be started" in wrapped.log
    assert "Permission denied" in wrapped.log


def test_a_rotated_log_keeps_its_beginning_and_its_newest_part(wrapped: Wrapped) -> None:
    wrapped.run("for n in range(50000): print(f'line {n:06}')", "--log-bytes", "131072")
    kept = {path.name: path.read_text() for path in wrapped.folder.glob("log*")}
    assert set(kept) == {"log", "log.first", "log.before"}
    assert sum(map(len, kept.values())) < 3 * 131072 + 200
    assert kept["log.first"].startswith("line 000000\nline 000001\n")
    assert kept["log"].startswith("[the output before this is in log.first and log.before]\n")
    assert kept["log"].endswith("line 049999\n")
    whole = kept["log.before"].split("]\n")[-1] + kept["log"].split("]\n")[-1]
    assert whole in "".join(f"line {n:06}\n" for n in range(50000))


def test_binary_output_is_kept_unchanged(wrapped: Wrapped) -> None:
    wrapped.run("import os; os.write(1, bytes(range(256)) * 300); os.write(2, b'torn')")
    assert (wrapped.folder / "log").read_bytes() == bytes(range(256)) * 300 + b"torn"


def test_a_full_disk_costs_output_but_not_the_run_or_its_record(wrapped: Wrapped) -> None:
    """The end was given its room at the start."""
    code = f"{UP}\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('x' * 100000); raise SystemExit(5)"
    process = wrapped.start("python", "-c", code)
    wrapped.until("up")
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (600, 600))
    (wrapped.folder / "go").touch()
    assert process.wait(PATIENCE) == 5
    assert wrapped.read("exit.json")["code"] == 5
    assert len(wrapped.log) <= 600


def test_nothing_starts_when_the_start_cannot_be_recorded(wrapped: Wrapped) -> None:
    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    code = "import os; os.mkdir('ran')"
    assert wrapped.run(code, preexec_fn=full, stderr=subprocess.DEVNULL) != 0
    assert not (wrapped.folder / "ran").exists()
    assert not (wrapped.folder / "start.json").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_trainer_gets_the_signal_and_it_is_recorded(number: int, wrapped: Wrapped) -> None:
    # One system call: an exit that a signal asks for inside a file's own closing would be swallowed.
    ready = "os.write(os.open('ready', os.O_WRONLY | os.O_CREAT), b'1')"
    code = f"{UP}signal.signal(15, lambda *_: exit(3)); {ready}; time.sleep(600)"
    process = wrapped.start("python", "-c", code)
    wrapped.until("ready")
    process.send_signal(number)
    assert process.wait(PATIENCE) == 3
    assert wrapped.read("exit.json")["signals"] == [signal.Signals(number).name]


def test_a_signal_before_the_trainer_is_there_is_not_lost(wrapped: Wrapped) -> None:
    for _ in range(5):
        process = wrapped.start("sleep", "60")
        wrapped.until("start.json")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) in (143, -signal.SIGTERM)
        (wrapped.folder / "start.json").unlink()


def test_a_hangup_is_ignored(wrapped: Wrapped) -> None:
    process = wrapped.start("python", "-c", f"{UP}time.sleep(0.3)")
    wrapped.until("up")
    process.send_signal(signal.SIGHUP)
    assert process.wait(PATIENCE) == 0


def test_the_timeout_terminates_first_and_kills_then(wrapped: Wrapped, tmp_path: Path) -> None:
    # The grace is half a minute; here it is that of a copy.
    script = tmp_path / "wrapper.py"
    script.write_text(Path(wrapper.__file__).read_text().replace("GRACE_S = 30.0", "GRACE_S = 1.0"))
    deaf = f"{UP}signal.signal(15, lambda *_: open('asked', 'w').write('1'))\nwhile True: time.sleep(1)"
    # Counted from the wrapper's start: one that comes before the trainer can be asked shows nothing.
    for limit_s in (1, 4, 16, 64):
        options = ["--dir", wrapped.folder, "--limit-s", str(limit_s)]
        command = [sys.executable, script, *options, "--", "python", "-c", deaf]
        code = subprocess.run(command, timeout=PATIENCE + limit_s, check=False).returncode
        assert wrapped.read("exit.json")["timeout"] is True
        if (wrapped.folder / "asked").exists():
            assert code == 137
            return
    pytest.fail("a trainer took a minute to start")


def test_a_child_that_keeps_the_output_open_does_not_delay_the_end(wrapped: Wrapped) -> None:
    assert wrapped.run("import subprocess; subprocess.Popen(['sleep', '600']); print('done')") == 0
    assert wrapped.log == "done\n"


def test_a_trainer_that_closes_its_output_runs_on(wrapped: Wrapped) -> None:
    code = "import os, time; os.close(1); os.close(2); time.sleep(0.2); open('on', 'w')"
    assert wrapped.run(code) == 0
    assert (wrapped.folder / "on").exists()


def test_signals_get_through_a_flood_of_output(wrapped: Wrapped) -> None:
    process = wrapped.start(
        "python", "-c", f"{UP}\nwhile True: os.write(1, b'x' * 65536)", options=("--log-bytes", "65536")
    )
    wrapped.until("up")
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 143


def test_links_left_for_it_are_not_followed(wrapped: Wrapped, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("whole")
    for name in ("start.json", "exit.json", ".start.json.part", ".exit.part"):
        (wrapped.folder / name).symlink_to(victim)
    assert wrapped.run("pass") == 0
    assert victim.read_text() == "whole"
    (wrapped.folder / "log").unlink()
    (wrapped.folder / "log").symlink_to(victim)
    assert wrapped.run("print('over it')", stderr=subprocess.DEVNULL) != 0
    assert victim.read_text() == "whole"


def test_forbidden_limits_become_the_highest_allowed(wrapped: Wrapped) -> None:
    wrapped.run(
        "import resource; print(resource.getrlimit(4), resource.getrlimit(7))",
        *("--rlimit", "core=0", "--rlimit", "nofile=999999999999"),
    )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert wrapped.log.strip() == f"(0, 0) ({hard}, {hard})"


def test_the_lock_is_signed_and_held_by_the_wrapper_alone(wrapped: Wrapped, tmp_path: Path) -> None:
    import fcntl

    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    code = f"{UP}print(sorted(os.listdir('/proc/self/fd')))\nwhile not os.path.exists('go'): time.sleep(0.01)"
    process = wrapped.start("python", "-c", code, options=("--lock-fd", str(lock)), pass_fds=(lock,))
    os.close(lock)
    wrapped.until("up")
    signed = json.loads((tmp_path / "lock").read_text())
    assert signed["pid"] == process.pid
    other = os.open(tmp_path / "lock", os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    (wrapped.folder / "go").touch()
    process.wait(PATIENCE)
    fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    os.close(other)
    # 0, 1, 2, and the folder that is being listed.
    assert len(eval(wrapped.log)) == 4


def test_kills_for_memory_are_counted_from_the_start_on(wrapped: Wrapped, tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    code = f"open({str(events)!r}, 'w').write('oom 4\\noom_kill 5\\n')"
    wrapped.run(code, "--oom-file", str(events), "--oom-file", "/no/such/file")
    assert wrapped.read("exit.json")["oom_kills"] == 3
