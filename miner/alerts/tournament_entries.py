"""The look at what /training_repo hands out, in a process of its own, and the alert that follows.

A tournament would find out too late, and keep the fee."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, SecretStr, TypeAdapter, field_serializer

from core.domain.records import Record
from core.domain.wire import TournamentType, TrainingRepoResponse
from miner.observe.alerts import AlertKind, SendAlert
from miner.support.child_main import ChildProtocol
from miner.support.subprocess import run_order, worker_environment

log = logging.getLogger(__name__)

#: A tournament begins once a week, and a repository may change any day.
LOOK_S = 6 * 3600.0
#: A clone has 60 s, of at most three repositories.
LIMIT_S = 600.0
#: Below DATA_DIR: the directories of the entries that were prepared last, by kind.
PREPARED = Path("tournament") / "prepared.json"


class EnteredRepo(Record):
    """A repository and commit that validators are told."""

    kind: TournamentType
    url: str
    commit: str
    token: SecretStr | None = None

    @field_serializer("token", when_used="json")
    def _plain(self, token: SecretStr | None) -> str | None:
        """Orders go to the child's standard input only."""
        return token.get_secret_value() if token else None


class EntriesOrder(Record):
    entries: tuple[EnteredRepo, ...]
    #: The record that `tournament prepare` keeps of its entries.
    prepared: Path


class EntriesChecked(Record):
    """Problems of each entry that could be looked at, if any; what could not be is only told."""

    problems: dict[TournamentType, tuple[str, ...]] = Field(default_factory=dict)
    unknown: tuple[str, ...] = ()


PROTOCOL: ChildProtocol[EntriesOrder, EntriesChecked] = ChildProtocol(
    "miner.tournament.entry_watch", TypeAdapter(EntriesOrder), TypeAdapter(EntriesChecked)
)


class TournamentEntries:
    """The result of the last looks at the entries."""

    def __init__(
        self, repos: Mapping[TournamentType, TrainingRepoResponse], data_dir: Path, alert: SendAlert
    ) -> None:
        entries = (
            EnteredRepo(
                kind=kind,
                url=repo.github_repo,
                commit=repo.commit_hash,
                token=SecretStr(repo.github_token) if repo.github_token else None,
            )
            for kind, repo in repos.items()
        )
        self._order = EntriesOrder(entries=tuple(entries), prepared=data_dir / PREPARED)
        self._alert = alert
        #: By kind; one that cannot be looked at keeps what was found before.
        self._found: dict[TournamentType, tuple[str, ...]] = {}

    async def check(self) -> None:
        if not self._order.entries:
            return
        try:
            async with asyncio.timeout(LIMIT_S):
                answer = await run_order(
                    PROTOCOL, self._order, lambda event: None, environment=worker_environment()
                )
        except (OSError, TimeoutError) as error:
            log.info("the tournament entries are not looked at: %s", error)
            return
        if answer.event is None:
            log.info("the tournament entries are not looked at: %s", answer.ending)
            return
        for text in answer.event.unknown:
            log.info("a tournament entry is not looked at: %s", text)
        before = self.problem
        self._found |= answer.event.problems
        if self.problem and self.problem != before:
            self._alert(AlertKind.TOURNAMENT_ENTRY, self.problem)

    @property
    def problem(self) -> str | None:
        return "; ".join(text for kind in sorted(self._found) for text in self._found[kind]) or None

    def standing(self) -> Mapping[str, str | None]:
        """The standing problem, for the alerts. Before the first look nothing is known, so nothing ends."""
        return {AlertKind.TOURNAMENT_ENTRY: self.problem} if self._found else {}
