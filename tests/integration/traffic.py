"""Validators' traffic, remembered: each request with what came of it, to be held against the store."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from random import Random
from typing import Any, Literal

from core.domain.tasks import OFFERED_TASKS, TaskType
from miner.chain.fiber import NONCE, sign_headers
from miner.dev.samples import SampleTask, sample_task
from miner.dev.stack import DevStack
from miner.store.database import FILE_NAME, connect_for_reading
from tests.doubles.http_bytes import Reply, request
from tests.integration import raw
from tests.integration.raw import Connection, Cut

#: Nobody is to be refused for asking much: what is tried here is something else.
GENEROUS = {
    "MAX_JOBS": "10000",
    "miner.chain.auth.REQUEST_BURST": "1e6",
    "miner.chain.auth.FAILURE_BURST": "1e6",
}


@dataclass
class Sent:
    call: Literal["offer", "start"]
    task: SampleTask
    request: bytes
    nonce: str
    answer: Reply | None = None

    @property
    def acknowledged(self) -> bool:
        return self.answer is not None and self.answer.status == 200


@dataclass
class Validator:
    """Makes signed requests, each with a nonce of its own."""

    stack: DevStack
    seed: int = 0
    _random: Random = field(init=False)
    _types: Iterator[TaskType] = field(init=False)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)
        self._types = cycle(OFFERED_TASKS)

    def task(self) -> SampleTask:
        return sample_task(next(self._types), self._random)

    def renamed(self, task: SampleTask) -> SampleTask:
        return task.restarted(self._random)

    def offer(self, task: SampleTask, padding: int = 0) -> Sent:
        """With padding, as large as an offer of some newer validator might be."""
        more = {"newer": "x" * padding} if padding else {}
        return self._signed("offer", task, task.offer_path, {**task.offer(), **more})

    def start(self, task: SampleTask) -> Sent:
        return self._signed("start", task, task.start_path, task.start())

    def get(self, path: str) -> bytes:
        keys = self.stack.keys
        return request(path, sign_headers(keys.validator, keys.miner.ss58_address, None))

    def _signed(
        self, call: Literal["offer", "start"], task: SampleTask, path: str, payload: dict[str, Any]
    ) -> Sent:
        keys, body = self.stack.keys, json.dumps(payload).encode()
        headers = sign_headers(keys.validator, keys.miner.ss58_address, body)
        return Sent(call, task, request(path, headers, body), headers[NONCE])


@dataclass
class Stream:
    """Lanes of offers and starts, until told to stop. What was not delivered is counted, not repeated."""

    validator: Validator
    sent: list[Sent] = field(default_factory=list)
    answered: int = 0
    #: Connections that were refused, and requests whose connection ended before the first byte of a reply.
    refused: int = 0
    unanswered: int = 0
    stopping: bool = False
    #: The daemon was killed: a reply that the kill cut is no answer. Otherwise a cut reply is an error.
    killed: bool = False
    #: No starts.
    offers_only: bool = False
    #: Called with each answer that comes in.
    on_answer: Callable[[int], None] = lambda _count: None
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, lanes: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(lanes):
                group.create_task(self._lane())

    async def reach(self, answers: int) -> None:
        """Returns when so many answers have come in."""
        while self.answered < answers:
            self._news.clear()
            await self._news.wait()

    async def _lane(self) -> None:
        """A task after the other, each offered, started, and started again under another name."""
        while not self.stopping:
            try:
                async with await raw.connect(self.validator.stack.public_port) as connection:
                    while not self.stopping and await self._one_task(connection):
                        pass
            except OSError:
                self.refused += 1
                await asyncio.sleep(0.05)

    async def _one_task(self, connection: Connection) -> bool:
        """Whether the connection may be used for another one."""
        validator, task = self.validator, self.validator.task()
        for make in (
            lambda: validator.offer(task),
            lambda: validator.start(task),
            lambda: validator.start(validator.renamed(task)),
        )[: 1 if self.offers_only else 3]:
            if self.stopping or not await self._say(connection, make()):
                return False
        return True

    async def _say(self, connection: Connection, one: Sent) -> bool:
        """Whether the conversation goes on."""
        self.sent.append(one)
        connection.send(one.request)
        try:
            one.answer = await connection.answer()
        except Cut:
            if not self.killed:
                raise
        if one.answer is None:
            self.unanswered += 1
            return False
        self.answered += 1
        self._news.set()
        self.on_answer(self.answered)
        return not one.answer.closes


async def say_all(port: int, requests: Iterable[bytes], lanes: int = 8) -> list[Reply]:
    """Each request's answer, in their order, from a daemon that is at rest otherwise."""
    waiting = list(requests)
    parts = await asyncio.gather(*(_say_in_turn(port, waiting[lane::lanes]) for lane in range(lanes)))
    answers = [iter(part) for part in parts]
    return [next(answers[number % lanes]) for number in range(len(waiting))]


