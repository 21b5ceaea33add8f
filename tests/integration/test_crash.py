"""`kill -9` at any instant: what was acknowledged is kept, nonces stay used, nothing is half done."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from random import Random

import pytest

from miner.dev.stack import ChildProcess
from tests.integration.traffic import (
    GENEROUS,
    Sent,
    Stream,
    Validator,
    assert_kept,
    assert_whole,
    books,
    say_all,
    statuses,
    used_nonces,
)

pytestmark = pytest.mark.integration

LANES = 20
#: Answers after which the daemon is killed, one life each: at once, early, and deep in the stream, with
#: commits of every size under way.
LIVES = [1, *Random(56).sample(range(2, 400), 3), 1000]


def kill(daemon: ChildProcess) -> None:
    assert daemon.process is not None
    os.kill(daemon.pid, signal.SIGKILL)
    assert daemon.process.wait() == -signal.SIGKILL


async def live(validator: Validator, daemon: ChildProcess, answers: int) -> Stream:
    """One life under traffic, killed at the given answer: the other lanes' requests are in flight then."""
    stream = Stream(validator)

    def on_answer(count: int) -> None:
        if count == answers:
            stream.stopping = True
            kill(daemon)

    stream.on_answer = on_answer
    await stream.run(LANES)
    assert stream.answered >= answers
    return stream


async def assert_no_nonce_is_good_twice(validator: Validator, sent: list[Sent]) -> None:
    with books(validator.stack) as connection:
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


async def test_what_was_acknowledged_survives_kill_9_at_any_instant(
    validator: Validator, running: Callable[..., ChildProcess]
) -> None:
    ever: list[Sent] = []
    daemon = running(**GENEROUS)
    for answers in LIVES:
        stream = await live(validator, daemon, answers)
        with books(validator.stack) as connection:
            assert_whole(connection)
            assert_kept(connection, stream.sent)
        ever += stream.sent
        daemon = running(**GENEROUS)
        await assert_no_nonce_is_good_twice(validator, stream.sent)

    # A miner without room refuses what it does not know: a "yes" can only be the one in the books.
    assert daemon.stop() == 0
    running(**{**GENEROUS, "MAX_JOBS": "0"})
    fresh = await say_all(validator.stack.public_port, [validator.offer(validator.task()).request])
    assert fresh[0].json["accepted"] is False
    await assert_first_answers_stand(validator, ever)
    with books(validator.stack) as connection:
        assert_whole(connection)
        assert_kept(connection, ever)


async def test_what_was_in_flight_and_not_kept_may_be_sent_again(
    validator: Validator, running: Callable[..., ChildProcess]
) -> None:
    stream = await live(validator, running(**GENEROUS), 100)
    with books(validator.stack) as connection:
        used = used_nonces(connection)
    lost = [one.request for one in stream.sent if one.nonce not in used]
    assert lost, "the kill came when nothing was in flight; it has shown nothing"
    running(**GENEROUS)
    assert statuses(await say_all(validator.stack.public_port, lost)) == {200: len(lost)}
