"""`kill -9`: what was acknowledged is kept, nonces stay used, nothing is half done."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, closing, contextmanager, suppress

from miner.dev.stack import ChildProcess
from miner.store.database import FILE_NAME
from tests.doubles.http_bytes import request
from tests.integration import raw
from tests.integration.traffic import (
    GENEROUS,
    Sent,
    Stream,
    Validator,
    assert_kept,
    assert_whole,
    say_all,
    statuses,
    store,
    used_nonces,
)

LANES = 20
#: Answers after which the daemon is killed, one life each: at once, and deep in the stream, with commits of
#: every size under way.
LIVES = (1, 200)


def kill(daemon: ChildProcess) -> None:
    assert daemon.process is not None
    os.kill(daemon.pid, signal.SIGKILL)
    assert daemon.process.wait() == -signal.SIGKILL


async def live(validator: Validator, daemon: ChildProcess, answers: int) -> Stream:
    """One life under traffic, killed at the given answer: the other lanes' requests are in flight then."""
    stream = Stream(validator)

    def on_answer(count: int) -> None:
        if count == answers:
            stream.stopping = stream.killed = True
            kill(daemon)

    stream.on_answer = on_answer
    await stream.run(LANES)
    assert stream.answered >= answers
    return stream


@contextmanager
def writes_held(validator: Validator) -> Iterator[None]:
    """A gate in front of every commit: another process has the database's write lock."""
    with closing(sqlite3.connect(validator.stack.data_dir / FILE_NAME, isolation_level=None)) as connection:
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE")
                break
            except sqlite3.OperationalError:  # the daemon writes just now
                continue
        yield


async def assert_no_nonce_is_good_twice(validator: Validator, sent: list[Sent]) -> None:
    with store(validator.stack) as connection:
        used = used_nonces(connection)
    replays = [one.request for one in sent if one.nonce in used]
    answers = await say_all(validator.stack.public_port, replays)
    assert statuses(answers) == {401: len(replays)}
    assert {answer.json["error"] for answer in answers} <= {"bad_credentials", "nonce_used"}


async def assert_first_answers_stand(validator: Validator, sent: list[Sent]) -> None:
    offers = [one for one in sent if one.call == "offer" and one.acknowledged]
    answers = await say_all(
        validator.stack.public_port, [validator.offer(one.task).request for one in offers]
    )
    assert [answer.body for answer in answers] == [one.answer.body for one in offers if one.answer]


async def test_what_was_acknowledged_survives_kill_9(
    validator: Validator, running: Callable[..., ChildProcess]
) -> None:
    ever: list[Sent] = []
    daemon = running(**GENEROUS)
    for answers in LIVES:
        stream = await live(validator, daemon, answers)
        with store(validator.stack) as connection:
            assert_whole(connection)
            assert_kept(connection, stream.sent)
        ever += stream.sent
        daemon = running(**GENEROUS)
        await assert_no_nonce_is_good_twice(validator, stream.sent)

    # A miner without room refuses what it does not know: a "yes" can only be the one in the store.
    assert daemon.stop() == 0
    running(**{**GENEROUS, "MAX_JOBS": "0"})
    fresh = await say_all(validator.stack.public_port, [validator.offer(validator.task()).request])
    assert fresh[0].json["accepted"] is False
    await assert_first_answers_stand(validator, ever)
    with store(validator.stack) as connection:
        assert_whole(connection)
        assert_kept(connection, ever)


async def test_what_was_in_flight_and_not_kept_may_be_sent_again(
    validator: Validator, running: Callable[..., ChildProcess]
) -> None:
    """Killed while every request waits for its commit."""
    daemon = running(**GENEROUS)
    offers = [validator.offer(validator.task()) for _ in range(LANES)]
    async with AsyncExitStack() as stack:
        stack.enter_context(writes_held(validator))
        connections = [
            await stack.enter_async_context(await raw.connect(validator.stack.public_port)) for _ in offers
        ]
        for connection, one in zip(connections, offers, strict=True):
            connection.send(one.request)
        # It serves on, and so has read what came before.
        assert await raw.ask(validator.stack.public_port, request("/healthz")) is not None
        kill(daemon)
        for connection, one in zip(connections, offers, strict=True):
            with suppress(raw.Cut):
                one.answer = await connection.answer()
            # On a slow machine it may have given up waiting for the lock.
            assert one.answer is None or one.answer.json["error"] == "store_unavailable"
    with store(validator.stack) as kept:
        assert_whole(kept)
        assert_kept(kept, offers)
        assert not used_nonces(kept)
    running(**GENEROUS)
    requests = [one.request for one in offers]
    assert statuses(await say_all(validator.stack.public_port, requests)) == {200: len(offers)}
