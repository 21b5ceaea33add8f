"""The time of day, as far as it can be believed."""

from __future__ import annotations

import time

import pytest

from miner.support.clock import TOLERANCE_SECONDS, SteadyClock

HOUR = 3600.0


class Machine:
    def __init__(self) -> None:
        self.wall, self.running = 1_000_000.0, 500.0
        self.jumps: list[str] = []
        self.clock = SteadyClock(
            wall=lambda: self.wall,
            running=lambda: self.running,
            on_jump=self.jumps.append,
            trust_seconds=600.0,
        )

    def passes(self, seconds: float, jump: float = 0.0) -> float:
        self.running += seconds
        self.wall += seconds + jump
        return self.clock()


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_time_passes_as_the_system_says_also_when_its_clock_is_put_right_a_little(machine: Machine) -> None:
    assert machine.passes(3 * HOUR) == 1_000_000.0 + 3 * HOUR
    assert machine.passes(1.0, jump=TOLERANCE_SECONDS - 1) == 1_000_030.0 + 3 * HOUR
    assert machine.passes(1.0, jump=1 - TOLERANCE_SECONDS) == 1_000_002.0 + 3 * HOUR
    assert machine.jumps == []


@pytest.mark.parametrize("jump", [10 * HOUR, -10 * HOUR])
def test_a_jump_is_ignored_at_first_and_reported_once(machine: Machine, jump: float) -> None:
    assert machine.passes(1.0, jump=jump) == 1_000_001.0
    assert machine.passes(60.0) == 1_000_061.0
    assert len(machine.jumps) == 1
    assert machine.clock.doubted_seconds == jump


def test_a_clock_that_comes_back_was_wrong_and_nothing_has_happened(machine: Machine) -> None:
    machine.passes(1.0, jump=10 * HOUR)
    assert machine.passes(60.0, jump=-10 * HOUR) == 1_000_061.0
    assert machine.clock.doubted_seconds is None


def test_a_jump_that_lasts_is_accepted(machine: Machine) -> None:
    machine.passes(1.0, jump=10 * HOUR)
    assert machine.passes(599.0) == 1_000_600.0
    assert machine.passes(1.0) == 1_000_601.0 + 10 * HOUR
    assert machine.clock.doubted_seconds is None


def test_another_jump_restarts_the_waiting(machine: Machine) -> None:
    machine.passes(1.0, jump=10 * HOUR)
    machine.passes(500.0, jump=HOUR)
    assert machine.passes(500.0) == 1_001_001.0
    assert len(machine.jumps) == 2


def test_a_validators_clock_settles_it_at_once(machine: Machine) -> None:
    machine.clock.confirm()
    assert machine.clock() == 1_000_000.0, "nothing was doubted"
    machine.passes(1.0, jump=10 * HOUR)
    machine.clock.confirm()
    assert machine.clock() == 1_000_001.0 + 10 * HOUR


def test_it_shows_the_systems_time_out_of_the_box() -> None:
    before = time.time()
    assert before <= SteadyClock()() <= time.time()
