"""`field pull` against an API and a hub that go wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.domain.wire import TournamentType
from miner.tournament.field.entries import own_results, read_field, read_tournaments
from miner.tournament.field.pull import Pulled, loaded_file, pull, pull_past
from miner.tournament.polite_client import PoliteClient, SiteError
from miner.tournament.public_api import PublicApi
from tests.doubles.field import adapter, ai_toolkit_config, image_task
from tests.doubles.hub import Hub
from tests.doubles.public_api import HOTKEYS, PublicApiSite

pytestmark = pytest.mark.process


TASKS = ("11111111-2222-4333-8444-555555555555", "99999999-2222-4333-8444-555555555555")
TOURNAMENT = "tourn_0123456789abcdef_20261116"
REPOS = tuple(f"invented/tournament-{letter}" for letter in "abcd")


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[PublicApiSite]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with PublicApiSite() as opened:
        details: list[dict[str, Any]] = [
            {"hotkey": hotkey, "repo": repo, "rank": rank, "test_loss": rank / 10}
            for rank, (hotkey, repo) in enumerate(zip(HOTKEYS, REPOS, strict=False), 1)
        ]
        opened.add_tournament("image", TOURNAMENT, [image_task(TASKS[0], hotkey_details=details)])
        yield opened


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as opened:
        info = {"training_info": json.dumps({"step": 650})}
        for repo in REPOS:
            opened.add(
                repo,
                {
                    "checkpoints/config.yaml": ai_toolkit_config(),
                    "checkpoints/last.safetensors": adapter(256, metadata=info),
                    "checkpoints/training_args.bin": b"\x80\x04a pickle",
                },
            )
        yield opened


@pytest.fixture
def client(tmp_path: Path, hub: Hub) -> Iterator[PoliteClient]:
    with PoliteClient(tmp_path / "answers", hub.url, hub.token, sleep=lambda _seconds: None) as opened:
        yield opened


def run(site: PublicApiSite, client: PoliteClient, tmp_path: Path, **more: Any) -> Pulled:
    return pull(PublicApi(client, site.url), tmp_path / "field", [TournamentType.IMAGE], **more)


def test_the_best_entries_are_saved_and_shown(
    site: PublicApiSite, hub: Hub, client: PoliteClient, tmp_path: Path
) -> None:
    done = run(site, client, tmp_path)
    assert (done.tasks, done.entries, done.known, done.problems) == (1, 3, 0, [])
    (task,) = read_field(tmp_path / "field")
    recipes = [one.recipe for one in task.entries]
    assert [(one.shipped, one.lora_rank) for one in recipes[:3]] == [(650, 24)] * 3
    assert recipes[3].steps is None  # of the fourth nothing was fetched
    assert hub.lines("tournament-d") == []


def test_no_weights_and_no_pickles_are_read(
    site: PublicApiSite, hub: Hub, client: PoliteClient, tmp_path: Path
) -> None:
    run(site, client, tmp_path, ranks=1)
    weights = adapter(256, metadata={"training_info": json.dumps({"step": 650})})
    header = 8 + int.from_bytes(weights[:8], "little")
    assert hub.bytes_sent("/store/") == header
    assert hub.lines("training_args") == []
    stored = [request for request in hub.requests if request.path.startswith("/store/")]
    assert [request.headers["range"] for request in stored] == ["bytes=0-7", f"bytes=8-{header - 1}"]
    assert not any("authorization" in request.headers for request in [*stored, *site.requests])


def test_first_places_and_wins_of_a_hotkey(site: PublicApiSite, client: PoliteClient, tmp_path: Path) -> None:
    run(site, client, tmp_path)
    # The first won its only task and the tournament, the second neither; nobody knows the stranger.
    counted = [own_results(tmp_path / "field", hotkey) for hotkey in (*HOTKEYS[:2], "5Stranger")]
    assert [(one.first, one.tasks, one.won, one.tournaments) for one in counted] == [
        (1, 1, 1, 1),
        (0, 1, 0, 1),
        (0, 0, 0, 0),
    ]


def test_what_is_known_is_not_asked_for_again(
    site: PublicApiSite, hub: Hub, client: PoliteClient, tmp_path: Path
) -> None:
    run(site, client, tmp_path)
    before = len(hub.requests)
    again = run(site, client, tmp_path)
    assert (again.entries, again.known) == (3, 3)
    assert len(hub.requests) == before


def test_results_of_earlier_tournaments_are_saved_once(
    site: PublicApiSite, client: PoliteClient, tmp_path: Path
) -> None:
    latest = site.pages.pop("/tournament/latest/details")
    past = [f"tourn_{day}_202611{day:02}" for day in (15, 9, 2)]
    for day in past:
        site.add_tournament("image", day, [image_task(TASKS[1])])
    site.pages["/tournament/latest/details"] = latest
    site.pages["/v1/tournaments/history"] = {
        "tournaments": [
            {"tournament_id": one, "tournament_type": kind, "status": status}
            for one, kind, status in (
                ("tourn_5_20261123", "image", "active"),
                *((one, "image", "completed") for one in past),
                ("tourn_6_20261109", "text", "completed"),
            )
        ]
    }
    api = PublicApi(client, site.url)
    done = _pull_with_past(api, tmp_path, 2)
    assert done.tournaments == [TOURNAMENT, *past[:2]]
    assert (done.tasks, done.problems) == (1, [])
    read, problems = read_tournaments(tmp_path)
    assert ({one.tournament_id for one in read}, problems) == ({TOURNAMENT, *past[:2]}, [])
    assert all(one.dethroned and one.champion == HOTKEYS[0] for one in read)
    assert _pull_with_past(api, tmp_path, 2).tournaments == [TOURNAMENT]
    del site.pages["/v1/tournaments/history"]
    client.clock = lambda: 1e10
    (problem,) = _pull_with_past(api, tmp_path, 9).problems
    assert problem.startswith("past tournaments: ")


def _pull_with_past(api: PublicApi, directory: Path, count: int) -> Pulled:
    done = pull(api, directory, [TournamentType.IMAGE])
    pull_past(api, directory, [TournamentType.IMAGE], count, done)
    return done


def test_addresses_of_data_are_not_saved(site: PublicApiSite, client: PoliteClient, tmp_path: Path) -> None:
    run(site, client, tmp_path, ranks=1)
    saved = (tmp_path / "field" / TOURNAMENT / TASKS[0] / "task.json").read_text()
    assert "image_url" not in saved
    assert json.loads(saved)["pictures"] == 21


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({"body": (1 << 62).to_bytes(8, "little"), "status": 206}, "4,611,686,018,427,387,904 bytes"),
        ({"body": b"abc", "status": 206}, "fewer than eight bytes"),
        ({"status": 429, "headers": {"Retry-After": "900"}}, "Try again in 900 s"),
        ({"status": 302, "headers": {"Location": "ftp://elsewhere/"}}, "not followed"),
        ({"cut_after": 4}, "broke off"),
    ],
)
def test_a_header_that_cannot_be_had_is_a_problem_of_its_entry(
    site: PublicApiSite,
    hub: Hub,
    client: PoliteClient,
    tmp_path: Path,
    fault: dict[str, Any],
    problem: str,
) -> None:
    if fault.get("status") == 206:
        fault = {**fault, "headers": {"Content-Range": "bytes 0-7/99999"}}
    hub.fail("/store/", times=1, **fault)
    done = run(site, client, tmp_path)
    (found,) = done.problems
    assert found.startswith("invented/tournament-a: ")

    assert re.search(problem, found)
    # The next pull tries that entry again, and only that one.
    again = run(site, client, tmp_path)
    assert (again.known, again.problems) == (2, [])


def test_a_repository_that_is_gone_costs_only_its_entry(
    site: PublicApiSite, hub: Hub, client: PoliteClient, tmp_path: Path
) -> None:
    del hub.repos[REPOS[1]]
    done = run(site, client, tmp_path)
    (found,) = done.problems
    assert found.startswith(f"{REPOS[1]}: 127.0.0.1")
    assert len([one for one in read_field(tmp_path / "field")[0].entries if one.recipe.lr]) == 2


def test_a_task_that_is_not_reported_costs_only_itself(
    site: PublicApiSite, client: PoliteClient, tmp_path: Path
) -> None:
    site.pages["/tournament/latest/details"]["image"]["rounds"][0]["tasks"].append({"task_id": TASKS[1]})
    done = run(site, client, tmp_path)
    assert done.tasks == 1
    assert done.problems == [f"task {TASKS[1]}: {site.url[7:]} answers 404 for /auditing/tasks/{TASKS[1]}"]


def test_an_api_that_says_nothing_is_an_error(
    site: PublicApiSite, client: PoliteClient, tmp_path: Path
) -> None:
    site.fail("latest", status=200, body=b"<html>down</html>")
    with pytest.raises(SiteError, match="did not answer with JSON"):
        run(site, client, tmp_path)


def test_one_tournament_can_be_named(site: PublicApiSite, client: PoliteClient, tmp_path: Path) -> None:
    done = run(site, client, tmp_path, tournament_id=TOURNAMENT, ranks=1)
    assert done.tournaments == [TOURNAMENT]
    assert not site.lines("latest")
    with pytest.raises(SiteError, match="not an id"):
        run(site, client, tmp_path, tournament_id="../fees")


@pytest.mark.parametrize(
    ("names", "loaded"),
    [
        (
            ["checkpoints/last.safetensors", "checkpoints/last_000000250.safetensors"],
            "checkpoints/last.safetensors",
        ),
        (
            ["checkpoint-500/adapter_model.safetensors", "adapter_model.safetensors"],
            "adapter_model.safetensors",
        ),
        (
            ["checkpoints/a-000010.safetensors", "checkpoints/a-000020.safetensors"],
            "checkpoints/a-000020.safetensors",
        ),
        (["model-00001-of-00002.safetensors"], None),
        ([], None),
    ],
)
def test_the_file_that_evaluators_load(names: list[str], loaded: str | None) -> None:
    assert loaded_file(names) == loaded
