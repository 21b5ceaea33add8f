"""Every secret that the daemon is given, looked for in everything that it gives away."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote

import pytest
from bittensor_core import encrypt_keyfile_data

from miner.chain.identity import hotkey_file
from miner.dev.stack import LOOPBACK, ChildProcess, DevStack, daemon_process, free_ports
from miner.server import DaemonExitCode
from miner.settings import SECRET_FIELDS
from tests.doubles.http_bytes import Reply, request
from tests.integration import raw
from tests.integration.conftest import run_to_end
from tests.integration.disks import size_limit
from tests.integration.traffic import Validator

TOURNAMENTS = ("text", "image", "environment")
REPOSITORIES = {
    name: value
    for kind in TOURNAMENTS
    for name, value in (
        (f"TRAINING_REPO_{kind.upper()}_URL", f"https://github.com/owner/{kind}"),
        (f"TRAINING_REPO_{kind.upper()}_COMMIT", "0" * 40),
    )
}
#: Letters that JSON, shells and addresses each write differently.
AWKWARD = "/+=&%'\"\\ "


def made_up() -> dict[str, str]:
    """A value for every setting that is secret, those of tomorrow too; each can be found again."""
    made = {name.upper(): f"{name}{AWKWARD}{secrets.token_hex(16)}" for name in SECRET_FIELDS}
    # An address, or it is refused.
    return made | {"NOTIFY_URLS": f"json://{LOOPBACK}:9/{secrets.token_hex(16)}"}


def spellings(secret: str) -> Iterator[bytes]:
    """Written down apart from the redactor's own list: it is what is tried here."""
    yield secret.encode()
    yield secret.encode().hex().encode()
    yield quote(secret, safe="").encode()
    yield quote(secret).encode()
    yield json.dumps(secret)[1:-1].encode()
    yield repr(secret)[1:-1].encode()
    for text in (secret, f"x:{secret}", f"xy:{secret}", f"xyz:{secret}"):
        # Without its ends, which depend on the neighbours.
        yield base64.b64encode(text.encode())[8:-8]
        yield base64.urlsafe_b64encode(text.encode())[8:-8]


def found(given: dict[str, str], text: bytes) -> set[str]:
    return {name for name, secret in given.items() if any(part in text for part in spellings(secret))}


def everything_in(folder: Path) -> bytes:
    """But what vanishes meanwhile, as files of a daemon that runs do."""
    kept = []
    for where, _, names in os.walk(folder):
        for path in (Path(where, name) for name in sorted(names)):
            with suppress(FileNotFoundError):
                if path.is_file():
                    kept.append(path.read_bytes())
    return b"\0".join(kept)


def command_lines(pid: int) -> bytes:
    """As anybody on the machine can read them: the process's own, and those of what it started."""
    lines, known = [], {pid}
    for process in sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        try:
            parent = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
            if process in known or parent in known:
                known.add(process)
                lines.append(Path(f"/proc/{process}/cmdline").read_bytes())
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended meanwhile
    return b"\0".join(lines)


def encrypt_hotkey(stack: DevStack, password: str) -> dict[str, str]:
    """Encrypt the miner's hotkey and take its public half away, so that the daemon has to open it.

    What must not get out of it then.
    """
    path = hotkey_file(stack.keys.wallet_path, "miner", "default")
    plain = path.read_bytes()
    path.write_bytes(bytes(encrypt_keyfile_data(plain, password)))
    path.with_name("defaultpub.txt").unlink()
    kept = json.loads(plain)
    return {name: kept[name] for name in ("privateKey", "secretSeed") if kept.get(name)}


async def started(child: ChildProcess) -> bytes:
    """Start it; all command lines seen until it answered."""
    seen = set()
    starting = asyncio.create_task(asyncio.to_thread(child.start))
    while not starting.done():
        if child.process is not None:
            seen.add(command_lines(child.pid))
        await asyncio.sleep(0.05)
    await starting
    return b"\0".join([*seen, command_lines(child.pid)])


