"""The daemon as pm2 runs it: `pm2 restart` under traffic loses nothing, a wrong setting does not loop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from miner.dev.stack import DevStack
from miner.server import DaemonExitCode
from tests.doubles.http_bytes import request
from tests.integration import raw
from tests.integration.pm2 import NAME, Pm2, pm2_for
from tests.integration.traffic import Stream, Validator, assert_kept, assert_whole, say_all, store

CONCURRENT = 200
#: Answers before the restart is asked for, and after the restarted daemon gave its first one.
BEFORE, AFTER = 400, 400
#: So many at least find GPUs free in the first life; those after them are refused.
ACCEPTED = 20


@pytest.fixture
def pm2(stack: DevStack) -> Iterator[Pm2]:
    with pm2_for(stack, {"MAX_JOBS": "10000", "SHUTDOWN_GRACE_SECONDS": "10"}) as made:
        yield made


async def answering(pm2: Pm2, limit_s: float = 90.0) -> None:
    async with asyncio.timeout(limit_s):
        health = request("/healthz")
        while await raw.ask(pm2.stack.public_port, health) is None:
            await asyncio.sleep(0.02)


async def test_a_restart_amid_200_concurrent_offers_tears_and_loses_nothing(
    pm2: Pm2, validator: Validator
) -> None:
    pm2("start", "ecosystem.config.js", "--only", NAME)
    await answering(pm2)
    first = pm2.state()
    # Read at the restart: the new life has no room, so a "yes" from it can only come out of the store.
    pm2.settings(MAX_JOBS="0")

    stream = Stream(validator, offers_only=True)
    streaming = asyncio.create_task(stream.run(CONCURRENT))
    async with asyncio.timeout(240):
        await stream.reach(BEFORE)
        await asyncio.to_thread(pm2, "restart", "god-miner")
        await stream.reach(stream.answered + AFTER)
    stream.stopping = True
    await streaming  # a torn reply is raised here
    # What was in flight when the old life was told to go was answered, and told not to come back.
    assert any(one.answer and one.answer.closes for one in stream.sent)

    second = pm2.state()
    assert second["status"] == "online"
    assert second["pid"] != first["pid"]
    assert second["restarts"] == first["restarts"] + 1
    with store(validator.stack) as connection:
        assert_whole(connection)
        assert_kept(connection, stream.sent)

    accepted_offers = [
        (one.task, one.answer.body)
        for one in stream.sent
        if one.answer and one.acknowledged and one.answer.json["accepted"]
    ]
    assert len(accepted_offers) >= ACCEPTED
    again = [validator.offer(task).request for task, _ in accepted_offers]
    repeats = await say_all(validator.stack.public_port, again)
    assert [answer.body for answer in repeats] == [body for _, body in accepted_offers]
    (fresh,) = await say_all(validator.stack.public_port, [validator.offer(validator.task()).request])
    assert fresh.json["accepted"] is False


async def test_a_wrong_setting_is_tried_once_and_a_daemon_that_crashes_is_started_again(pm2: Pm2) -> None:
    pm2.settings(NETUID="fifty-six", MAX_HOURS="-1")
    pm2("start", "ecosystem.config.js", "--only", NAME)
    # pm2 notes the code first and that there is no process any more a moment later.
    gave_up = await asyncio.to_thread(
        pm2.until, lambda state: (state["exit_code"], state["pid"]) == (DaemonExitCode.CONFIG, 0)
    )
    assert gave_up["status"] == "waiting restart"  # pm2's word for it, explained in docs/operations.md
    # The first restart would come after half a second.
    await asyncio.sleep(2)
    assert pm2.state() == gave_up
    assert pm2.log().count("settings: 2 problems") == 1

    pm2.settings()
    pm2("restart", "god-miner")
    await answering(pm2)
    assert pm2.state()["status"] == "online"

    before = pm2.state()
    os.kill(before["pid"], signal.SIGKILL)
    after = await asyncio.to_thread(
        pm2.until, lambda state: state["status"] == "online" and state["pid"] not in (0, before["pid"])
    )
    await answering(pm2)
    assert after["restarts"] == before["restarts"] + 1
    # pm2 shows the one in red and the other plain.
    assert '"level": "INFO"' in pm2.log("out")
    assert '"level": "INFO"' not in pm2.log("error")
