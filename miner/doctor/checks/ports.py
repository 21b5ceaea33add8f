"""The two ports: free, or held by our own daemon, which then answers."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator

from miner.doctor.examine import Check, Surroundings
from miner.doctor.finding import Finding, fail, ok, skip
from miner.settings import Settings


def run(surroundings: Surroundings) -> Iterator[Finding]:
    settings = surroundings.settings
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
        yield _answers(settings, running["public_port"])


def running_daemon(settings: Settings) -> dict[str, int] | None:
    """What the daemon on this data directory said of itself when it started, if it still runs."""
    from miner.running import RUN_FILE

    try:
        told = json.loads((settings.data_dir / RUN_FILE).read_bytes())
        found = {name: int(told[name]) for name in ("pid", "public_port", "operator_port")}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if _is_alive(found["pid"]) else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True  # somebody else's, but there
    except (OSError, OverflowError):
        return False
    return True


def _port(
    what: str, variable: str, host: str, port: int, running: dict[str, int] | None, key: str
) -> Finding:
    if port == 0:
        return skip(what, "0: any free one will be taken")
    problem = _why_not(host, port)
    if problem is None:
        return ok(what, f"{host}:{port} is free")
    if problem == errno.EADDRINUSE:
        if running and running[key] == port:
            return ok(what, f"{host}:{port} is held by our daemon, pid {running['pid']}")
        return fail(
            what,
            f"{host}:{port} is held by another program",
            f"find it with: ss -ltnp 'sport = :{port}'; stop it, or set {variable} to another port",
        )
    if problem in (errno.EACCES, errno.EPERM):
        return fail(what, f"{host}:{port} is not allowed to this user", f"set {variable} to 1024 or more")
    host_variable = variable.replace("PORT", "HOST")
    return fail(
        what,
        f"{host}:{port} can not be listened on: {os.strerror(problem) if problem > 0 else 'no such address'}",
        f"set {host_variable} to an address of this machine (see: ip address), such as 0.0.0.0 or 127.0.0.1",
    )


def _why_not(host: str, port: int) -> int | None:
    """The error number of listening there, None if it can be done."""
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


def _answers(settings: Settings, port: int) -> Finding:
    import httpx

    host = settings.public_host if settings.public_host not in ("0.0.0.0", "::") else "127.0.0.1"  # noqa: S104
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/healthz"
    try:
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            answer = client.get(url)
            answer.raise_for_status()
            version = answer.json()["version"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        return fail(
            "daemon",
            f"it runs, but {url} does not answer as it should: {error or type(error).__name__}",
            "look at its log (pm2 logs god-miner), then restart it",
        )
    return ok("daemon", f"version {version} answers at {url}")


CHECK = Check("ports", run)