async def answers_to_strangers(stack: DevStack, given: dict[str, str]) -> bytes:
    """Requests that carry secrets to where they don't belong. Their replies may quote them back."""
    token = given["OPERATOR_TOKEN"]
    carriers = [
        request(f"/training_repo/{quote(token, safe='')}"),
        request(f"/nowhere/{quote(token)}?token={quote(token)}"),
        request("/healthz", {"authorization": f"Bearer {token}", "cookie": token}),
        request("/task_offer/", {"nonce": token, "signature": token}, token.encode()),
        f"GET {token} {token}\r\n\r\n".encode(),
    ]
    for port in (stack.public_port, stack.operator_port):
        for one in carriers:
            await raw.ask(port, one)
    refused = [
        request("/status"),
        request("/status", {"authorization": "Bearer a-wrong-one-of-decent-length"}),
        request("/metrics?token=none"),
    ]
    return b"".join([_whole(await raw.ask(stack.operator_port, one), 401) for one in refused])


async def answers_to_validators(validator: Validator) -> bytes:
    port = validator.stack.public_port
    task = validator.task()
    offer, start = validator.offer(task), validator.start(task)
    replies = [
        _whole(await raw.ask(port, offer.request), 200),
        _whole(await raw.ask(port, start.request), 200),
        _whole(await raw.ask(port, offer.request), 401),
        _whole(await raw.ask(port, offer.request.replace(b"POST", b"PUT", 1)), 405),
        _whole(await raw.ask(port, validator.offer(task).request.replace(b"task_id", b"task_ix")), 401),
        _whole(await raw.ask(port, validator.get(f"/get_latest_model_submission/{task.task_id}")), 404),
        _whole(await raw.ask(port, request("/healthz")), 200),
    ]
    return b"".join(replies)


async def answers_to_the_operator(stack: DevStack, token: str) -> bytes:
    headers = {"authorization": f"Bearer {token}"}
    status = await raw.ask(stack.operator_port, request("/status", headers))
    metrics = await asyncio.to_thread(_text, stack.operator_port, "/metrics", token)
    assert b"# HELP" in metrics
    return _whole(status, 200) + metrics


def _text(port: int, path: str, token: str) -> bytes:
    """The metrics page is the one reply that is not JSON."""
    with closing(http.client.HTTPConnection(LOOPBACK, port, timeout=60)) as connection:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        return connection.getresponse().read()


def _whole(answer: Reply | None, status: int) -> bytes:
    assert answer is not None
    assert answer.status == status, answer
    return repr(answer.headers).encode() + answer.body


async def failing_writes(validator: Validator, child: ChildProcess) -> None:
    """For the tracebacks."""
    disk = size_limit(validator.stack.data_dir)
    disk.fill(child.pid)
    for _ in range(2000):
        answer = await raw.ask(validator.stack.public_port, validator.offer(validator.task()).request)
        if answer is not None and answer.status == 503:
            break
    else:
        pytest.fail("the disk does not fill up")
    disk.free(child.pid)


@pytest.mark.kept("console")
@pytest.mark.parametrize("log_format", ["json", "console"])
async def test_no_secret_gets_out_of_a_running_daemon(
    log_format: str, stack: DevStack, validator: Validator
) -> None:
    given = made_up()
    # Opening one takes seconds, and what comes after that is the same: once is enough.
    never = encrypt_hotkey(stack, given["WALLET_PASSWORD"]) if log_format == "json" else {}
    node_key = secrets.token_hex(16)
    settings = {
        **given,
        **REPOSITORIES,
        "SUBTENSOR_ADDRESS": f"ws://user:{node_key}@{LOOPBACK}:9/v1/{node_key}",
        "LOG_LEVEL": "DEBUG",
        "LOG_FORMAT": log_format,
    }
    never |= {**given, "SUBTENSOR_ADDRESS": node_key, "NOTIFY_URLS": given["NOTIFY_URLS"].rpartition("/")[2]}

    child = daemon_process(stack, settings)
    try:
        lines = await started(child)
        replies = await answers_to_validators(validator)
        replies += await answers_to_strangers(stack, given)
        replies += await answers_to_the_operator(stack, given["OPERATOR_TOKEN"])
        for kind in TOURNAMENTS:
            reply = await raw.ask(stack.public_port, validator.get(f"/training_repo/{kind}"))
            assert reply is not None
            # The one place where it belongs, and there whole.
            token = f"TRAINING_REPO_{kind.upper()}_TOKEN"
            assert reply.json["github_token"] == given[token]
            assert found(never, reply.body) == {token}
        await failing_writes(validator, child)
        kept = everything_in(stack.data_dir)
    finally:
        ended_with = child.stop()
    kept += everything_in(stack.data_dir)
    log = child.log_file.read_bytes()

    assert ended_with == DaemonExitCode.OK
    assert b"Traceback" in log
    assert b"DEBUG" in log
    assert b"SQLite format 3" in kept
    assert b"-m\0miner\0run" in lines
    for where, text in (("log", log), ("data", kept), ("command lines", lines), ("replies", replies)):
        assert found(never, text) == set(), where


