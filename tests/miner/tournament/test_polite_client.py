"""Answers from sites of others, on a server that goes wrong in every way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from miner.tournament.polite_client import PoliteClient, SiteError
from tests.doubles.public_api import PublicApiSite

pytestmark = pytest.mark.process


TOKEN = "hf_" + "s" * 34
FEES = "/tournament/fees"


@pytest.fixture
def site() -> Iterator[PublicApiSite]:
    with PublicApiSite() as opened:
        yield opened


class Time:
    def __init__(self) -> None:
        self.now = 1_795_000_000.0
        self.waits: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def client(tmp_path: Path, time: Time, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoliteClient]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with PoliteClient(tmp_path / "answers", sleep=time.sleep, clock=lambda: time.now) as opened:
        yield opened


def test_a_young_answer_is_not_asked_for_again(site: PublicApiSite, client: PoliteClient, time: Time) -> None:
    first = client.get(site.url + FEES, max_bytes=10_000, max_age_s=60)
    time.now += 59
    again = client.get(site.url + FEES, max_bytes=10_000, max_age_s=60)
    assert again.body == first.body
    assert again.at == first.at
    assert site.lines() == [f"GET {FEES}"]


def test_an_old_answer_that_is_still_true_is_not_sent_again(
    site: PublicApiSite, client: PoliteClient, time: Time
) -> None:
    first = client.get(site.url + FEES, max_bytes=10_000)
    sent = site.bytes_sent()
    time.now += 1000
    again = client.get(site.url + FEES, max_bytes=10_000)
    assert again.json() == first.json()
    assert again.at == time.now
    assert site.requests[-1].headers["if-none-match"] == first.etag
    assert site.bytes_sent() == sent


def test_there_is_a_pause_between_requests(site: PublicApiSite, client: PoliteClient, time: Time) -> None:
    for _ in range(3):
        client.get(site.url + FEES, max_bytes=10_000)
    assert time.waits == [client.pause_s, client.pause_s]


@pytest.mark.parametrize("fault", [{"status": 500}, {"cut_after": 3}, {"status": 503}])
def test_a_site_in_trouble_is_answered_for_by_the_older_answer(
    site: PublicApiSite, client: PoliteClient, time: Time, fault: dict[str, int]
) -> None:
    first = client.get(site.url + FEES, max_bytes=10_000)
    site.fail(FEES, times=None, **fault)
    site.pages[FEES]["more"] = 1  # so that it is not merely confirmed
    time.now += 1000
    again = client.get(site.url + FEES, max_bytes=10_000)
    assert again.body == first.body
    assert again.at == first.at
    assert again.stale
    assert "127.0.0.1" in again.stale


def test_half_an_answer_is_never_kept(site: PublicApiSite, client: PoliteClient) -> None:
    site.fail(FEES, cut_after=10, how="close")
    with pytest.raises(SiteError, match="broke off"):
        client.get(site.url + FEES, max_bytes=10_000)
    assert client.get(site.url + FEES, max_bytes=10_000).json() == site.pages[FEES]


def test_a_file_in_the_cache_that_was_cut_off_is_not_used(
    site: PublicApiSite, client: PoliteClient, tmp_path: Path
) -> None:
    client.get(site.url + FEES, max_bytes=10_000)
    (file,) = (tmp_path / "answers").iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    assert client.get(site.url + FEES, max_bytes=10_000, max_age_s=60).json() == site.pages[FEES]
    assert len(site.requests) == 2


def test_an_answer_beyond_the_limit_is_refused(site: PublicApiSite, client: PoliteClient) -> None:
    site.pages["/big"] = "x" * 200_000
    with pytest.raises(SiteError, match="more than"):
        client.get(site.url + "/big", max_bytes=100_000)


def test_what_is_not_json_is_an_error_that_names_the_address(
    site: PublicApiSite, client: PoliteClient
) -> None:
    for body in (b"<html>", b"[" * 100_000, b'{"a": NaN}'):
        site.fail(FEES, status=200, body=body)
        answer = client.get(site.url + FEES, max_bytes=200_000)
        with pytest.raises(SiteError, match=r"/tournament/fees did not answer with JSON"):
            answer.json()


def test_a_busy_site_is_asked_again_after_the_wait_that_it_asks_for(
    site: PublicApiSite, client: PoliteClient, time: Time
) -> None:
    site.fail(FEES, status=429, headers={"Retry-After": "7"})
    assert client.get(site.url + FEES, max_bytes=10_000).json() == site.pages[FEES]
    assert 7.0 in time.waits


def test_a_busy_site_that_asks_for_an_hour_is_left_alone(
    site: PublicApiSite, client: PoliteClient, time: Time
) -> None:
    site.fail(FEES, status=429, headers={"Retry-After": "3600"}, times=None)
    with pytest.raises(SiteError, match="Try again in 3600 s") as caught:
        client.get(site.url + FEES, max_bytes=10_000)
    assert caught.value.status == 429
    assert len(site.requests) == 1
    assert 3600.0 not in time.waits


def test_a_site_other_than_the_hub_leads_to_no_other_host(site: PublicApiSite, client: PoliteClient) -> None:
    site.fail(FEES, status=302, headers={"Location": site.urls[1] + "/elsewhere"})
    with pytest.raises(SiteError, match="redirects to another host"):
        client.get(site.url + FEES, max_bytes=10_000)
    assert site.lines("elsewhere") == []


@pytest.mark.parametrize(
    "target", ["file:///etc/passwd", "http://user:word@host/", "ftp://host/", "http://[::1"]
)
def test_a_redirect_to_no_site_is_not_followed(
    site: PublicApiSite, client: PoliteClient, target: str
) -> None:
    client.hub = site.url
    site.fail(FEES, status=302, headers={"Location": target})
    with pytest.raises(SiteError, match=r"not followed|cannot be reached"):
        client.get(site.url + FEES, max_bytes=10_000)


def test_redirects_in_a_circle_end(site: PublicApiSite, client: PoliteClient) -> None:
    site.fail(FEES, status=302, headers={"Location": FEES}, times=None)
    with pytest.raises(SiteError, match="more than 3 times"):
        client.get(site.url + FEES, max_bytes=10_000)


def test_only_the_hubs_own_host_gets_the_token(
    site: PublicApiSite, client: PoliteClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    client.hub, client.token = site.url, TOKEN
    site.pages["/file"], site.pages["/store"] = "a", "b"
    site.fail("GET /file", status=302, headers={"Location": site.urls[1] + "/store?signed=1"})
    assert client.get(site.url + "/file", max_bytes=100).json() == "b"
    client.get(site.urls[1] + FEES, max_bytes=10_000)
    sent = {request.path: request.headers.get("authorization") for request in site.requests}
    assert sent == {"/file": f"Bearer {TOKEN}", "/store": None, FEES: None}
    kept = b"".join(file.read_bytes() for file in (tmp_path / "answers").iterdir())
    assert TOKEN.encode() not in kept
    assert TOKEN not in caplog.text + repr(client)


def test_a_secure_hub_is_not_followed_into_a_private_network(client: PoliteClient) -> None:
    client.hub = "https://hub.example"
    with pytest.raises(SiteError, match="loopback: not followed"):
        client._redirected("https://hub.example/file", "https://127.0.0.1/store")
    with pytest.raises(SiteError, match="from https to http"):
        client._redirected("https://hub.example/file", "http://hub.example/file")


def test_of_a_large_file_no_more_than_the_part_is_read(site: PublicApiSite, client: PoliteClient) -> None:
    site.fail("/weights", status=206, body=b"abcd", headers={"Content-Range": "bytes 8-11/5000"})
    part = client.get_part(site.url + "/weights", 8, 4)
    assert (part.body, part.whole) == (b"abcd", 5000)
    assert site.requests[-1].headers["range"] == "bytes=8-11"
    # One that ignores the wish sends everything, of which only the part is read.
    site.fail("/weights", status=200, body=b"0123456789" * 1000)
    assert client.get_part(site.url + "/weights", 0, 8).body == b"01234567"


def test_another_part_than_was_asked_for_is_refused(site: PublicApiSite, client: PoliteClient) -> None:
    site.fail("/weights", status=206, body=b"abcd", headers={"Content-Range": "bytes 0-3/5000"})
    with pytest.raises(SiteError, match="another part"):
        client.get_part(site.url + "/weights", 8, 4)
    site.fail("/weights", status=200, body=b"0123456789")
    with pytest.raises(SiteError, match="parts of files"):
        client.get_part(site.url + "/weights", 8, 2)


def test_a_compressed_answer_is_refused(site: PublicApiSite, client: PoliteClient) -> None:
    site.fail(FEES, status=200, body=b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
    with pytest.raises(SiteError, match="compressed"):
        client.get(site.url + FEES, max_bytes=10_000)


def test_a_site_that_is_not_there_is_named(client: PoliteClient) -> None:
    with pytest.raises(SiteError, match=r"127\.0\.0\.1:9 cannot be reached"):
        client.get("http://127.0.0.1:9/", max_bytes=10)


def test_answers_that_nobody_asked_for_in_a_month_are_removed(
    site: PublicApiSite, client: PoliteClient, time: Time, tmp_path: Path
) -> None:
    import os

    client.get(site.url + FEES, max_bytes=10_000)
    (old,) = (tmp_path / "answers").iterdir()
    os.utime(old, (time.now - 31 * 86_400,) * 2)
    site.pages["/other"] = {}
    client.get(site.url + "/other", max_bytes=10_000)
    (left,) = (tmp_path / "answers").iterdir()
    assert json.loads(left.read_bytes().split(b"\n")[0])["url"].endswith("/other")
