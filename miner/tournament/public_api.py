"""The subnet's public API, which needs no key: fees, balances, tournaments, tasks and their results.

Known from public code that reads it, the last of 2026-09-25, and from validators' own response models of
July 2026; never asked from the machine on which this was written:

- `/tournament/fees`: `text_tournament_fee_rao` and the same for image and environment.
- `/tournament/balance/{coldkey}`: `balance_rao`; 404 if the coldkey never paid.
- `/tournament/latest/details`: by kind one tournament, with `tournament_id`, `status`, `winner_hotkey`,
  `base_winner_hotkey`, `participants`, `rounds[].tasks[]` with `participant_scores[]`, and
  `boss_round_performance[]` with `task_id` and `challenger_won`. `/tournament/{id}/details`: one of them.
- `/v1/tournaments/history`: `tournaments[]` with `tournament_id`, `tournament_type`, `status`, newest first.
- `/auditing/tasks/{id}`: `task_type`, `model_id`, `model_type` (pictures), `hours_to_complete`,
  `image_text_pairs[]` (pictures), `hotkey_details[]` with `hotkey`, `repo`, `rank`, `test_loss`.

Every field is optional here and checked: what an answer of another shape does not hold is left out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from core.domain.records import printable
from core.domain.tournament_rules import CHAMPION_NAME
from core.domain.wire import TournamentType
from miner.settings import Settings
from miner.tournament.polite_client import PoliteClient, SiteAnswer, SiteError

RAO = 1e9
#: How old a stored answer may be: fees and balances; what is over no longer changes.
FRESH_S, DAY_S = 300.0, 86_400.0
#: Details of three tournaments had some hundred kilobytes; tasks with many rows more.
MAX_ANSWER = 32 * 1024**2
#: Tasks of one tournament; real ones have some tens.
MOST_TASKS = 500
_OVER = "completed"
_ADDRESS = re.compile(r"[1-9A-HJ-NP-Za-km-z]{46,49}")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
_HOTKEY = re.compile(r"[A-Za-z0-9]{1,64}")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


@dataclass(frozen=True, slots=True)
class Source:
    """The source of figures, and their time."""

    url: str
    at: float
    #: Why they are not newer, if the site did not answer.
    stale: str | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One miner's result in one task."""

    hotkey: str
    #: The hub's repository with what was trained.
    repo: str | None = None
    #: 1 is the best, None is not scored.
    rank: int | None = None
    #: What the kind of task is ranked by. Lower is better, except in GRPO and environments.
    loss: float | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class TournamentTaskResult:
    """One task of a tournament, as `/auditing/tasks/{id}` has it."""

    task_id: str
    #: As validators name it, such as ImageTask.
    task_type: str | None = None
    #: The base model; of pictures also the family.
    model_id: str | None = None
    family: str | None = None
    hours: float | None = None
    #: Pictures, or None. The container gets fewer: validators keep a tenth for the test.
    pictures: int | None = None
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupTask:
    """One task of round 1, with what each entry reached in it."""

    task_id: str
    task_type: str | None
    group: str | None
    #: As `Entry.loss`, by hotkey.
    scores: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class BossTask:
    """One task of the boss round."""

    task_id: str
    task_type: str | None
    won: bool


@dataclass(frozen=True, slots=True)
class Tournament:
    tournament_id: str
    kind: TournamentType
    status: str | None = None
    #: The champion before it.
    boss: str | None = None
    #: As the API has it: a champion that stays has another name there, `CHAMPION_NAME`.
    winner: str | None = None
    participants: tuple[str, ...] = ()
    task_ids: tuple[str, ...] = ()
    first_round: tuple[GroupTask, ...] = ()
    boss_tasks: tuple[BossTask, ...] = ()

    @property
    def champion(self) -> str | None:
        """The champion after it."""
        return self.boss if self.winner == CHAMPION_NAME and self.boss else self.winner

    @property
    def dethroned(self) -> bool | None:
        """True if there is another champion since; None if that is not known, or not yet."""
        return None if self.winner is None or self.boss is None else self.champion != self.boss

    @property
    def entrants(self) -> tuple[str, ...]:
        return tuple(one for one in self.participants if one not in (CHAMPION_NAME, self.boss))

    def as_answer(self) -> dict[str, object]:
        """Return what was read, in the API's own words."""
        tasks = [
            {
                "task_id": task.task_id,
                "task_type": task.task_type,
                "group_id": task.group,
                "participant_scores": [
                    {"hotkey": hotkey, "test_loss": loss} for hotkey, loss in task.scores.items()
                ],
            }
            for task in self.first_round
        ]
        known = {task.task_id for task in self.first_round}
        later = [{"task_id": one} for one in self.task_ids if one not in known]
        boss = [
            {"task_id": one.task_id, "task_type": one.task_type, "challenger_won": one.won}
            for one in self.boss_tasks
        ]
        return {
            "tournament_id": self.tournament_id,
            "tournament_type": str(self.kind),
            "status": self.status,
            "base_winner_hotkey": self.boss,
            "winner_hotkey": self.winner,
            "participants": [{"hotkey": one} for one in self.participants],
            "rounds": [{"round_number": 1, "tasks": tasks}, {"round_number": 2, "tasks": later}],
            "boss_round_performance": boss,
        }


