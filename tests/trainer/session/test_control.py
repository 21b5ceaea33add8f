"""What the control file asks of a running training, in simulated time."""

# Once: it needs nothing of the training stack.

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from core.runs.progress import ControlEvent
from core.runs.run_files import CONTROL_FILE, RunControl, RunEnd, even_micro, write_control
from tests.trainer.session.simulated import Simulation, plan_of
from trainer.session.control import PAUSE_CHECK_S, ControlFile


def simulation(folder: Path, **changes: Any) -> Simulation:
    given = {"plan": plan_of(200, 200, 1.0), "seconds": 2000.0, "step_s": lambda step: 1.0, **changes}
    return Simulation(folder, **given)


def answers(run: Simulation) -> list[ControlEvent]:
    return [event for event in run.events if isinstance(event, ControlEvent)]


@pytest.mark.parametrize(
    ("sequences", "most", "even"), [(16, 7, 6), (8, 7, 4), (8, 4, 4), (8, 3, 3), (8, 100, 8), (1, 1, 1)]
)
def test_a_steps_sequences_are_shared_out_evenly(sequences: int, most: int, even: int) -> None:
    assert even_micro(sequences, most) == even


def test_each_request_is_answered_once_with_what_holds_from_then_on(tmp_path: Path) -> None:
    asked = {
        40: RunControl(number=1, micro=2),
        60: RunControl(number=3, micro=1000, duty=0.8),
        80: RunControl(number=4),
    }
    run = simulation(tmp_path, asked=asked)
    planned = run.plan.batch.micro
    assert run.run().end is RunEnd.FINISHED
    said = [(event.number, event.applied, event.micro, event.duty) for event in answers(run)]
    assert said == [(1, True, 2, 1.0), (3, False, 2, 0.8), (4, True, planned, 1.0)]
    refused = answers(run)[1].text
    assert refused.startswith("after step 60: ")
    assert "1000 is too large" in refused


def test_passes_that_are_not_as_planned_are_reported_before_anything_is_asked(tmp_path: Path) -> None:
    run = simulation(tmp_path)
    planned = run.plan.batch.micro
    run.session.controls.begin(planned)
    run.session.controls.begin(planned * 2)
    said = [(event.number, event.applied, event.micro) for event in answers(run)]
    assert said == [(0, True, planned)]


def test_pauses_count_in_the_forecast_at_once_and_the_last_save_is_in_time(tmp_path: Path) -> None:
    """At half of the time only half of the steps fit; the rate has decayed by then all the same."""
    run = simulation(tmp_path, asked={10: RunControl(number=1, duty=0.5)}, seconds=210.0)
    outcome = run.run()
    assert outcome.end is RunEnd.CLOCK
    assert 80 < outcome.steps < 120
    assert 0 <= run.left < 20
    assert run.rates[-1] < 0.05
    assert run.rates[len(run.rates) // 2] < 0.7  # and half of it at half of the way: there was no surprise
    assert [event.duty for event in answers(run)] == [0.5]


def test_a_pause_ends_with_a_request_to_stop(tmp_path: Path) -> None:
    run = simulation(tmp_path, asked={10: RunControl(number=1, duty=0.5)}, step_s=lambda step: 60.0)
    run.seconds = 1e6
    run.session.clock.end_by += 1e6
    began: list[float] = []
    pause = run.time.pass_by

    def sleep(seconds: float) -> None:
        pause(seconds)
        if run.session.step == 20:
            run.stop_at = 20
            began.append(run.time.now)

    run.session.sleep = sleep
    outcome = run.run()
    assert (outcome.end, outcome.steps) == (RunEnd.STOPPED, 20)
    assert len(began) == 1  # of 120 parts of the pause
    assert run.time.now - began[0] < 10 * PAUSE_CHECK_S


def test_after_a_change_the_speed_of_the_steps_before_is_soon_forgotten(tmp_path: Path) -> None:
    run = simulation(tmp_path, asked={100: RunControl(number=1, micro=2)}, plan=plan_of(400, 400, 1.0))
    run.session.begin()
    for step in range(110):
        run.session.stepped(1.0 if step < 100 else 3.0)
    assert run.session.clock.step_s > 2.0


class Notes(list[str]):
    def __call__(self, kind: str, text: str) -> None:
        self.append(f"{kind}: {text}")


def test_a_file_is_read_when_it_changed_and_each_number_is_taken_once(tmp_path: Path) -> None:
    path, notes = tmp_path / CONTROL_FILE, Notes()
    file = ControlFile(path, notes, every_s=0)
    assert file.take() is None
    write_control(path, RunControl(number=2, micro=3, duty=0.97))
    assert file.take() == RunControl(number=2, micro=3, duty=0.97)
    assert file.take() is None
    write_control(path, RunControl(number=2, micro=5))
    assert file.take() is None
    path.write_bytes(b"{")
    assert [file.take(), file.take()] == [None, None]
    write_control(path, RunControl(number=3))
    assert file.take() == RunControl(number=3)
    assert notes == [f"control: {CONTROL_FILE} cannot be read as a request: it is ignored"]


def test_what_is_no_plain_file_is_not_opened(tmp_path: Path) -> None:
    """Opening a pipe would wait for ever for who writes into it."""
    path = tmp_path / CONTROL_FILE
    os.mkfifo(path)
    assert ControlFile(path, Notes(), every_s=0).take() is None
    assert ControlFile(None, Notes(), every_s=0).take() is None
