"""A disk that is full or cannot be written: told in plain words, survived, and over when it is over."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator

import pytest

from miner.dev.stack import ChildProcess, DevStack, daemon_process
from miner.server import DaemonExitCode
from miner.store.database import FILE_NAME
from tests.doubles.http_bytes import Reply, request
from tests.integration.conftest import Ended, assert_ended, run_to_end, spawn
from tests.integration.disks import Disk, bound_by_permissions, closed, size_limit, small_disk
from tests.integration.traffic import (
    GENEROUS,
    Sent,
    Validator,
    assert_kept,
    assert_whole,
    say_all,
    store,
    used_nonces,
)

Running = Callable[..., ChildProcess]
Ending = Callable[..., Ended]


@pytest.fixture(params=["limited", "mounted"])
def disk(request: pytest.FixtureRequest, stack: DevStack) -> Iterator[Disk]:
    """Full in two ways: files that may not grow, which every machine has, and a real file system."""
    if request.param == "limited":
        yield size_limit(stack.data_dir)
        return
    with small_disk(stack.data_dir) as mounted:
        if mounted is None:
            pytest.skip("no file system can be mounted here; the limit on file sizes has been tried instead")
        yield mounted


async def answered(validator: Validator, one: Sent) -> Reply:
    (one.answer,) = await say_all(validator.stack.public_port, [one.request])
    return one.answer


async def until_refused(validator: Validator) -> list[Sent]:
    """Offers up to the first that cannot be written. The log may have some room left that is used again."""
    sent: list[Sent] = []
    while not sent or sent[-1].acknowledged:
        sent.append(validator.offer(validator.task()))
        await answered(validator, sent[-1])
        assert len(sent) < 5000, "the disk does not fill up"
    return sent


async def test_a_full_disk_is_a_clear_503_and_is_over_when_there_is_room(
    validator: Validator, disk: Disk, running: Running
) -> None:
    child = running(**GENEROUS)
    sent = [validator.offer(validator.task())]
    assert (await answered(validator, sent[0])).status == 200

    disk.fill(child.pid)
    sent += await until_refused(validator)
    refused = [sent[-1], validator.offer(validator.task()), validator.start(validator.task())]
    for one in refused:
        answer = await answered(validator, one)
        if one is not sent[-1]:
            assert answer.status == 503
            assert answer.json["error"] == "store_unavailable"
            assert "free disk space" in answer.json["message"]
    (health,) = await say_all(validator.stack.public_port, [request("/healthz")])
    assert health.status == 200

    disk.free(child.pid)
    after = [validator.offer(validator.task()), validator.start(validator.task())]
    for one in after:
        assert (await answered(validator, one)).status == 200
    assert child.stop() == DaemonExitCode.OK
    with store(validator.stack) as connection:
        assert_whole(connection)
        assert_kept(connection, [*sent, *refused[1:], *after])
        assert not {one.nonce for one in refused} & used_nonces(connection)


@pytest.mark.kept("limited")
async def test_nothing_is_lost_when_it_stops_and_starts_on_a_full_disk(
    validator: Validator, disk: Disk, running: Running
) -> None:
    child = running(**GENEROUS)
    disk.fill(child.pid)
    sent = await until_refused(validator)
    assert child.stop() == DaemonExitCode.OK
    # What it writes of its own accord, such as an alert, fails like all else and is no mistake of the stop.
    last = [line for line in child.log_tail(5).splitlines() if "disk is full" not in line]
    assert "Traceback" not in "\n".join(last)
    disk.free(os.getpid())
    again = running(**GENEROUS)
    with store(validator.stack) as connection:
        assert_whole(connection)
        assert_kept(connection, sent)
    assert again.stop() == DaemonExitCode.OK


@pytest.mark.kept("limited")
def test_a_start_on_a_full_disk_is_reported_and_may_be_tried_again(
    stack: DevStack, disk: Disk, running: Running
) -> None:
    # At once for the process, whichever kind of disk it is.
    with spawn(daemon_process(stack), preexec_fn=lambda: disk.fill(os.getpid())) as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == DaemonExitCode.FAILED  # not one that pm2 gives up on
    assert str(stack.data_dir) in errors
    assert "free disk space" in errors
    assert "Traceback" not in errors
    disk.free(os.getpid())
    assert running().stop() == DaemonExitCode.OK


@pytest.mark.kept("False")
@pytest.mark.parametrize("used_before", [False, True])
def test_a_folder_that_can_not_be_written_is_named(
    used_before: bool, stack: DevStack, running: Running
) -> None:
    stack.data_dir.mkdir()
    if used_before:
        assert running().stop() == DaemonExitCode.OK
    with closed(stack.data_dir):
        done = run_to_end(bound_by_permissions(daemon_process(stack)))
    assert_ended(done, DaemonExitCode.CONFIG, str(stack.data_dir), "DATA_DIR")


@pytest.mark.kept("god-miner.sqlite3")
@pytest.mark.parametrize("name", [FILE_NAME, "god-miner.lock"])
def test_a_file_of_somebody_else_in_the_folder_is_named(name: str, stack: DevStack, running: Running) -> None:
    assert running().stop() == DaemonExitCode.OK
    path = stack.data_dir / name
    before = path.read_bytes()
    path.chmod(0o000)
    done = run_to_end(bound_by_permissions(daemon_process(stack)))
    path.chmod(0o600)
    assert_ended(done, DaemonExitCode.CONFIG, str(path))
    assert path.read_bytes() == before


def test_a_data_folder_that_is_a_file_is_named(stack: DevStack, ended: Ending) -> None:
    stack.data_dir.write_text("not a folder\n")
    assert_ended(ended(), DaemonExitCode.CONFIG, str(stack.data_dir), "DATA_DIR")


async def test_a_folder_closed_while_it_runs_does_not_stop_it(validator: Validator, stack: DevStack) -> None:
    with bound_by_permissions(daemon_process(stack, GENEROUS)) as child, closed(stack.data_dir):
        sent = [validator.offer(validator.task()), validator.start(validator.task())]
        for one in sent:
            assert (await answered(validator, one)).status == 200
        assert child.stop() == DaemonExitCode.OK
        assert "Traceback" not in child.log_file.read_text()
    with store(stack) as connection:
        assert_whole(connection)
        assert_kept(connection, sent)


@pytest.mark.kept("")
@pytest.mark.parametrize("tail", ["", "-wal"])
async def test_a_database_that_is_removed_under_the_daemon_ends_it_with_the_reason(
    validator: Validator, running: Running, tail: str
) -> None:
    child = running(**GENEROUS)
    assert (await answered(validator, validator.offer(validator.task()))).status == 200
    path = validator.stack.data_dir / f"{FILE_NAME}{tail}"
    path.unlink()
    assert child.process is not None
    assert await asyncio.to_thread(child.process.wait, 120) == DaemonExitCode.FAILED
    log = validator.stack.log_file.read_text().splitlines()
    # SQLite may remove the other file as well by then.
    assert any(str(path) in line and "was removed while the daemon ran" in line for line in log)
