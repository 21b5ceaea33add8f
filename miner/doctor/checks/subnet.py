"""Check the way to validators: the hotkey, its registration and address, the two ports, and the hub."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from core.domain.errors import GodMinerError
from miner.doctor.examine import CheckContext, DoctorCheck
from miner.settings import ChainKind, Settings
from miner.support.addresses import public_key
from miner.support.findings import Finding, fail, ok, skip, warn

if TYPE_CHECKING:
    from miner.chain.metagraph import Metagraph, Node
    from miner.publish import PublishTarget


#: What the subnet pays for: README and quickstart have the same three lines.
WHAT_EARNS = (
    "Tournaments are what the subnet pays for today. An entry is a repository and a fee; validators train "
    "it on their own GPUs.",
    "Validators have sent no offers since October 2025. The daemon hands out your entry (/training_repo), "
    "trains tasks of your own, and is ready if offers return.",
    "Rent GPUs to rehearse an entry or to train tasks of your own, not to wait for offers.",
)
#: Opening an encrypted hotkey takes 3 to 14 seconds on an idle core.
WALLET_LIMIT_SECONDS = 200.0


def check_wallet(context: CheckContext) -> Iterator[Finding]:
    from miner.chain.identity import hotkey_file

    settings = context.settings
    path = hotkey_file(settings.wallet_path, settings.wallet_name, settings.hotkey_name)
    yield _open_hotkey(settings)
    if path.exists():
        yield _hotkey_file_mode(path)
    yield from _coldkey_elsewhere(path.parent.parent / "coldkey")


def _open_hotkey(settings: Settings) -> Finding:
    from miner.chain.identity import IdentityError, opened_hotkey

    try:
        with opened_hotkey(settings) as hotkey:
            address = hotkey.ss58_address
    except IdentityError as error:
        ways_out = {
            "hotkey_missing": _how_to_make_a_hotkey(settings),
            "hotkey_locked": "put WALLET_PASSWORD=… into .env (chmod 600 .env)",
            "wrong_password": "correct WALLET_PASSWORD",
        }
        restore = "correct or restore that file; see `btcli wallet --help`"
        return fail("hotkey", str(error), ways_out.get(error.code, restore))
    return ok("hotkey", f"{settings.wallet_name}/{settings.hotkey_name} is {address}")


def _how_to_make_a_hotkey(settings: Settings) -> str:
    return (
        f"btcli wallet new-hotkey -w {settings.wallet_name} -H {settings.hotkey_name} "
        f"--wallet-path {settings.wallet_path}; or set WALLET_NAME and HOTKEY_NAME to one that exists"
    )


def _hotkey_file_mode(path: Path) -> Finding:
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        detail = f"{path} has mode {mode:o}: others on this machine can read the key"
        return warn("hotkey file", detail, f"chmod 600 {path}")
    if status.st_uid != os.getuid():
        detail = f"{path} belongs to uid {status.st_uid}, and this is uid {os.getuid()}"
        return warn(
            "hotkey file", detail, f"chown {os.getuid()} {path}, if that user is not meant to have it"
        )
    return ok("hotkey file", f"only its owner can read it (mode {mode:o})")


def _coldkey_elsewhere(coldkey: Path) -> Iterator[Finding]:
    if coldkey.exists():
        yield warn(
            "coldkey",
            f"{coldkey} is on this machine; the miner never needs it, and it controls the funds",
            "keep the coldkey on another machine; here only hotkeys/ is needed",
        )


WALLET_CHECK = DoctorCheck("wallet", check_wallet, WALLET_LIMIT_SECONDS)


#: The source limits each call to the node itself; this ends what that does not.
CHAIN_LIMIT_SECONDS = 120.0
READ_SECONDS = 60.0


def check_chain(context: CheckContext) -> Iterator[Finding]:
    settings = context.settings
    started = time.monotonic()
    try:
        metagraph = asyncio.run(_read_metagraph(settings))
    except (GodMinerError, OSError, TimeoutError) as error:
        yield _unreadable(settings, error)
        return
    yield _readable(metagraph, time.monotonic() - started)
    yield callers(metagraph, settings)
    yield from purpose(settings)
    address = _own_address(settings)
    if address is None:
        yield skip("registration", "the hotkey's address is not known; see the finding on the hotkey")
        return
    yield from registration(metagraph, settings, address)


async def _read_metagraph(settings: Settings) -> Metagraph:
    from miner.chain.sources import build_source

    source = build_source(settings, None)
    return await asyncio.wait_for(source.metagraph(), READ_SECONDS)


def callers(metagraph: Metagraph, settings: Settings) -> Finding:
    """Count the hotkeys that would be let in. A miner with none cannot be reached by anybody."""
    from miner.chain.auth import CallerPolicy

    policy = CallerPolicy.from_settings(settings)
    count = sum(policy.lets_in(key, node) for key, node in metagraph.nodes_by_key.items())
    threshold = f"MIN_STAKE_THRESHOLD={settings.min_stake_threshold:g}"
    if count == 0:
        return warn(
            "callers",
            f"not one of {len(metagraph.nodes)} nodes would be let in, with {threshold}",
            "set MIN_STAKE_THRESHOLD lower (0 on a test network), and check ALLOW_HOTKEYS and DENY_HOTKEYS",
        )
    return ok("callers", f"{count} of {len(metagraph.nodes)} nodes would be let in, with {threshold}")


def purpose(settings: Settings) -> Iterator[Finding]:
    """Warn that nothing is earned, unless the daemon hands out a repository for tournaments."""
    if settings.chain is not ChainKind.BITTENSOR:
        return
    kinds = [
        kind for kind in ("text", "image", "environment") if getattr(settings, f"training_repo_{kind}_url")
    ]
    if kinds:
        yield ok("purpose", f"/training_repo has an entry for {', '.join(kinds)} tournaments")
    else:
        yield warn(
            "purpose",
            f"no tournament entry is set: this daemon earns nothing. {WHAT_EARNS[1]}",
            "docs/first-entry.md leads to an entry; then set TRAINING_REPO_TEXT_URL and _COMMIT",
        )


def registration(metagraph: Metagraph, settings: Settings, address: str) -> Iterator[Finding]:
    """Check that the subnet knows this hotkey, and under which address."""
    node = metagraph.nodes_by_key.get(public_key(address) or b"")
    if node is None:
        yield _unregistered(settings, address)
        return
    yield ok("registration", f"{address} has uid {node.uid} on subnet {metagraph.netuid}")
    yield _axon(node, settings)


def _unregistered(settings: Settings, address: str) -> Finding:
    if settings.chain is ChainKind.FILE:
        detail = f"{address} is not in {settings.nodes_file}; fine for a trial, but the chain was not read"
        return warn("registration", detail, "set CHAIN=bittensor to mine for real")
    return fail(
        "registration",
        f"{address} is not registered on subnet {settings.netuid}: no validator will find it",
        f"btcli subnets register --netuid {settings.netuid} "
        f"-w {settings.wallet_name} -H {settings.hotkey_name}",
    )


def _axon(node: Node, settings: Settings) -> Finding:
    published = f"{node.ip}:{node.port}" if node.ip and node.port else ""
    if settings.chain is ChainKind.FILE:
        return skip("published address", f"CHAIN=file; the file says {published or 'none'}")
    publish = "god-miner chain publish-ip"
    if not published:
        return fail(
            "published address",
            "none: validators have no address to call",
            publish if settings.public_ip else f"set PUBLIC_IP, then: {publish}",
        )
    if settings.public_ip is None:
        return warn(
            "published address",
            f"{published}, and PUBLIC_IP is not set to compare it with",
            "set PUBLIC_IP to this machine's public address",
        )
    if (node.ip, node.port) != (settings.public_ip, settings.axon_port):
        wanted = f"{settings.public_ip}:{settings.axon_port}"
        return fail(
            "published address",
            f"the chain says {published}, the settings say {wanted}: validators call the first",
            f"{publish}; or correct PUBLIC_IP and PUBLIC_PORT or PUBLISHED_PORT",
        )
    return ok("published address", published)


def _readable(metagraph: Metagraph, seconds: float) -> Finding:
    block = "" if metagraph.block is None else f" at block {metagraph.block}"
    nodes = f"{len(metagraph.nodes)} nodes on subnet {metagraph.netuid}{block}"
    return ok("chain", f"{nodes}, read from {metagraph.source} in {seconds:.1f} s")


def _unreadable(settings: Settings, error: Exception) -> Finding:
    detail = f"cannot be read: {error or type(error).__name__}"
    if settings.chain is ChainKind.FILE:
        fix = f"write {settings.nodes_file} (see docs), or set CHAIN=bittensor"
    else:
        fix = "check the network and SUBTENSOR_NETWORK, or set SUBTENSOR_ADDRESS to another node"
    return fail("chain", detail, fix)


def _own_address(settings: Settings) -> str | None:
    from miner.chain.identity import IdentityError, address_without_password

    try:
        return address_without_password(settings)
    except IdentityError:
        return None


CHAIN_CHECK = DoctorCheck("chain", check_chain, CHAIN_LIMIT_SECONDS)


def check_ports(context: CheckContext) -> Iterator[Finding]:
    settings = context.settings
    running = running_daemon(settings)
    yield _port("public", settings.public_host, settings.public_port, running)
    yield _port("operator", settings.operator_host, settings.operator_port, running)
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


def _port(side: str, host: str, port: int, running: dict[str, int] | None) -> Finding:
    what, variable = f"{side} port", f"{side.upper()}_PORT"
    if port == 0:
        return skip(what, "0: any free port will be used")
    problem = _listen_error(host, port)
    if problem is None:
        return ok(what, f"{host}:{port} is free")
    if problem == errno.EADDRINUSE:
        if running and running[f"{side}_port"] == port:
            return ok(what, f"{host}:{port} is held by this daemon, pid {running['pid']}")
        return fail(
            what,
            f"{host}:{port} is held by another program",
            f"find it with: ss -ltnp 'sport = :{port}'; stop it, or set {variable} to another port",
        )
    if problem in (errno.EACCES, errno.EPERM):
        return fail(what, f"{host}:{port} is not allowed for this user", f"set {variable} to 1024 or more")
    return fail(
        what,
        f"{host}:{port} cannot be listened on: {os.strerror(problem) if problem > 0 else 'no such address'}",
        f"set {side.upper()}_HOST to an address of this machine (see: ip address), "
        "such as 0.0.0.0 or 127.0.0.1",
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
