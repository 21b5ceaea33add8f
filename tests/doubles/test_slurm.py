"""The tests' own Slurm: its daemons can be killed and started again, and nothing of it outlives the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.doubles.required import missing
from tests.doubles.slurm import CONTROLLER, MUNGE, SCRIPT, OwnSlurm, own_slurm, waited_for

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
SLEEPER = "#!/bin/sh\nsrun sh -c 'echo up >up; exec sleep 1000'\n"
KEPT = """
import sys
from tests.doubles.slurm import own_slurm
with own_slurm(nodes=1, gpus=0) as slurm:
    print(slurm.folder, flush=True)
    slurm.run("sbatch", "--output=/dev/null", "--chdir", sys.argv[1], script=sys.argv[2])
    sys.stdin.read()
"""


@pytest.fixture
def mortal() -> Iterator[OwnSlurm]:
    with own_slurm() as slurm:
        yield slurm


def submitted(slurm: OwnSlurm, folder: Path) -> str:
    """A job with a step, which runs."""
    job = slurm.run("sbatch", "--parsable", "--output=log", "--chdir", str(folder), script=SLEEPER).strip()
    waited_for((folder / "up").exists, "the job does not begin")
    return job


def of(folder: Path) -> list[str]:
    """The commands that name this folder, in their words, environment or open files."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                files = [os.readlink(file) for file in (entry / "fd").iterdir()]
                if str(folder) in f"{command!r} {(entry / 'environ').read_bytes()!r} {files}":
                    found.append(repr(command))
    return found


def test_its_jobs_outlive_its_daemons_which_can_be_started_again(mortal: OwnSlurm, tmp_path: Path) -> None:
    job = submitted(mortal, tmp_path)
    mortal.save()
    for daemon in (CONTROLLER, MUNGE, mortal.jobs()[job]["NodeList"]):
        mortal.kill(daemon)
        mortal.start()
        assert mortal.jobs()[job]["JobState"] == "RUNNING", daemon
    assert set(mortal.supervisors(job)) == {"batch", "0"}
    mortal.kill_node(mortal.jobs()[job]["NodeList"])
    assert mortal.supervisors(job) == {}


def test_a_stand_in_stops_at_its_gate_and_everybody_else_passes(slurm: OwnSlurm) -> None:
    before = len(slurm.jobs())
    command = [slurm.bin / "sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true"]
    ids = []
    for when, there in (("before", 0), ("after", 1)):
        gate = slurm.gate("sbatch", when)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
            assert gate.wait() == first.pid
            assert len(slurm.jobs()) == before + len(ids) + there
            ids.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
            assert first.poll() is None
            gate.lift()
            ids.append(first.communicate()[0].strip())
    assert len(set(ids)) == 4
    assert set(ids) <= set(slurm.jobs())
    assert sum(call.startswith("sbatch --parsable --hold") for call in slurm.calls()) >= 4
    slurm.run("scancel", *ids)


def test_another_user_has_jobs_and_a_node_can_be_drained(mortal: OwnSlurm) -> None:
    if os.geteuid() != 0:
        missing("jobs of two users need root")
    job = mortal.others_job("--nodelist=n1", "--gpus-per-node=4")
    assert mortal.jobs()[job]["UserId"].startswith("nobody")
    mortal.drain("n2", "bad disk")
    assert "drained bad disk" in mortal.run("sinfo", "-h", "-N", "-o", "%N %T %E")
    mortal.resume("n2")
    assert "n2 idle" in mortal.run("sinfo", "-h", "-N", "-o", "%N %T")


def test_nothing_is_left_of_a_test_run_that_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KEPT, str(tmp_path), SLEEPER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as run:
        assert run.stdout is not None
        folder = Path(run.stdout.readline().strip())
        waited_for((tmp_path / "up").exists, "the job does not begin")
        run.send_signal(signal.SIGKILL)
    waited_for(lambda: not folder.parent.exists(), "its folder is there")
    # The shell that deletes the folder ends a moment after it.
    waited_for(lambda: not of(folder), "processes of it are left")


def test_the_script_says_what_runs_and_what_it_cannot_do(tmp_path: Path) -> None:
    def said(*arguments: str) -> tuple[int, str]:
        done = subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    code, text = said("status", str(tmp_path / "none"))
    assert (code, "one_machine_slurm.sh up" in text) == (1, True)
    assert said("up", str(tmp_path / "five"), "--gpus", "5")[0] == 1
    assert said("up", str(tmp_path / "bad"), "--what", "5")[0] == 2
    assert said("down", str(tmp_path / "none"))[0] == 0
