from __future__ import annotations

import pytest

from miner.publish.publisher import UploadSpeed

pytestmark = pytest.mark.process


def paced(
    finish_by: float | None, *seen: tuple[float, int], total: int = 100_000_000
) -> tuple[list[str], UploadSpeed]:
    """What is reported of an upload that was at these bytes at these times."""
    now, reported = 0.0, list[str]()
    speed = UploadSpeed(finish_by, lambda: now, reported.append)
    for at, done in seen:
        now = at
        speed.add(done, total)
    return reported, speed


@pytest.mark.parametrize(
    ("finish_by", "seen"),
    [
        (100, [(0, 0), (5, 10_000_000), (10, 20_000_000)]),
        (10, [(0, 0), (2, 1000)]),
        (None, [(0, 0), (50, 1000)]),
    ],
    ids=["in time", "the first seconds", "no deadline"],
)
def test_nothing_is_said_of_an_upload_that_may_be_in_time(
    finish_by: float | None, seen: list[tuple[float, int]]
) -> None:
    assert paced(finish_by, *seen)[0] == []


def test_an_upload_that_will_be_late_is_reported_once_with_the_numbers() -> None:
    (report,), _ = paced(50, (0, 0), (5, 5_000_000), (10, 10_000_000))
    assert report == "the upload will not be done in time: 95 MB to go at 1.0 MB/s, and 45 s are left"
    assert len(paced(100, (0, 5), (5, 5), (10, 5))[0]) == 1, "one that stands still is late as well"


def test_one_that_catches_up_is_reported_too() -> None:
    seen = [(float(n), n * 1_000_000) for n in range(20)]
    seen += [(20.0 + n, 20_000_000 + n * 8_000_000) for n in range(10)]
    (late, well), _ = paced(60, *seen)
    assert "not be done" in late
    assert "in time after all" in well


def test_another_try_begins_anew() -> None:
    assert paced(1000, (0, 0), (10, 90), (11, 0), (15, 40), total=100)[1].speed == 10
