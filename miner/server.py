"""Run the daemon: sockets, signals, exit codes.

It starts in an order in which each step can still fail cheaply, and stops in reverse: no new connections,
requests in flight are answered, the operator's port closes, then the store. A second signal ends the process
at once with an exit code of its own, for an operator who cannot wait and for pm2's logs.
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
from typing import cast

import uvicorn
import uvloop
from pydantic import SecretStr
from starlette.types import ASGIApp

from core.domain.errors import ConfigError, GodMinerError
from miner.chain.identity import IdentityError, hotkey_address, password_problem
from miner.daemon import Daemon
from miner.daemon_client import RUN_FILE
from miner.http.apps import operator_app, public_app
from miner.http.limits import HttpLimits, IsKnown, protocol_class
from miner.http.operator import shows_token
from miner.observe import logs
from miner.settings import Settings
from miner.store.database import (
    DataDirLock,
    DataDirLocked,
    DataDirUnusable,
    SchemaTooNew,
    SchemaTooOld,
    StoreCorrupt,
)

log = logging.getLogger(__name__)

LISTEN_BACKLOG = 2048
#: A client's time to send the headers; to send the body, or read a reply; and the largest body.
HEADER_SECONDS, BODY_SECONDS, MAX_BODY_BYTES = 5.0, 10.0, 4 * 1024**2
#: Most connections from one address.
MAX_PER_ADDRESS = 256
#: One in this many of the public port's connections is kept for validators that were let in before.
KNOWN_SHARE = 4
#: Most connections to the operator's port that have not shown its token, and their time to do so.
MAX_WITHOUT_TOKEN = 32
OPERATOR_HEADER_SECONDS = 2.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class DaemonExitCode(IntEnum):
    """After sysexits.h where it has a word for it."""

    OK = 0
    FAILED = 1
    PORT_IN_USE = 69
    FORCED = 70
    LOCKED = 75
    CONFIG = 78


class PortInUse(GodMinerError):
    code = "port_in_use"


class _UvicornServer(uvicorn.Server):
    """uvicorn without its own signal handling: two servers in one process would fight over it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept waiting connections before the sockets are closed, which would reset them. One that comes in
        the microseconds before the close is still reset."""
        # The event loop closes its own sockets a little later than asked.
        copies = [listening.dup() for listening in sockets or ()]
        for server in self.servers:
            server.close()
        for listening in sockets or ():
            listening.close()
        await asyncio.sleep(0)
        waiting: list[socket.socket] = []
        for copy in copies:
            with copy, contextlib.suppress(OSError):
                copy.setblocking(False)
                while len(waiting) < LISTEN_BACKLOG:
                    waiting.append(copy.accept()[0])
        for connection in waiting:
            connection.setblocking(False)
            with contextlib.suppress(OSError):  # it has hung up
                await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connection)
        await super().shutdown()

    def _protocol(self) -> asyncio.Protocol:
        """Make a protocol as uvicorn does for a connection that it accepts itself."""
        make = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


def run_daemon(settings: Settings) -> DaemonExitCode:
    """Run until a signal ends it."""
    logs.skip_call_sites()
    lock = DataDirLock(settings.data_dir, settings.store_dir)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_exit_on_signals())
            public = stack.enter_context(
                _listening_socket(settings.public_host, settings.public_port, "PUBLIC")
            )
            private = stack.enter_context(
                _listening_socket(settings.operator_host, settings.operator_port, "OPERATOR")
            )
            lock.acquire()
            stack.callback(lock.release)
            # An encrypted hotkey takes seconds to open, and nothing that is answered needs it open.
            hotkey = hotkey_address(settings)
            daemon = Daemon(settings, hotkey)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_serve_until_stopped(daemon, public, private))
    except PortInUse as error:
        log.error("%s", error)
        return DaemonExitCode.PORT_IN_USE
    except DataDirLocked as error:
        log.error("%s", error)
        return DaemonExitCode.LOCKED
    except GodMinerError as error:
        log.error("%s", error)
        return DaemonExitCode.CONFIG if isinstance(error, _NEED_THE_OPERATOR) else DaemonExitCode.FAILED


#: Errors that a restart cannot cure: pm2 should not try.
_NEED_THE_OPERATOR = (ConfigError, IdentityError, DataDirUnusable, SchemaTooNew, SchemaTooOld, StoreCorrupt)


async def _serve_until_stopped(
    daemon: Daemon, public_socket: socket.socket, operator_socket: socket.socket
) -> DaemonExitCode:
    settings = daemon.settings
    public, private = _public_server(daemon), _operator_server(daemon)
    stop = asyncio.Event()
    with _stop_on_signals(stop.set):
        await daemon.start()
        daemon.on_failure = stop.set
        _check_hotkey_password(daemon)
        _freeze_garbage_collector()
        try:
            async with asyncio.TaskGroup() as group:
                serving_private = group.create_task(private.serve(sockets=[operator_socket]))
                serving_public = group.create_task(public.serve(sockets=[public_socket]))
                _write_run_file(daemon, public_socket, operator_socket)
                await stop.wait()
                log.info("stopping: %d connections are open", len(public.server_state.connections))
                public.should_exit = True
                await serving_public
                daemon.close_streams()
                private.should_exit = True
                await serving_private
        finally:
            await daemon.stop()
            _remove_run_file(settings.data_dir)
    if daemon.failure:
        log.error("stopped: %s", daemon.failure)
        return DaemonExitCode.FAILED
    log.info("stopped")
    return DaemonExitCode.OK


def _check_hotkey_password(daemon: Daemon) -> None:
    """Alert when the hotkey cannot be opened. No reply needs it open, but what is sent to the chain does.
    Opening takes seconds, which a stop must not wait for."""
    loop = asyncio.get_running_loop()

    def check() -> None:
        problem = password_problem(daemon.settings)
        with contextlib.suppress(RuntimeError):  # the daemon has stopped meanwhile
            loop.call_soon_threadsafe(daemon.note_hotkey, problem)

    threading.Thread(target=check, name="hotkey", daemon=True).start()


def _freeze_garbage_collector() -> None:
    """Exempt the 200,000 objects of the start from garbage collection: they live as long as the process, and
    each full collection would walk them all, in the middle of a request."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _public_server(daemon: Daemon) -> _UvicornServer:
    settings = daemon.settings
    of_validators = max(1, settings.max_connections // KNOWN_SHARE)
    limits = HttpLimits(
        header_seconds=HEADER_SECONDS,
        body_seconds=BODY_SECONDS,
        max_body_bytes=MAX_BODY_BYTES,
        max_known_connections=of_validators,
        max_stranger_connections=max(1, settings.max_connections - of_validators),
        max_connections_per_address=MAX_PER_ADDRESS,
    )
    is_known = daemon.authenticator.is_known
    return _uvicorn_server(public_app(daemon), daemon, limits, lambda network, _headers: is_known(network))


def _operator_server(daemon: Daemon) -> _UvicornServer:
    """Make the operator's server: other users of this machine have its address, but not its token."""
    app = operator_app(daemon)
    token: SecretStr = app.state.operator_token
    limits = HttpLimits(
        header_seconds=OPERATOR_HEADER_SECONDS,
        body_seconds=BODY_SECONDS,
        max_body_bytes=MAX_BODY_BYTES,
        max_known_connections=daemon.settings.max_connections,
        max_stranger_connections=MAX_WITHOUT_TOKEN,
        max_connections_per_address=MAX_PER_ADDRESS,
    )
    return _uvicorn_server(app, daemon, limits, lambda _network, headers: shows_token(headers, token))


def _uvicorn_server(app: ASGIApp, daemon: Daemon, limits: HttpLimits, is_known: IsKnown) -> _UvicornServer:
    config = uvicorn.Config(
        app,
        http=protocol_class(
            limits, lambda status: daemon.metrics.count_request("refused", status, 0.0), is_known
        ),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # anybody can send X-Forwarded-For; rate limits use the socket's address
        backlog=LISTEN_BACKLOG,
        timeout_graceful_shutdown=math.ceil(daemon.settings.shutdown_grace_seconds),
    )
    return _UvicornServer(config)


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Until the daemon runs, end at once on a signal, with the exit code that a shell gives it.

    Not by an exception: it could come up inside a library that takes it for a failure of its own. Nothing
    needs cleaning up, since a start copes with whatever `kill -9` leaves.
    """

    def on_signal(number: int, _frame: FrameType | None) -> None:
        logging.shutdown()
        os._exit(128 + number)

    previous = {number: signal.signal(number, on_signal) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Stop in order on the first SIGTERM or SIGINT (which pm2 sends), at once on the second."""
    is_stopping = False

    def on_signal() -> None:
        nonlocal is_stopping
        if is_stopping:
            log.error("second signal: stopping at once; what was answered is on disk")
            logging.shutdown()
            os._exit(DaemonExitCode.FORCED)
        is_stopping = True
        stop()

    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)