@contextmanager
def open_public_api(settings: Settings, **client: Any) -> Iterator[PublicApi]:
    """Open the API by the operator's settings. `client` goes to `PoliteClient`."""
    with polite_client(settings, **client) as opened:
        yield PublicApi(opened, settings.public_api_url)


def polite_client(settings: Settings, **more: Any) -> PoliteClient:
    """A client with the operator's hub, token and cache."""
    token = settings.hf_token.get_secret_value() if settings.hf_token else None
    cache = settings.data_dir / "tournament" / "answers"
    return PoliteClient(cache, settings.hf_endpoint, token, **more)


@dataclass
class PublicApi:
    client: PoliteClient
    base: str

    def fees(self) -> tuple[dict[TournamentType, float], Source]:
        """The fee of each kind in TAO. A kind that the API does not name is left out."""
        answer = self._get("/tournament/fees")
        found = mapping(answer.json())
        rao = {kind: number(found.get(f"{kind}_tournament_fee_rao"), least=0) for kind in TournamentType}
        fees = {kind: value / RAO for kind, value in rao.items() if value is not None}
        if not fees:
            raise SiteError(f"{answer.url} names no fee")
        return fees, _source(answer)

    def balance(self, coldkey: str) -> tuple[float, Source]:
        """Return the unused balance of a coldkey in TAO: 0 if it never paid."""
        if not _ADDRESS.fullmatch(coldkey):
            raise SiteError(f"{printable(coldkey[:60])!r} is not a coldkey's address")
        try:
            answer = self._get(f"/tournament/balance/{coldkey}")
        except SiteError as error:
            if error.status != 404:
                raise
            return 0.0, Source(f"{self.base}/tournament/balance/{coldkey}", self.client.clock())
        rao = number(mapping(answer.json()).get("balance_rao"), least=0)
        if rao is None:
            raise SiteError(f"{answer.url} names no balance")
        return rao / RAO, _source(answer)

    def latest(self) -> dict[TournamentType, Tournament]:
        """The newest tournament of each kind."""
        found = mapping(self._get("/tournament/latest/details").json())
        newest = {kind: _tournament(found.get(kind), kind) for kind in TournamentType}
        return {kind: tournament for kind, tournament in newest.items() if tournament is not None}

    def past(self, kinds: Collection[TournamentType], count: int) -> list[str]:
        """The ids of so many tournaments of each kind that are over, newest first."""
        answer = self._get("/v1/tournaments/history")
        rows = [mapping(one) for one in sequence(mapping(answer.json()).get("tournaments"))]
        found: list[str] = []
        for kind in kinds:
            ids = [
                text(row.get("tournament_id"))
                for row in rows
                if row.get("tournament_type") == kind and row.get("status") == _OVER
            ]
            found += _names(ids)[:count]
        if not found:
            raise SiteError(f"{answer.url} names no tournament that is over")
        return found

    def details(self, tournament_id: str) -> Tournament:
        """One tournament, also one that is long over."""
        answer = self._get(f"/tournament/{_name(tournament_id)}/details")
        tournament = tournament_of(answer.json())
        if tournament is None:
            raise SiteError(f"{answer.url} describes no tournament")
        return tournament

    def task(self, task_id: str) -> TournamentTaskResult:
        """One task with the result of each miner. A day old is new enough: it is over."""
        answer = self._get(f"/auditing/tasks/{_name(task_id)}", DAY_S)
        return task_result(answer.json(), task_id)

    def _get(self, path: str, max_age_s: float = FRESH_S) -> SiteAnswer:
        return self.client.get(self.base + path, max_bytes=MAX_ANSWER, max_age_s=max_age_s)


