"""A file by URL against every fault that a network has."""

from __future__ import annotations

import hashlib
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest

from core.domain.job_states import EndReason, StepFailed
from miner.inputs.connection import AddressGuard, UrlOpener
from miner.inputs.dataset_fetch import Download, Downloaded
from miner.inputs.part_files import DiskReserve, FetchRetries
from tests.doubles.files import SIGNATURE, FileStore

pytestmark = pytest.mark.process


DATA = bytes(range(251)) * 4000
OPENER = UrlOpener(AddressGuard((ip_network("127.0.0.0/8"),)), timeout=60.0)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "data.json"


def quick(tries: int = 4) -> FetchRetries:
    return FetchRetries(tries, pause=lambda _seconds: None)


def get(url: str, target: Path, tries: int = 4, **more: Any) -> Downloaded | None:
    wishes = {"max_bytes": 10_000_000, "opener": OPENER, "reserve": DiskReserve(), **more}
    return Download(url, target, **wishes).run(quick(tries))


def failure(url: str, target: Path, tries: int = 4, **more: Any) -> StepFailed:
    with pytest.raises(StepFailed) as caught:
        get(url, target, tries, **more)
    assert SIGNATURE not in str(caught.value)
    assert not target.exists()
    return caught.value


def check(downloaded: Downloaded | None, target: Path) -> None:
    assert target.read_bytes() == DATA
    assert (downloaded.bytes, downloaded.sha256) == (len(DATA), hashlib.sha256(DATA).hexdigest())
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def ranges(store: FileStore) -> list[str | None]:
    return [request.headers.get("range") for request in store.requests]


def test_a_file_arrives_whole_and_progress_is_reported(store: FileStore, target: Path) -> None:
    reported: list[tuple[int, int | None]] = []
    check(get(store.add("a", DATA), target, on_progress=lambda did, of: reported.append((did, of))), target)
    assert reported[-1] == (len(DATA), len(DATA))
    assert store.requests[0].headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("how", ["reset", "close", "hang"])
@pytest.mark.parametrize("cut", [0, 1, 300_000, len(DATA) - 1])
def test_what_breaks_off_is_resumed_where_it_stopped(
    store: FileStore, target: Path, how: str, cut: int
) -> None:
    store.fail(cut_after=cut, how=how)
    opener = UrlOpener(OPENER.guard, timeout=3.0) if how == "hang" else OPENER
    check(get(store.add("a", DATA), target, opener=opener), target)
    # Where silence is what breaks it off, a slow machine may be silent once more.
    assert len(store.requests) == 2 or how == "hang"
    if how != "reset":  # a reset may take away what was already received
        assert (f"bytes={cut}-" if cut else None) in ranges(store)[1:]
    etag = f'"{hashlib.md5(DATA, usedforsecurity=False).hexdigest()}"'
    for request in store.requests:
        assert request.headers.get("if-range") == (etag if "range" in request.headers else None)


def test_many_cuts_in_a_row_are_no_end_as_long_as_something_comes(store: FileStore, target: Path) -> None:
    store.fail(cut_after=90_000, how="close", times=9)
    check(get(store.add("a", DATA), target, tries=2), target)
    assert len(store.requests) == 10


def test_a_trickle_is_no_progress(store: FileStore, target: Path) -> None:
    store.fail(cut_after=100, how="close", times=None)
    failure(store.add("a", DATA), target)
    assert len(store.requests) == 4


def test_a_later_process_goes_on_where_an_earlier_one_stopped(store: FileStore, target: Path) -> None:
    url = store.add("a", DATA)
    store.fail(cut_after=500_000, how="close")
    store.fail(status=500, times=3)
    assert failure(url, target, tries=3).reason is EndReason.NETWORK
    check(get(url, target), target)
    assert ranges(store)[-1] == "bytes=500000-"


def test_a_file_that_changed_meanwhile_is_fetched_anew(store: FileStore, target: Path) -> None:
    url = store.add("a", b"older" * 100_000)
    store.fail(cut_after=200_000, how="close")
    store.fail(status=500, times=1)
    failure(url, target, tries=1)
    store.add("a", DATA)
    check(get(url, target), target)


@pytest.mark.parametrize(
    ("headers", "is_resumed"),
    [({}, False), ({"ETag": 'W/"1"'}, False), ({"Last_Modified": "Sat, 01 Aug 2026 00:00:00 GMT"}, True)],
    ids=["nothing", "a weak tag", "a date"],
)
def test_only_what_distinguishes_versions_is_resumed_by(
    store: FileStore, target: Path, headers: dict[str, str], is_resumed: bool
) -> None:
    store.etags = False
    store.fail(cut_after=200_000, how="close")
    check(get(store.add("a", DATA, **headers), target), target)
    assert ranges(store) == [None, "bytes=200000-" if is_resumed else None]
    assert store.requests[1].headers.get("if-range") == (headers["Last_Modified"] if is_resumed else None)


