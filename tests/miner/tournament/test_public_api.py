"""What the public API says, and what becomes of answers of another shape."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from core.domain.wire import TournamentType
from miner.settings.load import load_settings
from miner.tournament.polite_client import PoliteClient, SiteError
from miner.tournament.public_api import Entry, PublicApi, open_public_api, task_result
from tests.doubles.public_api import COLDKEY, HOTKEYS, PublicApiSite

pytestmark = pytest.mark.process


TASK = "11111111-2222-4333-8444-555555555555"


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[PublicApiSite]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with PublicApiSite() as opened:
        yield opened


@pytest.fixture
def api(site: PublicApiSite, tmp_path: Path) -> Iterator[PublicApi]:
    with PoliteClient(tmp_path / "answers", sleep=lambda _seconds: None) as client:
        yield PublicApi(client, site.url)


def test_fees_are_in_tao(api: PublicApi) -> None:
    fees, source = api.fees()
    assert fees == {
        TournamentType.TEXT: 0.71,
        TournamentType.IMAGE: 0.41,
        TournamentType.ENVIRONMENT: 0.61,
    }
    assert source.url.endswith("/tournament/fees")
    assert source.stale is None


def test_fees_that_are_no_numbers_are_not_there(api: PublicApi, site: PublicApiSite) -> None:
    site.pages["/tournament/fees"] = {
        "text_tournament_fee_rao": "much",
        "image_tournament_fee_rao": -1,
        "environment_tournament_fee_rao": 5 * 10**8,
    }
    assert api.fees()[0] == {TournamentType.ENVIRONMENT: 0.5}
    site.pages["/tournament/fees"] = ["nothing"]
    api.client.clock = lambda: 1e10
    with pytest.raises(SiteError, match="names no fee"):
        api.fees()


def test_a_balance_and_that_of_a_coldkey_that_never_paid(api: PublicApi) -> None:
    assert api.balance(COLDKEY)[0] == 1.5
    assert api.balance("5Never" + "k" * 42)[0] == 0.0


@pytest.mark.parametrize("coldkey", ["", "../fees", COLDKEY + "/../../x", "5" + "0" * 47])
def test_no_request_is_made_for_what_is_not_an_address(
    api: PublicApi, site: PublicApiSite, coldkey: str
) -> None:
    with pytest.raises(SiteError, match="not a coldkey"):
        api.balance(coldkey)
    assert site.requests == []


def test_the_latest_tournament_of_each_kind(api: PublicApi, site: PublicApiSite) -> None:
    site.add_tournament(
        "image",
        "tourn_0123_20261116",
        [{"task_id": TASK, "task_type": "ImageTask"}],
        boss_round_performance=[{"task_id": TASK.replace("1", "9"), "boss_score": 0.1}],
    )
    latest = api.latest()
    image = latest[TournamentType.IMAGE]
    assert image.task_ids == (TASK, TASK.replace("1", "9"))
    assert image.winner == HOTKEYS[0]
    assert set(latest) == {TournamentType.IMAGE}
    assert api.details("tourn_0123_20261116") == image


def test_a_task_is_read_with_the_result_of_each_miner() -> None:
    raw = {
        "task_id": TASK,
        "task_type": "ImageTask",
        "model_id": "invented/base",
        "model_type": "krea2",
        "hours_to_complete": 0.75,
        "image_text_pairs": [{"image_url": "https://x/1"}] * 21,
        "hotkey_details": [
            {"hotkey": "b", "repo": "org/two", "rank": 2, "test_loss": 0.06},
            {"hotkey": "c", "repo": "../../etc", "rank": None, "test_loss": None, "score_reason": "none"},
            {"hotkey": "a", "repo": "org/one", "rank": 1, "test_loss": 0.05},
            {"repo": "org/nobody", "rank": 1},
            "hostile",
        ],
    }
    found = task_result(raw, TASK)
    assert (found.family, found.hours, found.pictures) == ("krea2", 0.75, 21)
    assert found.entries == (
        Entry("a", "org/one", 1, 0.05),
        Entry("b", "org/two", 2, 0.06),
        Entry("c", None, None, None, "none"),
    )


@pytest.mark.parametrize("raw", [None, [], "x", 1, {"hotkey_details": {"a": 1}, "hours_to_complete": 1e400}])
def test_a_task_of_another_shape_costs_only_what_it_lacks(raw: object) -> None:
    found = task_result(raw, TASK)
    assert (found.task_id, found.hours, found.entries) == (TASK, None, ())


def test_the_settings_name_the_api_and_the_hub(site: PublicApiSite, tmp_path: Path) -> None:
    settings = load_settings(
        env_file=None,
        env={"PUBLIC_API_URL": site.url, "DATA_DIR": str(tmp_path), "HF_TOKEN": "hf_" + "t" * 34},
    )
    with open_public_api(settings) as api:
        assert api.fees()[0][TournamentType.TEXT] == 0.71
    assert "authorization" not in site.requests[0].headers
    assert list((tmp_path / "tournament" / "answers").iterdir())
