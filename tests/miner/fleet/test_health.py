"""The health of GPUs from scan to scan."""

from __future__ import annotations

import pytest

from core.domain.hardware import GPU_KINDS
from miner.fleet.health import GpuHealth, GpuHealthReport
from miner.fleet.sources import GpuScan, ScannedGpu
from tests.miner.fleet.setups import H100

GIB = 2**30


def scanned(index: int, **more: object) -> ScannedGpu:
    facts: dict[str, object] = {"kind": H100, "total_bytes": 80 * GIB, "used_bytes": 0, **more}
    return ScannedGpu(f"g{index}", index, **facts)  # type: ignore[arg-type]


def scan(*make_gpus: ScannedGpu, **errors: str) -> GpuScan:
    return GpuScan(make_gpus, {int(name[1:]): text for name, text in errors.items()})


class WatchedHost:
    def __init__(self) -> None:
        self.health = GpuHealth(return_seconds=300.0, settle_seconds=60.0)
        self.in_use: set[str] = set()
        self.released: dict[str, float] = {}

    def sees(self, now: float, *make_gpus: ScannedGpu, **errors: str) -> GpuHealthReport:
        return self.health.update(scan(*make_gpus, **errors), now, self.in_use.__contains__, self.released)


@pytest.fixture
def host() -> WatchedHost:
    """A host of two that is known since long before."""
    host = WatchedHost()
    host.sees(-1000.0, scanned(0), scanned(1))
    return host


def reasons(report: GpuHealthReport) -> list[str | None]:
    return [gpu.unusable_reason for gpu in report.gpus]


def kinds(report: GpuHealthReport) -> list[tuple[str, str]]:
    return [(change.kind, change.gpu) for change in report.changes]


def test_gpus_that_answer_are_usable(host: WatchedHost) -> None:
    report = host.sees(0.0, scanned(0), scanned(1))
    assert reasons(report) == [None, None]
    assert (report.kinds, report.failed, report.changes) == ({"": H100}, {}, ())
    assert report.measured == {""}


def test_a_vanished_gpu_is_excluded_at_once_and_reported_once(host: WatchedHost) -> None:
    missing = host.sees(0.0, scanned(0))
    assert reasons(missing) == [None, "the driver does not list it any more"]
    assert missing.failed == {"g1": "the driver does not list it any more"}
    assert kinds(missing) == [("gpu_out", "g1")]
    assert kinds(host.sees(5.0, scanned(0))) == []
    assert host.sees(6.0, scanned(0), _1="GPU is lost").failed == {"g1": "GPU is lost"}, "by its index"
    assert host.sees(10.0, scanned(0), scanned(1)).failed == {}, "its job is not lost any more"


def test_a_failed_gpu_returns_after_it_was_fine_for_long_enough(host: WatchedHost) -> None:
    host.sees(0.0, scanned(0))
    (_, unusable_reason) = reasons(host.sees(10.0, scanned(0), scanned(1)))
    assert unusable_reason == "the driver does not list it any more; fine again, and watched for a while"
    assert reasons(host.sees(309.0, scanned(0), scanned(1)))[1] is not None
    back = host.sees(310.0, scanned(0), scanned(1))
    assert reasons(back) == [None, None]
    assert kinds(back) == [("gpu_back", "g1")]


def test_an_unstable_gpu_does_not_return(host: WatchedHost) -> None:
    for now in range(0, 2000, 200):
        host.sees(float(now), scanned(0))
        assert reasons(host.sees(now + 100.0, scanned(0), scanned(1)))[1] is not None


def test_a_clock_set_back_does_not_exclude_a_gpu_for_ever(host: WatchedHost) -> None:
    host.sees(1e6, scanned(0))
    host.sees(1e6 + 1, scanned(0), scanned(1))
    assert reasons(host.sees(100.0, scanned(0), scanned(1))) == [None, None]


