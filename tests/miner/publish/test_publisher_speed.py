from __future__ import annotations

from miner.publish.publisher import UploadSpeed


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def paced(finish_by: float | None, *seen: tuple[float, int]) -> list[str]:
    clock, reported = Clock(), list[str]()
    speed = UploadSpeed(finish_by, clock, reported.append)
    for at, done in seen:
        clock.now = at
        speed.add(done, 100_000_000)
    return reported


def test_an_upload_in_time_says_nothing() -> None:
    assert paced(100, (0, 0), (5, 10_000_000), (10, 20_000_000)) == []


def test_an_upload_that_will_be_late_is_told_once_with_the_numbers() -> None:
    (reported,) = paced(50, (0, 0), (5, 5_000_000), (10, 10_000_000))
    assert reported == "the upload will not be done in time: 95 MB to go at 1.0 MB/s, and 45 s are left"


def test_one_that_catches_up_is_told_too() -> None:
    seen = [(float(n), n * 1_000_000) for n in range(20)]
    seen += [(20.0 + n, 20_000_000 + n * 8_000_000) for n in range(10)]
    late, well = paced(60, *seen)
    assert "not be done" in late
    assert "in time after all" in well


def test_nothing_is_foretold_from_the_first_seconds_or_without_a_deadline() -> None:
    assert paced(10, (0, 0), (2, 1000)) == []
    assert paced(None, (0, 0), (50, 1000)) == []


def test_an_upload_that_stands_still_will_be_late() -> None:
    assert len(paced(100, (0, 5), (5, 5), (10, 5))) == 1


def test_another_try_begins_anew() -> None:
    clock, reported = Clock(), list[str]()
    speed = UploadSpeed(1000, clock, reported.append)
    for at, done in ((0, 0), (10, 90), (11, 0), (15, 40)):
        clock.now = float(at)
        speed.add(done, 100)
    assert speed.speed == 10
