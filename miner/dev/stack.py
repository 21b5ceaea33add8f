"""A daemon to try things on: throwaway keys, a nodes file, free ports and a child process.

Everything lives in one folder, and a folder that was used before is used again, keys and all. The keys are
worth nothing and never meant for a chain. The child gets an environment of its own, so that an operator's
`.env` and wallet are never touched.
"""

from __future__ import annotations

import http.client
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from types import TracebackType
from typing import Self
from unittest.mock import patch

from core.domain.errors import GodMinerError
from miner.chain.identity import Identity, create_temporary_hotkey, hotkey_file, open_hotkey
from miner.daemon_client import stored_operator_token

MINER_WALLET = "miner"
VALIDATOR_WALLET = "validator"
HOTKEY_NAME = "default"
VALIDATOR_STAKE = 10_000.0


@dataclass(frozen=True)
class ThrowawayKeys:
    """Two throwaway identities, and where their files are."""

    wallet_path: Path
    nodes_file: Path
    miner: Identity
    validator: Identity

    def settings(self) -> dict[str, str]:
        """Return the settings that make a miner use them."""
        return {
            "CHAIN": "file",
            "NODES_FILE": str(self.nodes_file),
            "WALLET_PATH": str(self.wallet_path),
            "WALLET_NAME": MINER_WALLET,
            "HOTKEY_NAME": HOTKEY_NAME,
        }


def throwaway_keys(folder: Path) -> ThrowawayKeys:
    """Return the directory's keys and nodes file; make them if there are none."""
    folder = folder.absolute()
    wallets = folder / "wallets"
    keys = ThrowawayKeys(
        wallets,
        folder / "nodes.json",
        _load_or_create_key(wallets, MINER_WALLET),
        _load_or_create_key(wallets, VALIDATOR_WALLET),
    )
    if not keys.nodes_file.exists():
        write_nodes(keys, VALIDATOR_STAKE)
    return keys


def write_nodes(keys: ThrowawayKeys, stake: float) -> None:
    """Write a subnet of two: a validator with that stake, and the miner."""
    nodes = [
        {"uid": 0, "hotkey": keys.validator.ss58_address, "stake": stake, "validator_permit": True},
        {"uid": 1, "hotkey": keys.miner.ss58_address},
    ]
    keys.nodes_file.write_text(json.dumps(nodes, indent=2) + "\n", encoding="utf-8")


def _load_or_create_key(wallets: Path, name: str) -> Identity:
    path = hotkey_file(wallets, name, HOTKEY_NAME)
    return open_hotkey(path) if path.exists() else create_temporary_hotkey(wallets, name, HOTKEY_NAME)


START_LIMIT_S = 120.0
STOP_LIMIT_S = 30.0
LOOPBACK = "127.0.0.1"
#: Below those that Linux gives to connections, and to servers that ask for any. No browser opens 10080.
_PORTS = range(10_081, 20_000)
#: The only variables that a child inherits; the rest is the operator's own.
_PASSED_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "SYSTEMROOT")
_PACKAGES = Path(__file__).resolve().parents[2]


class StackError(GodMinerError):
    """The daemon under test did not do what it should."""

    code = "dev_stack"


@dataclass(frozen=True)
class DevStack:
    """A directory, its keys, and the settings that make a daemon use them."""

    folder: Path
    keys: ThrowawayKeys
    public_port: int
    operator_port: int

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.public_port}"

    @property
    def operator_url(self) -> str:
        return f"http://{LOOPBACK}:{self.operator_port}"

    def operator_headers(self) -> dict[str, str]:
        """Return the headers that the operator's port asks for, once the daemon has started."""
        return {"authorization": f"Bearer {stored_operator_token(self.data_dir)}"}

    @property
    def log_file(self) -> Path:
        return self.folder / "daemon.log"

    @property
    def data_dir(self) -> Path:
        return self.folder / "data"

    def settings(self) -> dict[str, str]:
        return {
            **self.keys.settings(),
            "DATA_DIR": str(self.data_dir),
            "PUBLIC_HOST": LOOPBACK,
            "PUBLIC_PORT": str(self.public_port),
            "OPERATOR_HOST": LOOPBACK,
            "OPERATOR_PORT": str(self.operator_port),
            "LOG_FORMAT": "json",
            # Simulated GPUs, enough for everything: offers are answered, nothing is trained.
            "BACKEND": "none",
            "GPUS": "64xH100",
            "POLICY": "everything-feasible",
            "PROFILE": "base",
        }


def prepare_stack(folder: Path) -> DevStack:
    folder.mkdir(parents=True, exist_ok=True)
    public_port, operator_port = free_ports(2)
    return DevStack(folder, throwaway_keys(folder), public_port, operator_port)


