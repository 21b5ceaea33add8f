"""A chain source that answers as a test tells it to."""

from __future__ import annotations

from collections.abc import Iterable

from miner.chain.metagraph import Metagraph, PublishResult


class FakeSource:
    def __init__(
        self,
        answers: Iterable[Metagraph | BaseException] = (),
        *,
        name: str = "test",
        netuid: int = 56,
        genesis: str | None = None,
        poll_seconds: float | None = None,
    ) -> None:
        self.answers = list(answers)
        self.name = name
        self.netuid = netuid
        self.genesis = genesis
        self.poll_seconds = poll_seconds
        self.asked = 0

    async def metagraph(self) -> Metagraph:
        self.asked += 1
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def publish_axon(self, ip: str, port: int) -> PublishResult:
        raise NotImplementedError