@pytest.mark.parametrize(
    "odd",
    [
        {"ignore_range": True},
        {"status": 416},
        *(
            {"status": 206, "headers": {"Content-Range": text}, "body": b"wrong"}
            for text in ("bytes 5-9/10", "bytes */10", "items 1-2/3", "bytes 200000-3/2", "")
        ),
    ],
    ids=["whole", "416", "another range", "no range", "items", "backwards", "empty"],
)
def test_an_odd_reply_to_a_range_starts_over(store: FileStore, target: Path, odd: dict[str, Any]) -> None:
    store.fail(cut_after=200_000, how="close")
    store.fail(**odd)
    check(get(store.add("a", DATA), target), target)


@pytest.mark.parametrize("wrong", [len(DATA) + 1, len(DATA) * 3])
def test_a_length_that_is_too_long_never_gives_a_file(store: FileStore, target: Path, wrong: int) -> None:
    store.fail(declared_length=wrong, times=None)
    store.etags = False
    assert "broke off" in str(failure(store.add("a", DATA), target))
    store.faults.clear()
    check(get(store.sign("a"), target), target)


@pytest.mark.parametrize("fault", [{"no_length": True}, {"headers": {"Content-Length": "many"}}])
def test_a_length_may_be_missing_and_nonsense_is_the_network(
    store: FileStore, target: Path, fault: dict[str, Any]
) -> None:
    store.fail(**fault)
    check(get(store.add("a", DATA), target), target)


@pytest.mark.parametrize("status", [500, 502, 503, 504, 408, 425, 429])
def test_passing_trouble_is_waited_out(store: FileStore, target: Path, status: int) -> None:
    store.fail(status=status, times=2)
    check(get(store.add("a", DATA), target), target)


@pytest.mark.parametrize(
    ("status", "reason", "requests"),
    [
        (500, EndReason.NETWORK, 4),
        (429, EndReason.RATE_LIMITED, 4),
        (403, EndReason.DATA_GONE, 3),
        (404, EndReason.DATA_GONE, 3),
        (410, EndReason.DATA_GONE, 3),
        (400, EndReason.DATA_GONE, 3),
        (204, EndReason.NETWORK, 4),
        (304, EndReason.NETWORK, 4),
    ],
)
def test_lasting_trouble_has_its_reason(
    store: FileStore, target: Path, status: int, reason: EndReason, requests: int
) -> None:
    store.fail(status=status, times=None)
    assert failure(store.add("a", DATA), target).reason is reason
    assert len(store.requests) == requests
    assert list(target.parent.iterdir()) == []


def test_an_expired_address_is_reported(store: FileStore, target: Path) -> None:
    store.add("a", DATA)
    failed = failure(store.sign("a", "signature"), target)
    assert failed.reason is EndReason.DATA_GONE
    assert "has expired" in str(failed)
    assert "signature" not in str(failed)


@pytest.mark.parametrize(
    ("given", "pause", "requests"), [("2", 2.0, 4), ("nonsense", None, 4), ("99999999999999", 999999.0, 1)]
)
def test_the_pause_that_a_server_requests_is_passed_on(
    store: FileStore, target: Path, given: str, pause: float | None, requests: int
) -> None:
    store.fail(status=429, headers={"Retry-After": given}, times=None)
    assert failure(store.add("a", DATA), target).retry_after == pause
    assert len(store.requests) == requests


def test_what_is_too_large_is_refused_by_its_length_or_while_it_comes(store: FileStore, target: Path) -> None:
    url = store.add("a", DATA)
    for _ in range(2):
        failed = failure(url, target, max_bytes=100_000)
        assert failed.reason is EndReason.BAD_DATA
        assert "DATASET_MAX_BYTES=100,000" in str(failed)
        store.fail(no_length=True)


def test_a_disk_without_room_is_reported_before_anything_comes(store: FileStore, target: Path) -> None:
    failed = failure(store.add("a", DATA), target, reserve=DiskReserve(keep_free=1 << 60))
    assert failed.reason is EndReason.DISK_FULL
    assert len(store.requests) == 1


def test_what_is_too_slow_ends_in_time_and_keeps_what_it_has(store: FileStore, target: Path) -> None:
    store.fail(rate=200_000, times=None)
    url = store.add("a", DATA)
    assert "too slow" in str(failure(url, target, seconds=0.3))
    store.faults.clear()
    check(get(url, target), target)
    assert ranges(store)[-1]


def test_an_unasked_encoding_is_refused(store: FileStore, target: Path) -> None:
    failed = failure(store.add("a", DATA, Content_Encoding="gzip"), target)
    assert failed.reason is EndReason.BAD_DATA


def test_a_copy_that_still_holds_is_not_fetched_again(store: FileStore, target: Path) -> None:
    url = store.add("a", DATA)
    first = get(url, target)
    assert get(url, target, known=first.etag) is None
    assert store.bytes_sent() == len(DATA)
    store.add("a", DATA[::-1])
    assert get(url, target, known=first.etag) is not None
    assert target.read_bytes() == DATA[::-1]