async def _say_in_turn(port: int, requests: list[bytes]) -> list[Reply]:
    answers: list[Reply] = []
    while len(answers) < len(requests):
        async with await raw.connect(port) as connection:
            while len(answers) < len(requests):
                connection.send(requests[len(answers)])
                answer = await connection.answer()
                assert answer is not None, "a daemon at rest hung up without an answer"
                answers.append(answer)
                if answer.closes:
                    break
    return answers


def statuses(answers: Iterable[Reply]) -> Counter[int]:
    return Counter(answer.status for answer in answers)


@contextmanager
def store(stack: DevStack) -> Iterator[sqlite3.Connection]:
    with closing(connect_for_reading(stack.data_dir / FILE_NAME)) as connection:
        yield connection


def used_nonces(connection: sqlite3.Connection) -> set[str]:
    return {row[0] for row in connection.execute("SELECT nonce FROM nonces")}


def assert_whole(connection: sqlite3.Connection) -> None:
    """The file is sound, and no row is there without those that were to be written with it."""
    assert [row[0] for row in connection.execute("PRAGMA integrity_check")] == ["ok"]
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    for orphans in (
        "SELECT id FROM offers WHERE decision_id NOT IN (SELECT id FROM decisions) OR decision_id IS NULL",
        "SELECT id FROM decisions WHERE accepted AND offer_id IS NOT NULL "
        "AND offer_id NOT IN (SELECT offer_id FROM reservations WHERE offer_id IS NOT NULL)",
        "SELECT id FROM decisions WHERE offer_id IS NOT NULL AND job_id IS NOT NULL",
        # What names neither is a refusal that like offers share.
        "SELECT id FROM decisions WHERE offer_id IS NULL AND job_id IS NULL "
        "AND (accepted OR id NOT IN (SELECT decision_id FROM offers))",
        "SELECT id FROM jobs WHERE task_id NOT IN (SELECT task_id FROM events WHERE kind = 'start')",
        "SELECT id FROM events WHERE kind = 'start' AND task_id NOT IN (SELECT task_id FROM jobs)",
    ):
        assert connection.execute(orphans).fetchall() == [], orphans


def assert_kept(connection: sqlite3.Connection, sent: list[Sent]) -> None:
    """What was acknowledged is in the store; the rest is there whole, nonce and all, or not at all."""
    used = used_nonces(connection)
    offers = {
        row["task_id"]: row
        for row in connection.execute("SELECT * FROM offers JOIN decisions ON decisions.id = decision_id")
    }
    jobs = {row["task_id"]: row for row in connection.execute("SELECT * FROM jobs")}
    starts: defaultdict[str, list[Sent]] = defaultdict(list)
    for one in sent:
        kept = one.nonce in used
        assert kept or not one.acknowledged, f"lost: {one.call} of {one.task.task_id}"
        if one.call == "start":
            starts[one.task.task_id].append(one)
            continue
        assert (one.task.task_id in offers) == kept
        if one.acknowledged and one.answer is not None:
            row = offers[one.task.task_id]
            reported = {"accepted": bool(row["accepted"]), "message": row["message"]}
            assert reported == one.answer.json
    for task_id, tries in starts.items():
        kept_tries = [one for one in tries if one.nonce in used]
        assert (task_id in jobs) == bool(kept_tries)
        if kept_tries:
            row = jobs[task_id]
            assert row["starts"] == len(kept_tries)
            assert row["expected_repo_name"] == kept_tries[-1].task.expected_repo_name
