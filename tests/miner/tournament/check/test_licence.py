"""Licence and notice as validators compare them: line ends are forgiven, one more empty line is not."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from core.domain.tournament_rules import LICENSE_DIGEST
from miner.tournament.check.entry import FindingState, RuleFinding
from miner.tournament.check.licence import NoUpstream, check_licence, digest_of, read_upstream
from tests.doubles.flaky import FlakyServer, Reply, Request
from tests.miner.tournament.entries import open_again, open_small
from tests.miner.tournament.repositories import commit_files

pytestmark = pytest.mark.process


LICENSE = b"Some Licence\n\n1. Terms.\n"
NOTICE = b"Notice\n\nMade by somebody.\n"
GOOD = {"LICENSE.md": LICENSE, "NOTICE": NOTICE}


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    """The validators' own checkout."""
    folder = tmp_path / "upstream"
    folder.mkdir()
    (folder / "LICENSE.md").write_bytes(LICENSE)
    (folder / "NOTICE").write_bytes(NOTICE)
    return folder


def checked(folder: Path, files: dict[str, bytes], upstream: Path) -> RuleFinding:
    folder.mkdir()
    return check_licence(open_small(folder, files, upstream=upstream))


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"LICENSE.md": LICENSE.replace(b"\n", b"\r\n")},
        {"LICENSE.md": LICENSE.replace(b"Terms.", b"Terms. \t")},
        {"NOTICE": NOTICE.rstrip(b"\n")},
    ],
)
def test_line_ends_and_blanks_at_them_do_not_count(
    changed: dict[str, bytes], upstream: Path, tmp_path: Path
) -> None:
    assert checked(tmp_path / "entry", {**GOOD, **changed}, upstream).state is FindingState.PASSED


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({**GOOD, "LICENSE.md": b"\xef\xbb\xbf" + LICENSE}, "byte order mark"),
        ({**GOOD, "LICENSE.md": LICENSE + b"\n"}, "empty lines at the end"),
        ({**GOOD, "NOTICE": b"\n" + NOTICE}, "empty lines at the beginning"),
        ({**GOOD, "NOTICE": b"Notice by \xff\n"}, "not UTF-8"),
        ({**GOOD, "NOTICE": b"Another\n"}, "NOTICE differs"),
        ({"LICENSE.md": LICENSE}, "there is no notice"),
        ({"NOTICE": NOTICE, "COPYING": LICENSE}, "there is no licence"),
        ({"LICENSE.md": b"Ours\n", "LICENSE": LICENSE, "NOTICE": NOTICE}, "LICENSE.md differs"),
        ({"LICENSE.md/text": LICENSE, "NOTICE": NOTICE}, "LICENSE.md cannot be read"),
    ],
)
def test_what_validators_refuse_is_named(
    files: dict[str, bytes], why: str, upstream: Path, tmp_path: Path
) -> None:
    found = checked(tmp_path / "entry", files, upstream)
    assert found.state is FindingState.FAILED
    assert why in found.text
    assert "prepare" in found.to_do


def test_the_default_branch_counts_and_not_the_commit(upstream: Path, tmp_path: Path) -> None:
    good = open_small(tmp_path, GOOD, upstream=upstream).clone.commit
    commit_files(tmp_path / "repository", {"NOTICE": "Another\n"})
    assert check_licence(open_again(tmp_path, commit=good, upstream=upstream)).state is FindingState.FAILED


def test_without_network_the_stored_digests_decide_and_their_date_is_said(tmp_path: Path) -> None:
    found = check_licence(open_small(tmp_path, GOOD))
    assert found.state is FindingState.FAILED
    assert "2026-07-15" in found.text


def test_a_checkout_without_the_files_is_not_upstreams(upstream: Path, tmp_path: Path) -> None:
    (upstream / "NOTICE").unlink()
    entry = open_small(tmp_path, GOOD, upstream=upstream)
    with pytest.raises(NoUpstream, match="has no NOTICE"):
        check_licence(entry)


class _Raw(FlakyServer):
    pages: ClassVar = {
        "/HEAD/LICENSE": LICENSE,
        "/HEAD/NOTICE": NOTICE,
        "/large/LICENSE": b"x" * 2_000_000,
        "/large/NOTICE": NOTICE,
    }

    def answer(self, request: Request) -> Reply:
        page = self.pages.get(request.path)
        return Reply(404, {}, b"") if page is None else Reply(200, {}, page)


def test_with_a_network_their_files_of_now_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    entry = open_small(tmp_path, GOOD)
    online = open_again(tmp_path, offline=False)
    with _Raw() as site:
        assert read_upstream(online, raw=f"{site.url}/HEAD").license == digest_of(LICENSE)
        assert read_upstream(online, raw=f"{site.url}/HEAD").present
        assert read_upstream(entry, raw=f"{site.url}/HEAD").license == LICENSE_DIGEST
        assert not read_upstream(online, raw=f"{site.url}/elsewhere").present
        assert not read_upstream(online, raw=f"{site.url}/large").present
    assert not read_upstream(online, raw="http://127.0.0.1:1").present
