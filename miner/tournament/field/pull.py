"""Fetch what the entries of a tournament trained with: small files and headers of weights, never weights.

Per entry: the list of the repository's files, the small ones among `SMALL_FILES`, and of the file that
evaluators load the first eight bytes and then its header. What was fetched once is not asked for again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from core.domain.wire import TournamentType
from core.submission.safetensors import BadHeader, parse_header
from core.system.files import write_atomically
from miner.tournament.field.entries import DONE, TASK, TOURNAMENT
from miner.tournament.field.recipes import HEADER, MOST_BYTES, SMALL_FILES, header_summary
from miner.tournament.polite_client import PoliteClient, SiteError
from miner.tournament.public_api import (
    DAY_S,
    Entry,
    PublicApi,
    Tournament,
    TournamentTaskResult,
    mapping,
    sequence,
)

#: Headers of adapters have some hundred kilobytes.
MOST_HEADER = 8 * 1024**2
#: Lists of files of a repository with many checkpoints.
MOST_LIST = 4 * 1024**2


@dataclass
class Pulled:
    """The result of a pull, for the operator."""

    tournaments: list[str] = field(default_factory=list)
    tasks: int = 0
    entries: int = 0
    #: Of them: fetched before.
    known: int = 0
    requests: int = 0
    problems: list[str] = field(default_factory=list)


def pull(
    api: PublicApi,
    directory: Path,
    kinds: Sequence[TournamentType],
    *,
    tournament_id: str | None = None,
    ranks: int = 3,
    on_progress: Callable[[str], None] = lambda _text: None,
) -> Pulled:
    """Save tournaments below the directory, each in a folder of its name. `SiteError` if the API does not
    say which tasks there are; what single entries lack is in `problems`.
    """
    pulled = Pulled()
    for tournament in _tournaments(api, kinds, tournament_id):
        folder = _save(directory, tournament, pulled)
        for number, task_id in enumerate(tournament.task_ids, 1):
            where = (
                f"{tournament.kind} {tournament.tournament_id}: task {number} of {len(tournament.task_ids)}"
            )
            on_progress(where)
            _pull_task(api, folder, task_id, ranks, pulled)
    pulled.requests = api.client.requests
    return pulled


def _save(directory: Path, tournament: Tournament, pulled: Pulled) -> Path:
    pulled.tournaments.append(tournament.tournament_id)
    folder = directory / tournament.tournament_id
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / TOURNAMENT, tournament.as_answer())
    return folder


def pull_past(
    api: PublicApi,
    directory: Path,
    kinds: Sequence[TournamentType],
    count: int,
    pulled: Pulled,
    on_progress: Callable[[str], None] = lambda _text: None,
) -> None:
    """Save the results of so many earlier tournaments of each kind, without their entries. They no longer
    change: one that was saved is not asked for again.
    """
    try:
        wanted = [one for one in api.past(kinds, count) if not (directory / one / TOURNAMENT).is_file()]
    except SiteError as error:
        pulled.problems.append(f"past tournaments: {error}")
        wanted = []
    for number, tournament_id in enumerate(wanted, 1):
        on_progress(f"past tournament {number} of {len(wanted)}: {tournament_id}")
        try:
            _save(directory, api.details(tournament_id), pulled)
        except SiteError as error:
            pulled.problems.append(f"{tournament_id}: {error}")
    pulled.requests = api.client.requests


def _tournaments(
    api: PublicApi, kinds: Sequence[TournamentType], tournament_id: str | None
) -> list[Tournament]:
    if tournament_id is not None:
        return [api.details(tournament_id)]
    latest = api.latest()
    return [latest[kind] for kind in kinds if kind in latest]


def _pull_task(api: PublicApi, directory: Path, task_id: str, ranks: int, pulled: Pulled) -> None:
    try:
        task = api.task(task_id)
    except SiteError as error:
        pulled.problems.append(f"task {task_id}: {error}")
        return
    folder = directory / task_id
    folder.mkdir(exist_ok=True)
    _write(folder / TASK, _reduced(task))
    pulled.tasks += 1
    for entry in task.entries:
        if entry.repo is None or entry.rank is None or entry.rank > ranks:
            continue
        pulled.entries += 1
        own = folder / entry.hotkey[:8]
        if (own / DONE).is_file():
            pulled.known += 1
            continue
        own.mkdir(exist_ok=True)
        problems = list(_pull_entry(api.client, entry.repo, own))
        pulled.problems += [f"{entry.repo}: {problem}" for problem in problems]
        if not problems:
            _write(own / DONE, {"repo": entry.repo, "at": api.client.clock()})


def _reduced(task: TournamentTaskResult) -> dict[str, object]:
    """In the API's own words, without addresses of data."""
    return {
        "task_id": task.task_id,
        "task_type": task.task_type,
        "model_id": task.model_id,
        "model_type": task.family,
        "hours_to_complete": task.hours,
        "pictures": task.pictures,
        "hotkey_details": [_reduced_entry(entry) for entry in task.entries],
    }