def test_a_gpu_in_foreign_use_is_excluded_without_a_lost_job(host: WatchedHost) -> None:
    report_in_use = host.sees(0.0, scanned(0), scanned(1, used_bytes=30 * GIB))
    assert reasons(report_in_use) == [None, "somebody else uses 30.0 GiB of it"]
    assert (report_in_use.failed, kinds(report_in_use)) == ({}, [("gpu_out", "g1")])
    assert reasons(host.sees(10.0, scanned(0), scanned(1)))[1] is not None
    assert reasons(host.sees(310.0, scanned(0), scanned(1))) == [None, None]


def test_a_little_memory_in_use_does_not_count(host: WatchedHost) -> None:
    report = host.sees(0.0, scanned(0, used_bytes=GIB, processes=1), scanned(1))
    assert reasons(report) == [None, None]
    assert report.shared == {"g0"}


def test_memory_of_our_own_job_is_not_foreign(host: WatchedHost) -> None:
    host.in_use = {"g0"}
    report = host.sees(0.0, scanned(0, used_bytes=70 * GIB, processes=1), scanned(1))
    assert (reasons(report), report.unclean) == ([None, None], frozenset())


def test_memory_of_the_last_job_has_time_to_go(host: WatchedHost) -> None:
    host.released = {"g0": 0.0}
    clearing = host.sees(10.0, scanned(0, used_bytes=70 * GIB), scanned(1))
    assert (reasons(clearing), clearing.unclean) == ([None, None], {"g0"})
    clean = host.sees(20.0, scanned(0), scanned(1))
    assert (reasons(clean), clean.unclean, clean.changes) == ([None, None], frozenset(), ())
    host.released = {"g0": 20.0}
    assert reasons(host.sees(81.0, scanned(0, used_bytes=70 * GIB), scanned(1)))[0] is not None


def test_after_a_restart_running_jobs_have_time_to_be_adopted() -> None:
    host = WatchedHost()
    first = host.sees(0.0, scanned(0, used_bytes=70 * GIB))
    assert (reasons(first), first.unclean) == ([None], {"g0"})
    assert reasons(host.sees(61.0, scanned(0, used_bytes=70 * GIB))) == ["somebody else uses 70.0 GiB of it"]


def test_a_gpu_in_foreign_use_that_fails_is_reported_again(host: WatchedHost) -> None:
    host.sees(0.0, scanned(0), scanned(1, used_bytes=30 * GIB))
    broken = host.sees(5.0, scanned(0), _1="GPU is lost")
    assert (broken.failed, kinds(broken)) == ({"g1": "GPU is lost"}, [("gpu_out", "g1")])


def test_an_exclusion_by_the_operator_costs_no_job(host: WatchedHost) -> None:
    report = host.sees(0.0, scanned(0, excluded="the fan"), scanned(1))
    assert reasons(report) == ["taken out: the fan", None]
    assert (report.failed, report.changes) == ({}, ())
    assert reasons(host.sees(1.0, scanned(0), scanned(1))) == [None, None]


def test_a_host_is_planned_for_one_kind_of_gpu() -> None:
    other = GPU_KINDS["L40S"]
    report = WatchedHost().sees(0.0, scanned(0, kind=other), scanned(1), scanned(2))
    assert report.kinds == {"": H100}
    assert reasons(report) == ["a L40S among H100-SXM: a machine is planned for one kind of GPU", None, None]


def test_plans_are_made_for_the_gpu_with_the_least_memory() -> None:
    smaller = H100.model_copy(update={"memory_bytes": H100.memory_bytes - GIB})
    report = WatchedHost().sees(0.0, scanned(0), scanned(1, kind=smaller))
    assert report.kinds == {"": smaller}
    assert reasons(report) == [None, None]


def test_a_host_without_gpus_has_no_kind() -> None:
    report = WatchedHost().sees(0.0)
    assert (report.kinds, report.gpus, report.measured) == ({}, (), frozenset())
