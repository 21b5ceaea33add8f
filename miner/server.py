"""Runs the daemon: sockets, signals, exit codes.

Started in an order in which each step can still fail cheaply, stopped in reverse: no new connections, the
requests in flight are answered, the operator's port goes last, then the books are closed. A second signal
ends it at once with a code of its own, for the operator who has lost patience and for pm2's logs.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import FrameType

import uvicorn
import uvloop
from starlette.types import ASGIApp

from core.errors import ConfigError, GodMinerError
from miner import logs
from miner.api.protocol import WireLimits, protocol
from miner.app import Daemon, build, operator_app, public_app
from miner.identity import IdentityError, known_address, load_identity, password_trouble
from miner.metrics import Metrics
from miner.running import RUN_FILE
from miner.settings import Settings
from miner.store.database import DataDirLock, DataDirLocked, DataDirUnusable, SchemaTooNew, StoreCorrupt

log = logging.getLogger(__name__)

BACKLOG = 2048
STOPPING = (signal.SIGTERM, signal.SIGINT)


class ExitCode(IntEnum):
    """After sysexits.h where it has a word for it."""

    OK = 0
    FAILED = 1
    PORT_IN_USE = 69
    FORCED = 70
    LOCKED = 75
    CONFIG = 78


class PortInUse(GodMinerError):
    code = "port_in_use"


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: two servers in one process would fight over it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(settings: Settings) -> ExitCode:
    """Run until a signal ends it."""
    logs.lean()
    lock = DataDirLock(settings.data_dir)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_dying_of_signals())
            public = stack.enter_context(_listen(settings.public_host, settings.public_port, "PUBLIC"))
            private = stack.enter_context(_listen(settings.operator_host, settings.operator_port, "OPERATOR"))
            lock.acquire()
            stack.callback(lock.release)
            # An encrypted hotkey takes seconds to open, and nothing that is answered needs it open.
            hotkey = known_address(settings) or load_identity(settings).ss58_address
            daemon = build(settings, hotkey)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_serve(daemon, public, private))
    except PortInUse as error:
        log.error("%s", error)
        return ExitCode.PORT_IN_USE
    except DataDirLocked as error:
        log.error("%s", error)
        return ExitCode.LOCKED
    except GodMinerError as error:
        log.error("%s", error)
        return ExitCode.CONFIG if isinstance(error, _MENDED_BY_HAND) else ExitCode.FAILED


#: Errors that a restart can't cure, so that pm2 should not try.
_MENDED_BY_HAND = (ConfigError, IdentityError, DataDirUnusable, SchemaTooNew, StoreCorrupt)


async def _serve(daemon: Daemon, public_socket: socket.socket, operator_socket: socket.socket) -> ExitCode:
    settings = daemon.settings
    public = _server(public_app(daemon), settings, daemon.metrics)
    private = _server(operator_app(daemon), settings, daemon.metrics)
    stop = asyncio.Event()
    with _signals(stop.set):
        await daemon.start()
        daemon.on_broken = stop.set
        _look_at_the_password(daemon)
        _settle_memory()
        try:
            async with asyncio.TaskGroup() as group:
                serving_private = group.create_task(private.serve(sockets=[operator_socket]))
                serving_public = group.create_task(public.serve(sockets=[public_socket]))
                _announce(daemon, public_socket, operator_socket)
                await stop.wait()
                log.info("stopping: %d connections are open", len(public.server_state.connections))
                public.should_exit = True
                await serving_public
                daemon.close_streams()
                private.should_exit = True
                await serving_private
        finally:
            await daemon.stop()
            _forget(settings.data_dir)
    if daemon.broken:
        log.error("stopped: %s", daemon.broken)
        return ExitCode.FAILED
    log.info("stopped")
    return ExitCode.OK


def _look_at_the_password(daemon: Daemon) -> None:
    """Nothing that is answered needs the hotkey open, but what is sent to the chain does: whoever starts the
    daemon hears now that it can't be. Opening takes seconds, which a stop must not wait for."""
    loop = asyncio.get_running_loop()

    def look() -> None:
        trouble = password_trouble(daemon.settings)
        if trouble is not None:
            with contextlib.suppress(RuntimeError):  # the daemon has stopped meanwhile
                loop.call_soon_threadsafe(daemon.alerts, "hotkey_locked", trouble)

    threading.Thread(target=look, name="hotkey", daemon=True).start()