def task_result(raw: Any, task_id: str) -> TournamentTaskResult:
    """Read one task's answer, whatever it holds."""
    found = mapping(raw)
    pairs = found.get("image_text_pairs")
    return TournamentTaskResult(
        task_id,
        text(found.get("task_type")),
        text(found.get("model_id")),
        text(found.get("model_type")),
        number(found.get("hours_to_complete"), least=0),
        len(pairs) if isinstance(pairs, list) and pairs else _count(found.get("pictures")),
        tuple(_ranked([_entry(row) for row in sequence(found.get("hotkey_details"))])),
    )


def _count(value: Any) -> int | None:
    counted = number(value, least=1)
    return int(counted) if counted is not None else None


def _entry(raw: Any) -> Entry:
    row = mapping(raw)
    hotkey, repo = text(row.get("hotkey")) or "", text(row.get("repo"))
    place = number(row.get("rank"), least=1)
    return Entry(
        hotkey if _HOTKEY.fullmatch(hotkey) else "",
        repo if repo and _REPO.fullmatch(repo) and ".." not in repo else None,
        int(place) if place is not None else None,
        number(row.get("test_loss")),
        text(row.get("score_reason")),
    )


def _ranked(entries: list[Entry]) -> list[Entry]:
    named = [entry for entry in entries if entry.hotkey]
    return sorted(named, key=lambda entry: (entry.rank is None, entry.rank or 0, entry.hotkey))


def tournament_of(raw: Any) -> Tournament | None:
    """Read an answer on one tournament, whatever it holds."""
    kind = mapping(raw).get("tournament_type")
    return _tournament(raw, TournamentType(kind)) if kind in list(TournamentType) else None


def _tournament(raw: Any, kind: TournamentType) -> Tournament | None:
    found = mapping(raw)
    tournament_id = text(found.get("tournament_id"))
    if not tournament_id or not _NAME.fullmatch(tournament_id):
        return None
    rounds = [mapping(one) for one in sequence(found.get("rounds"))]
    ids = [text(mapping(task).get("task_id")) for one in rounds for task in sequence(one.get("tasks"))]
    boss = [_boss_task(mapping(one)) for one in sequence(found.get("boss_round_performance"))[:MOST_TASKS]]
    first = [
        mapping(task) for one in rounds if one.get("round_number") == 1 for task in sequence(one.get("tasks"))
    ]
    participants = [text(mapping(one).get("hotkey")) for one in sequence(found.get("participants"))]
    return Tournament(
        tournament_id,
        kind,
        text(found.get("status")),
        text(found.get("base_winner_hotkey")),
        text(found.get("winner_hotkey")),
        tuple(dict.fromkeys(hotkey for hotkey in participants if hotkey)),
        _names(ids + [one.task_id for one in boss]),
        tuple(_group_task(task) for task in first[:MOST_TASKS]),
        tuple(boss),
    )


def _group_task(found: Mapping[str, Any]) -> GroupTask:
    rows = [mapping(one) for one in sequence(found.get("participant_scores"))]
    scores = {str(row.get("hotkey")): number(row.get("test_loss")) for row in rows}
    return GroupTask(
        text(found.get("task_id")) or "",
        text(found.get("task_type")),
        text(found.get("group_id")),
        {hotkey: loss for hotkey, loss in scores.items() if loss is not None and _HOTKEY.fullmatch(hotkey)},
    )


def _boss_task(found: Mapping[str, Any]) -> BossTask:
    won = found.get("challenger_won") is True
    return BossTask(text(found.get("task_id")) or "", text(found.get("task_type")), won)


def _names(found: list[str | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in found if name and _NAME.fullmatch(name)))[:MOST_TASKS]


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise SiteError(f"{printable(value[:100])!r} is not an id of a tournament or task")
    return value


def _source(answer: SiteAnswer) -> Source:
    return Source(answer.url, answer.at, answer.stale)


# Values from outside: of the right type, or not there


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def sequence(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def text(value: Any, longest: int = 300) -> str | None:
    """A string as it may be shown."""
    return printable(value[:longest], keep="") if isinstance(value, str) and value else None


def number(value: Any, *, least: float = -1e18) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if least <= value <= 1e18 else None  # false also for NaN