def test_what_is_looked_for_would_be_found() -> None:
    given = made_up()
    for name, secret in given.items():
        for wrapped in (secret, json.dumps({"x": secret}), repr([secret]), quote(secret, safe="")):
            assert found(given, f"before {wrapped} after".encode()) == {name}
        for user in ("u", "us", "use"):
            basic = base64.b64encode(f"{user}:{secret}".encode())
            assert found(given, b"Basic " + basic) == {name}


async def test_a_chain_that_does_not_answer_is_reported_without_its_key(stack: DevStack) -> None:
    (nobody,) = free_ports(1)
    key, password = secrets.token_hex(16), secrets.token_hex(8)
    token = secrets.token_hex(16)
    settings = {
        "CHAIN": "bittensor",
        "PUBLIC_IP": "127.0.0.1",
        "ALLOW_PRIVATE_AXON": "true",
        "SUBTENSOR_ADDRESS": f"ws://user:{password}@{LOOPBACK}:{nobody}/v1/{key}?api_key={key}",
        "OPERATOR_TOKEN": token,
        "LOG_LEVEL": "DEBUG",
    }
    child = daemon_process(stack, settings)
    try:
        lines = await started(child)
        headers = {"authorization": f"Bearer {token}"}
        async with asyncio.timeout(200):
            while True:
                status = await raw.ask(stack.operator_port, request("/status", headers))
                lines += command_lines(child.pid)
                assert status is not None
                if status.json["chain"]["last_error"]:
                    break
                await asyncio.sleep(0.1)
    finally:
        child.stop()
    log = child.log_file.read_bytes()
    assert f"{LOOPBACK}:{nobody}".encode() in log
    assert b"could not refresh the metagraph" in log
    given = {"key": key, "password": password, "token": token}
    for where, text in (("log", log), ("status", status.body), ("command lines", lines)):
        assert found(given, text) == set(), where
    assert found(given, everything_in(stack.data_dir)) == set()


def test_no_secret_is_reported_by_a_start_that_fails(stack: DevStack) -> None:
    given = made_up()
    short = {"OPERATOR_TOKEN": "too-short-7f3a", "TRAINING_REPO_TEXT_TOKEN": "xyz"}
    slip = secrets.token_hex(16)
    for env_file, settings, named in (
        ("", {**given, "NETUID": "x"}, "NETUID"),
        ("", {**given, **short}, "OPERATOR_TOKEN"),
        (f"WALLET_PASSWORD: {slip}\n{slip}\n", {}, ".env line 2"),
        ("", {**given, **REPOSITORIES, "WALLET_NAME": "mistyped"}, "there is no hotkey"),
    ):
        (stack.folder / ".env").write_text(env_file)
        done = run_to_end(daemon_process(stack, settings))
        assert done.returncode == DaemonExitCode.CONFIG
        assert named in done.stderr
        output = done.stdout + done.stderr
        assert found({**given, "slip": slip}, output.encode()) == set()
        assert not any(value in output for value in short.values())
