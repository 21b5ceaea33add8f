"""Campaigns of kills, on processes that only submit; tests/trainer/session and tests/integration kill real
trainings."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from miner.tournament.rehearsal.upload import what_is_uploaded
from tests.doubles.kills import MOST_REPEATS, KillKind, KillReport, kill_moments, run_kills
from trainer.session.submission import Submission, submission_kind

pytestmark = pytest.mark.process


ROOT = Path(__file__).parents[2]
SUBMITTER = """
import sys, time
from pathlib import Path
from tests.trainer.session.simulated import safetensors, scored, write_adapter
from trainer.session.submission import Submission

how, place = sys.argv[1], Path(sys.argv[2])
submission = Submission(place, "org/model", place.parent / "base")
submission.prepare()


def write(folder, step):
    write_adapter(folder, safetensors(20_000 + step))
    if how == "stops in a save" and step == 2:
        (folder / "adapter_model.safetensors").write_bytes(safetensors(20_000)[:30_000])
        time.sleep(600)


if how == "ends after its first":
    submission.put(lambda folder: write(folder, 1), scored(1.0, 1))
    sys.exit()
if how == "writes in place":
    place.mkdir(parents=True)
    (place / "adapter_model.safetensors").write_bytes(safetensors(20_000)[:30_000])
    time.sleep(600)
for step in range(1, 1 if how == "ends at once" else 100_000):
    submission.put(lambda folder: write(folder, step), scored(1 / step, step))
"""


class Submitter:
    def __init__(self, how: str, place: Path) -> None:
        self.place = place
        self.process = subprocess.Popen([sys.executable, "-c", SUBMITTER, how, place], cwd=ROOT)

    def is_running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def wait_until(done: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not done():
        assert time.monotonic() < until
        time.sleep(0.01)


def half_written(file: Path) -> bool:
    try:
        return file.stat().st_size == 30_000
    except FileNotFoundError:  # the save before it has just been renamed
        return False


def check(place: Path) -> str | None:
    """Whether it would be uploaded, and is a whole model."""
    problems = what_is_uploaded(place, "org/model").problems
    return "; ".join(problems) or (None if submission_kind(place) else "half a model")


@pytest.fixture
def killed(tmp_path: Path) -> Callable[[str, int], KillReport]:
    def kill(how: str, count: int) -> KillReport:
        started: list[Submitter] = []

        def start() -> Submitter:
            place = tmp_path / str(len(started)) / "submission"
            ends = how == "ends once" and not started
            started.append(Submitter("ends after its first" if ends else how, place))
            if how == "stops in a save":
                half = place.with_name(".submission.new") / "adapter_model.safetensors"
                wait_until(lambda: half_written(half))
            if how == "ends after its first" or (how == "ends once" and len(started) == 1):
                started[-1].process.wait()
            return started[-1]

        return run_kills(start, count, 56, check, span_s=0.3, first_limit_s=60)

    return kill


def test_the_moments_repeat_with_the_seed_and_every_second_lies_in_a_save() -> None:
    moments = kill_moments(20, 7)
    assert moments == kill_moments(20, 7)
    assert moments != kill_moments(20, 8)
    assert [one.kind for one in moments[:2]] == [KillKind.RANDOM, KillKind.SAVE]
    assert all(one.changes > 0 for one in moments if one.kind is KillKind.SAVE)


def test_every_kill_leaves_a_whole_submission(killed: Callable[[str, int], KillReport]) -> None:
    report = killed("submits", 3)
    assert (report.passed, report.problem) == (True, None)
    assert "3 of 3 kills left a submission that scores" in report.summary()


def test_a_save_that_a_kill_interrupts_leaves_the_submission_before_it(
    killed: Callable[[str, int], KillReport], tmp_path: Path
) -> None:
    """It waits in the middle of its second save, so that the kill comes there whatever the clock says."""
    report = killed("stops in a save", 2)
    assert report.passed, report.summary()
    assert report.kills[1].in_save
    for number in range(2):
        score = Submission(tmp_path / str(number) / "submission", "org/model", tmp_path).score
        assert score is not None
        assert score.step == 1


def test_half_a_submission_is_found(killed: Callable[[str, int], KillReport]) -> None:
    report = killed("writes in place", 1)
    assert not report.passed
    assert report.survivors == 0
    assert report.kills[0].problem == "half a model"


def test_a_training_that_never_submits_is_a_failure(killed: Callable[[str, int], KillReport]) -> None:
    report = killed("ends at once", 1)
    assert not report.passed
    assert "the training ended" in str(report.kills[0].problem)
    assert report.kills[0].first_s is None


def test_a_training_that_has_ended_by_itself_is_no_kill(
    killed: Callable[[str, int], KillReport], tmp_path: Path
) -> None:
    report = killed("ends after its first", 1)
    assert (report.survivors, report.late, report.passed) == (0, 1, False)
    assert report.problem == "1 of 1 trainings had ended before their kill: give them more time"
    assert report.kills[0].summary() == "kill 1: its training had ended before it"
    assert "0 of 0 kills left" in report.summary()
    assert len(list(tmp_path.iterdir())) == 1 + MOST_REPEATS


def test_a_kill_that_came_too_late_is_repeated_and_all_after_it_come_earlier(
    killed: Callable[[str, int], KillReport], tmp_path: Path
) -> None:
    report = killed("ends once", 2)
    assert report.passed, report.summary()
    assert len(list(tmp_path.iterdir())) == 3
    drawn = kill_moments(2, 56, 0.3)
    assert [kill.moment.seconds for kill in report.kills] == [moment.seconds / 2 for moment in drawn]