def _listening_socket(host: str, port: int, name: str) -> socket.socket:
    """Bind a port and listen on it.

    Not left to uvloop, which ignores that another process took the port since `bind`, and then receives
    nothing (uvloop 0.23). Clients that connect during the start wait for its end.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(LISTEN_BACKLOG)
    except OSError as error:
        listening.close()
        way_out = {
            errno.EADDRINUSE: f"free the port, or set {name}_PORT to another one",
            errno.EACCES: f"set {name}_PORT to one from 1024 on",
        }.get(error.errno or 0, f"set {name}_HOST to an address of this machine")
        raise PortInUse(f"{host}:{port} cannot be listened on ({error.strerror}); {way_out}") from None
    listening.setblocking(False)
    return listening


def _write_run_file(daemon: Daemon, public: socket.socket, private: socket.socket) -> None:
    public_port, operator_port = public.getsockname()[1], private.getsockname()[1]
    settings = daemon.settings
    log.info("answering validators on %s:%d as %s", settings.public_host, public_port, daemon.hotkey)
    log.info("operator port on %s:%d", settings.operator_host, operator_port)
    content = {"pid": os.getpid(), "public_port": public_port, "operator_port": operator_port}
    path = settings.data_dir / RUN_FILE
    partial = path.with_suffix(".part")
    try:
        partial.write_text(json.dumps(content) + "\n")
        partial.replace(path)
    except OSError as error:
        log.warning(
            "other commands will not find this daemon: %s cannot be written (%s)", path, error.strerror
        )


def _remove_run_file(data_dir: Path) -> None:
    path = data_dir / RUN_FILE
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s is left behind (%s)", path, error.strerror)
