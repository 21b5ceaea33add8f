"""Check the two ports, and the hub to which submissions go."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from miner.doctor.examine import CheckContext, DoctorCheck, Finding, fail, ok, skip, warn
from miner.settings import ChainKind, Settings

if TYPE_CHECKING:
    from miner.publish import PublishTarget


def check_ports(context: CheckContext) -> Iterator[Finding]:
    settings = context.settings
    running = running_daemon(settings)
    yield _port(
        "public port", "PUBLIC_PORT", settings.public_host, settings.public_port, running, "public_port"
    )
    yield _port(
        "operator port",
        "OPERATOR_PORT",
        settings.operator_host,
        settings.operator_port,
        running,
        "operator_port",
    )
    if running:
        yield _daemon_answers(settings, running["public_port"])


def running_daemon(settings: Settings) -> dict[str, int] | None:
    """The process id and ports of this data directory's daemon, from its run file; None if it has ended."""
    from miner.daemon_client import read_run_file

    running = read_run_file(settings.data_dir)
    return running if running and _is_alive(running["pid"]) else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True  # another user's, but it runs
    except (OSError, OverflowError):
        return False
    return True


def _port(
    what: str, variable: str, host: str, port: int, running: dict[str, int] | None, key: str
) -> Finding:
    if port == 0:
        return skip(what, "0: any free port will be used")
    problem = _listen_error(host, port)
    if problem is None:
        return ok(what, f"{host}:{port} is free")
    if problem == errno.EADDRINUSE:
        if running and running[key] == port:
            return ok(what, f"{host}:{port} is held by this daemon, pid {running['pid']}")
        return fail(
            what,
            f"{host}:{port} is held by another program",
            f"find it with: ss -ltnp 'sport = :{port}'; stop it, or set {variable} to another port",
        )
    if problem in (errno.EACCES, errno.EPERM):
        return fail(what, f"{host}:{port} is not allowed for this user", f"set {variable} to 1024 or more")
    host_variable = variable.replace("PORT", "HOST")
    return fail(
        what,
        f"{host}:{port} cannot be listened on: {os.strerror(problem) if problem > 0 else 'no such address'}",
        f"set {host_variable} to an address of this machine (see: ip address), such as 0.0.0.0 or 127.0.0.1",
    )


def _listen_error(host: str, port: int) -> int | None:
    """The error number of listening there, None if it works."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return -1
    with socket.socket(family, kind, protocol) as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind(address)
            attempt.listen(1)
        except OSError as error:
            return error.errno or -1
    return None


def _daemon_answers(settings: Settings, port: int) -> Finding:
    import httpx

    host = settings.public_host if settings.public_host not in ("0.0.0.0", "::") else "127.0.0.1"  # noqa: S104
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/healthz"
    try:
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            response = client.get(url)
            response.raise_for_status()
            version = response.json()["version"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        return fail(
            "daemon",
            f"it runs, but {url} does not answer as it should: {error or type(error).__name__}",
            "look at its log (pm2 logs god-miner), then restart it",
        )
    return ok("daemon", f"version {version} answers at {url}")


PORTS_CHECK = DoctorCheck("ports", check_ports)


HUB_LIMIT_SECONDS = 75.0
_MAKE_TOKEN = "make a token with write permission in the hub's settings and put HF_TOKEN=… into .env"  # noqa: S105


def check_hub(context: CheckContext) -> Iterator[Finding]:
    from miner.publish import PublishTarget

    settings = context.settings
    to = PublishTarget.from_settings(settings)
    if to.local is not None:
        yield _directory(Path(to.local), settings)
    elif to.token is None:
        yield fail("hub", f"HF_TOKEN is not set: nothing can be published to {to.endpoint}", _MAKE_TOKEN)
    else:
        yield _account(to)


def _directory(directory: Path, settings: Settings) -> Finding:
    there = next(path for path in (directory, *directory.parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK) or not there.is_dir():
        return fail("hub", f"HUB=local:{directory}: {there} cannot be written to", f"chown or chmod {there}")
    if settings.chain is ChainKind.BITTENSOR:
        detail = f"submissions go to {directory}, where no validator finds them"
        return warn("hub", detail, "set HUB=huggingface and HF_TOKEN to mine for real")
    return ok("hub", f"submissions go to the directory {directory}")


def _account(to: PublishTarget) -> Finding:
    from core.domain.job_states import EndReason, StepFailed
    from miner.publish import HubPublisher

    try:
        account = asyncio.run(HubPublisher(to).account())
    except StepFailed as error:
        refused = error.reason is EndReason.HUB_REFUSED
        fix = _MAKE_TOKEN if refused else "check the network, HF_ENDPOINT and the proxy settings"
        return fail("hub", str(error), fix)
    if not account.may_write:
        return fail("hub", account.detail, f"{_MAKE_TOKEN}; or correct HF_USER")
    return ok("hub", account.detail)


HUB_CHECK = DoctorCheck("hub", check_hub, HUB_LIMIT_SECONDS)
