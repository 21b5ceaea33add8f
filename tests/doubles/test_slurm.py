"""The tests' own Slurm: nothing of it outlives the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.doubles.slurm import SCRIPT, waited_for

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


def test_nothing_is_left_of_a_test_run_that_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KEPT, str(tmp_path), SLEEPER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as run:
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
