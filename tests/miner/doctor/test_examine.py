"""Whatever a check does, the examination ends with findings that say what to do."""

import logging
import threading
from collections.abc import Iterator

import pytest

from miner.doctor import CheckContext, DoctorCheck, Finding, FindingStatus, all_checks, examine, is_healthy
from miner.settings import load_settings
from miner.support.findings import fail, ok, skip, warn

HERE = CheckContext(load_settings(env={}, env_file=None))


def test_findings_come_in_the_order_of_the_checks_whichever_ends_first() -> None:
    second_is_over = threading.Event()

    def first(_: CheckContext) -> Iterator[Finding]:
        assert second_is_over.wait(timeout=120)
        yield ok("first", "fine")

    def second(_: CheckContext) -> Iterator[Finding]:
        yield ok("second", "fine")
        second_is_over.set()

    checks = [DoctorCheck("first", first, limit_seconds=120), DoctorCheck("second", second)]
    assert [finding.what for finding in examine(HERE, checks)] == ["first", "second"]


def test_a_check_that_raises_becomes_a_finding_beside_what_it_had_found_and_its_traceback_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(_: CheckContext) -> Iterator[Finding]:
        yield ok("half", "fine")
        raise KeyError("gpu")

    caplog.set_level(logging.DEBUG, logger="miner.doctor")
    good = DoctorCheck("good", lambda _: [ok("good", "fine")])
    half, failure, other = examine(HERE, [DoctorCheck("broken", broken), good])
    assert [one.status for one in (half, other)] == [FindingStatus.OK, FindingStatus.OK]
    assert failure.status is FindingStatus.FAIL
    assert "KeyError: 'gpu'" in failure.detail
    assert failure.fix
    assert "Traceback" in caplog.text


def test_a_check_that_hangs_becomes_a_finding_and_does_not_keep_the_program_from_ending() -> None:
    it_hangs, never = threading.Event(), threading.Event()

    def hanging(_: CheckContext) -> Iterator[Finding]:
        yield ok("half", "fine")
        it_hangs.set()
        never.wait()

    def first(_: CheckContext) -> Iterator[Finding]:
        assert it_hangs.wait(timeout=120)
        yield ok("first", "fine")

    checks = [DoctorCheck("first", first, limit_seconds=120), DoctorCheck("hanging", hanging, 0.01)]
    _, half, failure = examine(HERE, checks)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "doctor-hanging"]
    assert thread.daemon
    never.set()
    thread.join(timeout=120)
    assert half.status is FindingStatus.OK
    assert failure.what == "hanging"
    assert "0.01 s" in failure.detail
    assert failure.fix


def test_warnings_and_things_skipped_are_no_reason_not_to_start() -> None:
    assert is_healthy([ok("a", "b"), warn("a", "b", "c"), skip("a", "b")])
    assert not is_healthy([ok("a", "b"), fail("a", "b", "c")])


@pytest.mark.parametrize("status", [FindingStatus.WARN, FindingStatus.FAIL])
def test_a_bad_finding_has_to_say_how_to_fix_it(status: FindingStatus) -> None:
    with pytest.raises(ValueError, match="how to fix it"):
        Finding(status, "thing", "bad")


def test_every_check_has_a_name_of_its_own_and_a_time_limit() -> None:
    checks = all_checks(load_settings(env={}, env_file=None, backend="docker,slurm"))
    assert "slurm" in {check.name for check in checks}
    assert len({check.name for check in checks}) == len(checks)
    assert all(0 < check.limit_seconds < 600 for check in checks)