def free_ports(count: int) -> list[int]:
    """Return free ports, all different. None is one that the system gives to whoever asks for any: another
    program would get it before the child listens, which takes seconds."""
    free: list[int] = []
    for port in SystemRandom().sample(_PORTS, len(_PORTS)):
        if len(free) == count:
            break
        with suppress(OSError), socket.create_server((LOOPBACK, port)):
            free.append(port)
    return free


class ChildProcess:
    """A server in a process of its own: started, waited for, stopped by its pid. Use as `with`."""

    def __init__(
        self, command: list[str], port: int, folder: Path, log_file: Path, settings: Mapping[str, str]
    ) -> None:
        self.command = command
        self.port = port
        self.folder = folder
        self.log_file = log_file
        self.environment = _child_environment(folder, settings)
        self.process: subprocess.Popen[bytes] | None = None
        #: Limit from the start of the process to the first answered request.
        self.start_s = 0.0

    @property
    def pid(self) -> int:
        assert self.process is not None, "not started"
        return self.process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> float:
        """Start it and return the seconds until it answered; raise `StackError` with the end of its log
        if not.
        """
        with self.log_file.open("ab") as log:
            began = time.perf_counter()
            # A session of its own: Ctrl-C in a terminal reaches us, and we stop the child in order.
            self.process = subprocess.Popen(
                self.command,
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._await_answer(began)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.perf_counter() - began
        return self.start_s

    def stop(self, limit_s: float = STOP_LIMIT_S) -> int | None:
        """Send SIGTERM, then SIGKILL if it takes too long. Return the exit code, None if it never ran."""
        if self.process is None:
            return None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(limit_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode

    def _await_answer(self, began: float) -> None:
        assert self.process is not None
        while not self._answers():
            code = self.process.poll()
            if code is not None:
                raise StackError(
                    f"{self._shown()} ended with code {code} before it answered:\n{self.log_tail()}"
                )
            if time.perf_counter() - began > START_LIMIT_S:
                raise StackError(
                    f"{self._shown()} did not answer within {START_LIMIT_S:g} s:\n{self.log_tail()}"
                )
            time.sleep(0.01)

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=2)
        with suppress(OSError, http.client.HTTPException), closing(connection):
            connection.request("GET", "/healthz")
            return connection.getresponse().status == 200
        return False

    def log_tail(self, lines: int = 15) -> str:
        text = self.log_file.read_text(encoding="utf-8", errors="replace")
        return "\n".join(line[:500] for line in text.splitlines()[-lines:]) or "(it wrote nothing)"

    def _shown(self) -> str:
        return " ".join(self.command[1:])


def daemon_process(stack: DevStack, settings: Mapping[str, str] | None = None) -> ChildProcess:
    """`god-miner run` on this folder; `settings` are added to, or take the place of, the stack's own.

    A name with dots is a module's constant instead, such as `miner.server.BODY_SECONDS`.
    """
    given, constants = split_constants(settings or {})
    # Not by the console script: PATH may find one of another installation.
    command = [sys.executable, "-m", "miner", "run"]
    if constants:
        command[2:3] = [__name__, json.dumps(constants)]
    return ChildProcess(
        command, stack.public_port, stack.folder, stack.log_file, {**stack.settings(), **given}
    )


def split_constants(settings: Mapping[str, str]) -> tuple[dict[str, str], dict[str, float]]:
    """Separate settings from constants of modules, whose names have dots."""
    given = {name: value for name, value in settings.items() if "." not in name}
    return given, {name: json.loads(value) for name, value in settings.items() if "." in name}


def with_constants(constants: Mapping[str, float]) -> ExitStack:
    """Set constants of modules, by their dotted names, until the result is closed."""
    changed = ExitStack()
    for name, value in constants.items():
        changed.enter_context(patch(name, value))
    return changed


def dashboard_process(stack: DevStack, settings: Mapping[str, str] | None = None) -> ChildProcess:
    """`god-miner dashboard` for the daemon of this folder."""
    (port,) = free_ports(1)
    return ChildProcess(
        [sys.executable, "-m", "miner", "dashboard"],
        port,
        stack.folder,
        stack.folder / "dashboard.log",
        {**stack.settings(), "DASHBOARD_PORT": str(port), **(settings or {})},
    )


def _child_environment(folder: Path, settings: Mapping[str, str]) -> dict[str, str]:
    passed_on = {name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ}
    return {**passed_on, "HOME": str(folder), "PYTHONPATH": str(_PACKAGES), **settings}


if __name__ == "__main__":
    # The daemon of a test: with constants, which come first, that are shorter than an operator's.
    with with_constants(json.loads(sys.argv.pop(1))):
        runpy.run_module("miner", run_name="__main__")