def _settle_memory() -> None:
    """Take what start-up made out of the garbage collector's rounds: 200,000 objects that live as long as
    the process. Each full round would walk them all, in the middle of somebody's request."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _server(app: ASGIApp, settings: Settings, metrics: Metrics) -> _Server:
    config = uvicorn.Config(
        app,
        http=protocol(_wire_limits(settings), lambda status: metrics.request("refused", status, 0.0)),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # anybody can send X-Forwarded-For; rate limits go by the socket's address
        backlog=BACKLOG,
        timeout_graceful_shutdown=math.ceil(settings.shutdown_grace_seconds),
    )
    return _Server(config)


def _wire_limits(settings: Settings) -> WireLimits:
    return WireLimits(
        header_seconds=settings.header_timeout_seconds,
        body_seconds=settings.body_timeout_seconds,
        max_body_bytes=int(settings.max_body_bytes),
        max_connections=settings.max_connections,
        max_connections_per_address=settings.max_connections_per_address,
    )


@contextmanager
def _dying_of_signals() -> Iterator[None]:
    """While the daemon is not up: end at once, with a shell's code for it.

    Not by an exception: it would come up anywhere, in a library that takes it for a failure of its own as
    well. Nothing needs tidying, since a start copes with whatever `kill -9` leaves.
    """

    def on_signal(number: int, _frame: FrameType | None) -> None:
        logging.shutdown()
        os._exit(128 + number)

    before = {number: signal.signal(number, on_signal) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    """The first SIGTERM or SIGINT (pm2 sends that one) stops in order, the second at once."""
    asked = False

    def on_signal() -> None:
        nonlocal asked
        if asked:
            log.error("second signal: stopping at once; what was answered is on disk")
            logging.shutdown()
            os._exit(ExitCode.FORCED)
        asked = True
        stop()

    loop = asyncio.get_running_loop()
    for number in STOPPING:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in STOPPING:
            loop.remove_signal_handler(number)


def _listen(host: str, port: int, name: str) -> socket.socket:
    """A port that is ours from here on.

    Listening is not left to uvloop: it passes over a port that another process took since `bind`, and stays
    deaf (uvloop 0.23). Whoever calls during the start waits for its end.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        way_out = {
            errno.EADDRINUSE: f"free the port, or set {name}_PORT to another one",
            errno.EACCES: f"set {name}_PORT to one from 1024 on",
        }.get(error.errno or 0, f"set {name}_HOST to an address of this machine")
        raise PortInUse(f"{host}:{port} can't be listened on ({error.strerror}); {way_out}") from None
    listening.setblocking(False)
    return listening


def _announce(daemon: Daemon, public: socket.socket, private: socket.socket) -> None:
    public_port, operator_port = public.getsockname()[1], private.getsockname()[1]
    settings = daemon.settings
    log.info("answering validators on %s:%d as %s", settings.public_host, public_port, daemon.hotkey)
    log.info("operator port on %s:%d", settings.operator_host, operator_port)
    told = {"pid": os.getpid(), "public_port": public_port, "operator_port": operator_port}
    path = settings.data_dir / RUN_FILE
    partial = path.with_suffix(".part")
    try:
        partial.write_text(json.dumps(told) + "\n")
        partial.replace(path)
    except OSError as error:
        log.warning("other commands won't find this daemon: %s can't be written (%s)", path, error.strerror)


def _forget(data_dir: Path) -> None:
    path = data_dir / RUN_FILE
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s is left behind (%s)", path, error.strerror)
