"""The digests that put copies out of a tournament."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from core.domain.errors import ConfigError
from core.domain.tournament_rules import DATASETS
from core.domain.wire import TournamentType
from miner.settings.load import load_settings
from miner.tournament.check.checks import (
    account_of,
    check_copies,
    check_datasets,
    check_distinct,
    check_limits,
    check_times,
    normalized_text,
    tree_digest,
)
from miner.tournament.check.entry import CheckedEntry, FindingState
from tests.doubles.public_api import COLDKEY, PublicApiSite
from tests.miner.tournament.entries import open_again, open_small
from tests.miner.tournament.repositories import git, make_repository

pytestmark = pytest.mark.process


CODE = "# A trainer.\nimport os\n\n\ndef train(rows):\n    return  sorted(rows)\n"
RENAMED = "# Another text,\n# on two lines.\nimport os\ndef train(rows):\n\treturn sorted(rows)   \n"
FILES = {"trainer/text.py": CODE, "LICENSE.md": "Ours\n", "logo.bin": "text\n"}


def test_the_digest_is_over_sorted_paths_and_normalized_texts(tmp_path: Path) -> None:
    make_repository(tmp_path / "tree", {"b.txt": "two  words\n\n", "a.py": "# no\n x \n", "c.txt": b"a\0b"})
    expected = hashlib.sha256(b"a.py\0x\0b.txt\0two words\0").hexdigest()
    assert tree_digest(tmp_path / "tree") == expected


def test_comments_blanks_and_licences_do_not_make_another_entry() -> None:
    assert normalized_text(CODE) == normalized_text(RENAMED)
    assert normalized_text("a\nb") != normalized_text("b\na")


def test_a_copy_with_other_comments_is_found(tmp_path: Path) -> None:
    make_repository(tmp_path / "other", {**FILES, "trainer/text.py": RENAMED, "LICENSE.md": "Theirs\n"})
    entry = open_small(tmp_path, FILES, others=[str(tmp_path / "other")])
    found = check_copies(entry)
    assert found.state is FindingState.FAILED
    assert "the same digest (T1)" in found.text


def test_the_same_commit_is_found(tmp_path: Path) -> None:
    make_repository(tmp_path / "repository", FILES)
    git(tmp_path, "clone", "-q", str(tmp_path / "repository"), str(tmp_path / "other"))
    found = check_copies(open_again(tmp_path, others=[str(tmp_path / "other")]))
    assert found.state is FindingState.FAILED
    assert "the same commit (T0)" in found.text


def test_different_code_is_not_called_passed(tmp_path: Path) -> None:
    """The rest of the field is not known."""
    make_repository(tmp_path / "other", {**FILES, "trainer/text.py": CODE + "x = 1\n"})
    found = check_copies(open_small(tmp_path, FILES, others=[str(tmp_path / "other")]))
    assert found.state is FindingState.UNKNOWN
    assert any(note.startswith("T1 ") for note in found.notes)


def test_an_entry_that_cannot_be_cloned_is_only_mentioned(tmp_path: Path) -> None:
    found = check_copies(open_small(tmp_path, FILES, others=[str(tmp_path / "nowhere")]))
    assert found.state is FindingState.UNKNOWN
    assert any("nowhere cannot be compared" in note for note in found.notes)


def test_only_code_that_a_training_may_run_makes_an_entry_distinct(tmp_path: Path) -> None:
    changed = {**FILES, "trainer/text.py": CODE + "x = 1\n", "docs/page.md": "more\n"}
    make_repository(tmp_path / "one", {**FILES, "docs/page.md": "much\n"})
    make_repository(tmp_path / "two", changed)
    others = [str(tmp_path / "one"), str(tmp_path / "two")]
    found = check_distinct(open_small(tmp_path, FILES, others=others))
    assert found.state is FindingState.UNKNOWN
    assert f"no code differs from {others[0]}: all who enter that are copies of each other" in found.notes
    assert f"code unlike {others[1]}: trainer/text.py" in found.notes


COMMIT = "a" * 40


@pytest.fixture
def entry(tmp_path: Path) -> CheckedEntry:
    return open_small(tmp_path, {"a": "a"})


def with_settings(entry: CheckedEntry, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> CheckedEntry:
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    return replace(entry, settings=load_settings())


def entered(kind: str, datasets: str = "") -> dict[str, str]:
    start = f"TRAINING_REPO_{kind}"
    url = "https://github.com/You/miner"
    return {f"{start}_URL": url, f"{start}_COMMIT": COMMIT, f"{start}_DATASETS": datasets}


@pytest.mark.parametrize(
    ("kind", "datasets", "problem"),
    [
        ("TEXT", "org/unknown", "validators leave it out: org/unknown"),
        ("IMAGE", DATASETS[0], "get none"),
    ],
)
def test_data_sets_that_validators_would_not_give_fail(
    kind: str, datasets: str, problem: str, entry: CheckedEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = check_datasets(with_settings(entry, monkeypatch, **entered(kind, datasets)))
    assert found.state is FindingState.FAILED
    assert problem in found.text


def test_two_of_the_list_pass_and_bad_settings_are_not_a_pass(
    entry: CheckedEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = with_settings(entry, monkeypatch, **entered("TEXT", ",".join(DATASETS[:2])))
    assert check_datasets(good).state is FindingState.PASSED
    unread = replace(entry, settings=None, settings_problem="LOG_LEVEL is wrong")
    assert check_datasets(unread).state is FindingState.UNKNOWN
    assert check_datasets(unread).text == "LOG_LEVEL is wrong"


def test_more_than_two_are_refused_by_the_settings_themselves(
    entry: CheckedEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as caught:
        with_settings(entry, monkeypatch, **entered("TEXT", ",".join(DATASETS[:3])))
    found = check_datasets(replace(entry, settings=None, settings_problem=str(caught.value)))
    assert found.state is FindingState.FAILED
    assert "at most 2" in found.text


def test_an_account_is_the_first_part_of_an_address() -> None:
    assert account_of("https://github.com/You/miner") == "you"
    assert account_of("https://github.com/you") == ""


def test_what_is_entered_is_compared_with_what_was_checked(
    entry: CheckedEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = check_limits(with_settings(entry, monkeypatch, **entered("TEXT")))
    assert found.state is FindingState.UNKNOWN
    assert "your account you" in found.text
    assert f"TRAINING_REPO_TEXT_COMMIT is {COMMIT[:12]}, not what was checked" in found.notes
    assert any("fee text: 0.7 TAO, as of" in note for note in found.notes)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[PublicApiSite]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("miner.tournament.polite_client.PAUSE_S", 0.0)
    with PublicApiSite() as opened:
        yield opened


def wallet(folder: Path) -> dict[str, str]:
    (folder / "wallets/default").mkdir(parents=True)
    (folder / "wallets/default/coldkeypub.txt").write_text(json.dumps({"ss58Address": COLDKEY}))
    return {"WALLET_PATH": str(folder / "wallets"), "DATA_DIR": str(folder / "data")}


def test_a_balance_below_the_fees_fails(
    entry: CheckedEntry, site: PublicApiSite, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    more = {**wallet(tmp_path), "PUBLIC_API_URL": site.url}
    two = (TournamentType.TEXT, TournamentType.IMAGE)
    online = replace(with_settings(entry, monkeypatch, **more), offline=False, kinds=two)
    enough = check_limits(online)
    assert enough.state is FindingState.UNKNOWN  # 1.5 of 1.12: the other limits remain
    assert "fee text: 0.71 TAO, by the public API, never refunded" in enough.notes
    assert "balance 1.5 TAO" in enough.notes
    all_kinds = replace(online, kinds=tuple(TournamentType))
    found = check_limits(all_kinds)
    assert found.state is FindingState.FAILED
    assert "has 1.5 TAO at the validators, and the fees are 1.73 TAO" in found.text


def test_without_an_answer_the_stored_fees_are_shown(
    entry: CheckedEntry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    more = {**wallet(tmp_path), "PUBLIC_API_URL": "http://127.0.0.1:1"}
    found = check_limits(replace(with_settings(entry, monkeypatch, **more), offline=False))
    assert found.state is FindingState.UNKNOWN
    assert any("fee text: 0.7 TAO, as of" in note for note in found.notes)


def test_an_hour_before_the_start_it_is_too_late_to_register(entry: CheckedEntry) -> None:
    on_time = check_times(replace(entry, now=datetime(2026, 11, 23, 9, 59, tzinfo=UTC)))
    assert "text may begin 2026-11-23 11:00 UTC: be registered by 2026-11-23 10:00 UTC" in on_time.notes
    late = check_times(replace(entry, now=datetime(2026, 11, 23, 10, 1, tzinfo=UTC)))
    assert "less than an hour to the next start: text" in late.text
    assert any("then 2026-11-30 11:00 UTC" in note for note in late.notes)
    assert late.state is on_time.state is FindingState.UNKNOWN
