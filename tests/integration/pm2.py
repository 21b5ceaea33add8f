"""A real pm2: from npm into the ignored `.cache/`, with a home and a daemon of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miner.dev.stack import DevStack
from tests.doubles.required import missing

ROOT = Path(__file__).parents[2]
VERSION = "7.0.4"
FOLDER = ROOT / ".cache" / "pm2"
NAME = "god-miner"
#: Each; all of them together are less than a test may take.
INSTALL_TRIES, INSTALL_LIMIT_S = 3, 240
COMMAND_LIMIT_S = 180


def installed() -> Path:
    """pm2's command, installed when it is not there yet."""
    manifest = FOLDER / "node_modules" / "pm2" / "package.json"
    if not manifest.exists() or json.loads(manifest.read_text())["version"] != VERSION:
        if shutil.which("npm") is None:
            missing("npm is not installed (Debian and Ubuntu: apt install npm)")
        FOLDER.mkdir(parents=True, exist_ok=True)
        if problem := _install():
            missing(f"pm2 could not be installed from npm: {problem}")
    return FOLDER / "node_modules" / ".bin" / "pm2"


def _install() -> str:
    """What went wrong the last time; nothing when it is there. A registry fails once in a while."""
    command = ["npm", "install", "--prefix", str(FOLDER), "--no-audit", "--no-fund", f"pm2@{VERSION}"]
    problem = ""
    for _ in range(INSTALL_TRIES):
        try:
            subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=True)
        except subprocess.TimeoutExpired as error:
            problem = str(error)
        except subprocess.CalledProcessError as error:
            problem = error.stderr.strip()[-500:] or str(error)
        else:
            return ""
    return problem


@dataclass
class Pm2:
    """One pm2 daemon, and the folder whose ecosystem file it was given."""

    command: Path
    home: Path
    stack: DevStack

    @property
    def folder(self) -> Path:
        return self.stack.folder

    def __call__(self, *arguments: str) -> str:
        done = subprocess.run(
            [str(self.command), *arguments],
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"pm2 {' '.join(arguments)}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def environment(self) -> dict[str, str]:
        """Nothing of whoever runs the tests; `.env` in the folder has the settings."""
        passed_on = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        return {
            **passed_on,
            "HOME": str(self.folder),
            "PM2_HOME": str(self.home),
            "PM2_DISABLE_VERSION_CHECK": "true",
            # The code under test, also where the environment has another copy of it installed.
            "PYTHONPATH": str(ROOT),
        }

    def settings(self, **settings: str) -> None:
        text = "".join(f"{name}='{value}'\n" for name, value in {**self.stack.settings(), **settings}.items())
        path = self.folder / ".env"
        path.write_text(text)
        path.chmod(0o600)

    def state(self) -> dict[str, Any]:
        """What pm2 knows of our one application."""
        (only,) = json.loads(self("jlist").splitlines()[-1])
        assert only["name"] == NAME
        return {
            "pid": only["pid"],
            "status": only["pm2_env"]["status"],
            "restarts": only["pm2_env"]["restart_time"],
            "exit_code": only["pm2_env"].get("exit_code"),
            "unstable": only["pm2_env"]["unstable_restarts"],
        }

    def until(self, true: Callable[[dict[str, Any]], bool], limit_s: float = 90.0) -> dict[str, Any]:
        ends = time.monotonic() + limit_s
        while not true(state := self.state()):
            assert time.monotonic() < ends, f"{state}\n{self.log()}"
        return state

    def end(self) -> None:
        """Ends pm2's daemon, which ends what it runs; with a signal when it does not listen any more."""
        pid_file = self.home / "pm2.pid"
        pid = int(pid_file.read_text()) if pid_file.exists() else None
        try:
            self("kill")
        finally:
            if pid is not None and Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)

    def log(self, which: str = "*") -> str:
        """What the application wrote, as pm2 keeps it: "out", "error", or all."""
        return "".join(path.read_text() for path in sorted((self.home / "logs").glob(f"{NAME}-{which}.log")))


@contextmanager
def pm2_for(stack: DevStack, settings: Mapping[str, str]) -> Iterator[Pm2]:
    """The shipped ecosystem file in the stack's folder, beside an environment and an `.env`, as an operator's
    clone has them. Whatever happens, pm2's daemon and what it runs are gone afterwards."""
    command = installed()
    shutil.copy(ROOT / "ecosystem.config.js", stack.folder)
    (stack.folder / ".venv").symlink_to(sys.prefix)
    # A short path: pm2 has sockets in it, and theirs may have 107 letters.
    with tempfile.TemporaryDirectory(prefix="pm2-") as home:
        pm2 = Pm2(command, Path(home), stack)
        pm2.settings(**settings)
        try:
            yield pm2
        finally:
            pm2.end()
