"""The daemon's look at the entries that it hands out."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from core.domain.wire import TournamentType, TrainingRepoResponse
from miner.alerts.tournament_entries import PREPARED, EntriesChecked, EntriesOrder, TournamentEntries
from miner.observe.alerts import MINER, AlertKind, AlertSubject
from miner.tournament.entry_watch import check_entries, note_prepared
from tests.miner.tournament.repositories import commit_files, git, make_repository

pytestmark = pytest.mark.process

TEXT = TournamentType.TEXT


class Raised(list[tuple[AlertKind, str]]):
    def __call__(self, kind: AlertKind, text: str, subject: AlertSubject = MINER) -> None:
        self.append((kind, text))


def order(data: Path, url: object, commit: str) -> EntriesOrder:
    entries = [{"kind": TEXT, "url": str(url), "commit": commit}]
    return EntriesOrder.model_validate({"entries": entries, "prepared": data / PREPARED})


def test_each_reason_why_validators_would_not_get_the_prepared_entry_is_named(tmp_path: Path) -> None:
    prepared, hosted = tmp_path / "prepared", tmp_path / "hosted"
    first = make_repository(prepared, {"a": "1"})
    git(tmp_path, "clone", "-q", str(prepared), str(hosted))
    note_prepared(tmp_path, prepared, (TEXT,))
    assert check_entries(order(tmp_path, hosted, first)).problems == {TEXT: ()}

    second = commit_files(prepared, {"a": "2"})
    for url, commit, said in (
        (hosted, first, f"an older commit of the entry in {prepared}, which was prepared last"),
        (hosted, second, f"{second} is not in a clone of {hosted}"),
        (hosted, make_repository(tmp_path / "other", {"b": "1"}), "no commit of the entry in"),
        (hosted, first[:12], "has not 40 hexadecimal digits"),
        (tmp_path / "gone", second, "validators will not get the entry"),
    ):
        found = check_entries(order(tmp_path, url, commit))
        assert any(said in problem for problem in found.problems[TEXT]), (said, found)
        assert found.unknown == ()
    silent = check_entries(order(tmp_path, "http://127.0.0.1:9/a/b", second))
    assert (silent.problems, len(silent.unknown)) == ({}, 1)


@pytest.mark.parametrize("noted", ["", "[]", '{"text": 3}', json.dumps({"text": "/not/there"})])
def test_without_a_prepared_entry_only_the_repository_counts(tmp_path: Path, noted: str) -> None:
    commit = make_repository(tmp_path / "hosted", {"a": "1"})
    (tmp_path / PREPARED).parent.mkdir()
    (tmp_path / PREPARED).write_text(noted)
    assert check_entries(order(tmp_path, tmp_path / "hosted", commit)).problems == {TEXT: ()}


def test_a_problem_is_one_alert_until_it_is_gone(tmp_path: Path) -> None:
    raised, hosted = Raised(), tmp_path / "hosted"
    repo = TrainingRepoResponse(github_repo=str(hosted), commit_hash="1" * 40, github_token="secret-token")
    entries = TournamentEntries({TEXT: repo}, tmp_path, raised)
    assert entries.standing() == {}
    asyncio.run(entries.check())
    asyncio.run(entries.check())
    ((kind, text),) = raised
    assert kind is AlertKind.TOURNAMENT_ENTRY
    assert "validators will not get the entry" in text
    assert "secret-token" not in text
    assert entries.standing() == {kind: text}
    there = TrainingRepoResponse(github_repo=str(hosted), commit_hash=make_repository(hosted, {"a": "1"}))
    entries = TournamentEntries({TEXT: there}, tmp_path, raised)
    asyncio.run(entries.check())
    assert (len(raised), entries.standing()) == (1, {kind: None})


def test_an_entry_that_cannot_be_looked_at_keeps_its_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised, image = Raised(), TournamentType.IMAGE
    looks = iter([{TEXT: ("a",), image: ()}, {image: ("b",)}, {}, {TEXT: (), image: ()}])

    async def looked(*_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(event=EntriesChecked(problems=next(looks)))

    monkeypatch.setattr("miner.alerts.tournament_entries.run_order", looked)
    repo = TrainingRepoResponse(github_repo="http://127.0.0.1:9/a/b", commit_hash="1" * 40)
    entries, problems = TournamentEntries({TEXT: repo}, tmp_path, raised), []
    for _ in range(4):
        asyncio.run(entries.check())
        problems.append(entries.problem)
    assert problems == ["a", "b; a", "b; a", None]
    assert [text for _, text in raised] == ["a", "b; a"]