def _reduced_entry(entry: Entry) -> dict[str, object]:
    return {
        "hotkey": entry.hotkey,
        "repo": entry.repo,
        "rank": entry.rank,
        "test_loss": entry.loss,
        "score_reason": entry.why,
    }


def _pull_entry(client: PoliteClient, repo: str, folder: Path) -> Iterator[str]:
    """Save one entry's files; yield what went wrong."""
    assert client.hub is not None
    try:
        answer = client.get(f"{client.hub}/api/models/{repo}", max_bytes=MOST_LIST, max_age_s=DAY_S)
        listed = sequence(mapping(answer.json()).get("siblings"))
    except SiteError as error:
        yield str(error)
        return
    found = [mapping(one).get("rfilename") for one in listed]
    names = [name for name in found if isinstance(name, str) and ".." not in name]
    for wanted in SMALL_FILES:
        of_name = [name for name in names if PurePosixPath(name).name == wanted]
        if not of_name:
            continue
        shortest = min(of_name, key=lambda name: (name.count("/"), name))
        try:
            content = client.get(_address(client.hub, repo, shortest), max_bytes=MOST_BYTES, max_age_s=DAY_S)
            write_atomically(folder / wanted, content.body)
        except SiteError as error:
            yield str(error)
    weights = loaded_file(names)
    if weights is not None:
        try:
            _write(folder / HEADER, _header(client, _address(client.hub, repo, weights)))
        except (SiteError, BadHeader) as error:
            yield f"{weights}: {error}"


def loaded_file(names: Sequence[str]) -> str | None:
    """The adapter that evaluators load. Full weights have no header worth reading."""
    found = [name for name in names if name.endswith(".safetensors")]
    for wanted in ("last.safetensors", "adapter_model.safetensors"):
        for name in sorted(found, key=lambda name: (name.count("/"), name)):
            if PurePosixPath(name).name == wanted:
                return name
    pictures = sorted(name for name in found if name.startswith("checkpoint"))
    return pictures[-1] if pictures else None


def _address(hub: str, repo: str, name: str) -> str:
    return f"{hub}/{repo}/resolve/main/{quote(name)}"


def _header(client: PoliteClient, url: str) -> dict[str, object]:
    first = client.get_part(url, 0, 8)
    if len(first.body) < 8 or first.whole is None:
        raise BadHeader("is not a safetensors file: it has fewer than eight bytes, or does not say how many")
    length = int.from_bytes(first.body, "little")
    if not 2 <= length <= min(MOST_HEADER, first.whole - 8):
        raise BadHeader(f"says that its header has {length:,} bytes: not read")
    rest = client.get_part(url, 8, length)
    if len(rest.body) < length:
        raise BadHeader(f"has {len(rest.body):,} of the {length:,} bytes of its header: the answer broke off")
    return header_summary(parse_header(rest.body, first.whole))


def _write(file: Path, content: Any) -> None:
    write_atomically(file, json.dumps(content, indent=1).encode())
