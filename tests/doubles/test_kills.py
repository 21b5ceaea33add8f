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
from tests.doubles.each import each
from tests.doubles.kills import MOST_REPEATS, KillReport, kill_moments, run_kills
from trainer.session.submission import Submission, submission_kind

pytestmark = [pytest.mark.process, pytest.mark.thorough]


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
    """Return why it would not be uploaded as a whole model."""
    problems = what_is_uploaded(place, "org/model").problems
    return "; ".join(problems) or (None if submission_kind(place) else "half a model")


@pytest.fixture
def killed(tmp_path: Path) -> Callable[[str, int], KillReport]:
    def kill(how: str, count: int) -> KillReport:
        started: list[Submitter] = []

        def start() -> Submitter:
            place = tmp_path / f"{how}-{len(started)}" / "submission"
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
    assert [moment.changes > 0 for moment in moments] == [False, True] * 10


@each(
    ("how", "count", "starts", "problem"),
    [
        ("submits", 3, 3, None),
        ("writes in place", 1, 1, "kill 1 left nothing that scores: half a model"),
        ("ends at once", 1, 1, "the training ended"),
        ("ends after its first", 1, 1 + MOST_REPEATS, "1 of 1 trainings had ended before their kill"),
        ("ends once", 2, 3, None),
    ],
)
def test_a_campaign_passes_if_each_kill_left_a_submission(
    killed: Callable[[str, int], KillReport],
    tmp_path: Path,
    how: str,
    count: int,
    starts: int,
    problem: str | None,
) -> None:
    """A training that had ended by itself is not a kill: it is repeated earlier, and all after it are."""
    report = killed(how, count)
    assert (report.problem is None) if problem is None else (problem in str(report.problem))
    assert len(list(tmp_path.glob(f"{how}-*"))) == starts
    if how == "ends once":
        drawn = kill_moments(2, 56, 0.3)
        assert [kill.moment.seconds for kill in report.kills] == [moment.seconds / 2 for moment in drawn]


def test_a_save_that_a_kill_interrupts_leaves_the_submission_before_it(
    killed: Callable[[str, int], KillReport], tmp_path: Path
) -> None:
    """It waits in the middle of its second save, so that the kill comes there whatever the clock says."""
    report = killed("stops in a save", 2)
    assert report.problem is None
    assert report.kills[1].in_save
    for folder in tmp_path.iterdir():
        score = Submission(folder / "submission", "org/model", tmp_path).score
        assert score.step == 1
