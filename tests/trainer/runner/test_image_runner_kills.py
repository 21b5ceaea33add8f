"""Image trainings killed with all that they have started: what lies there then is uploaded, whole, or there
is nothing because nothing was saved yet. The runner is the real one, the engines are stand-ins which leave
the files of sd-scripts and ai-toolkit.
"""

# Once: it needs nothing of the training stack.

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from core.domain.tasks import ImageModelType, TaskType
from core.runs.run_files import RunResult, RunSpec
from core.submission.check import BaseModelRef
from core.submission.prepare import check_submission
from core.system.wrapper import descendant_pids
from miner.tournament.rehearsal.upload import as_published, what_is_uploaded
from tests.doubles.kills import Kill, run_kills
from tests.trainer.runner.engines import LAST_MARKER, lay_out
from tests.trainer.runner.gated_runner import marker
from tests.trainer.runner.test_image_runner import image_run, planned

pytestmark = pytest.mark.process


ROOT = Path(__file__).parents[3]
SEED = int(os.environ.get("GOD_MINER_SEED", "56"))
#: Of each engine.
INSTANTS = int(os.environ.get("GOD_MINER_INSTANTS", "25"))
KINDS = {"kohya": ImageModelType.FLUX, "ai-toolkit": ImageModelType.QWEN_IMAGE}
#: The marker of the file that is the last but one of 60 steps: sd-scripts counts epochs of two steps.
BEFORE_LAST = {"kohya": 25, "ai-toolkit": 50}
FIRST = {"kohya": "last-000005.safetensors", "ai-toolkit": "last_000000010.safetensors"}
WAIT_S = 300.0


@dataclass
class ImageTraining:
    """A runner in a process of its own, and what it starts."""

    run: RunSpec
    process: subprocess.Popen[bytes]
    ready: Path

    @property
    def place(self) -> Path:
        return Path(self.run.submission_dir)

    def is_running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """All at once, as far as anything outside a container can: what could react is stopped first."""
        if self.is_running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGSTOP)
        for pid in descendant_pids(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def wait_for(self, gate: str, left: int | None) -> None:
        """Until it waits there, and its file with this marker is submitted."""
        until = time.monotonic() + WAIT_S
        while not (self.ready.exists() and left in (None, marker(self.place))):
            assert self.is_running(), self.log
            assert time.monotonic() < until, f"it never came to {gate}: {self.log}"
            time.sleep(0.02)

    @property
    def log(self) -> str:
        return (self.place.parent / "log").read_text("utf-8", "replace")[-3000:]


def started(run: RunSpec, gate: str = "", step_s: float = 0.01) -> ImageTraining:
    folder = Path(run.work_dir).parent
    (folder / "run.json").write_text(run.to_json(), encoding="utf-8")
    engines = folder / "engines"
    found = lay_out(engines, sys.executable) if not engines.exists() else {}
    # Of a second attempt the engines are there already.
    found = found or {
        "GOD_MINER_KOHYA": str(engines / "sd-scripts"),
        "GOD_MINER_AI_TOOLKIT": str(engines / "ai-toolkit"),
        "GOD_MINER_ENGINE_PYTHON": "python",
        "PATH": f"{engines / 'bin'}:{os.environ['PATH']}",
    }
    ready = folder / "ready"
    ready.unlink(missing_ok=True)
    named = {"STAND_IN_GATE": gate, "STAND_IN_READY": str(ready)}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **found, **named, "STAND_IN_STEP_S": str(step_s)}
    with (folder / "log").open("ab") as log:
        command = [sys.executable, "-m", "tests.trainer.runner.gated_runner", "--run", folder / "run.json"]
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)
    return ImageTraining(run, process, ready)


def run_of(folder: Path, engine: str, total: int = 60) -> RunSpec:
    run = image_run(folder, KINDS[engine], 3600.0)
    return planned(run, total)


def problem_of(run: RunSpec, place: Path) -> str | None:
    """What is wrong with what would be uploaded."""
    upload = what_is_uploaded(place, run.model_id, image=True)
    if upload.problems:
        return "; ".join(upload.problems)
    repository = as_published(upload, place.parent / "repository")
    published = sorted(str(path.relative_to(repository)) for path in repository.rglob("*") if path.is_file())
    if published != ["checkpoints/README.md", "checkpoints/last.safetensors"]:
        return f"{published} are published"
    base = BaseModelRef(image_type=run.image_type)
    faults = check_submission(place, base, TaskType.IMAGE, as_is=True).faults
    return "; ".join(map(str, faults)) or None


@pytest.mark.parametrize(
    ("engine", "gate", "left"),
    [
        ("kohya", "launch-1 step 2", None),
        ("kohya", f"launch-1 save {FIRST['kohya']}", None),
        ("kohya", "launch-1 save last.safetensors", BEFORE_LAST["kohya"]),
        ("ai-toolkit", f"launch-1 save {FIRST['ai-toolkit']}", None),
        ("ai-toolkit", "launch-1 save last.safetensors", BEFORE_LAST["ai-toolkit"]),
        ("ai-toolkit", "put first", None),
        ("ai-toolkit", "put last done", LAST_MARKER),
    ],
)
def test_killed_at_a_gate_it_leaves_what_is_uploaded_or_nothing(
    tmp_path: Path, engine: str, gate: str, left: int | None
) -> None:
    training = started(run_of(tmp_path, engine), gate)
    try:
        training.wait_for(gate, left)
    finally:
        training.kill()
    if left is None:
        assert not training.place.exists()
    else:
        assert problem_of(training.run, training.place) is None
        assert marker(training.place) == left


@pytest.mark.parametrize("engine", KINDS)
def test_killed_between_two_saves_the_first_is_left_and_a_second_attempt_goes_on(
    tmp_path: Path, engine: str
) -> None:
    run = run_of(tmp_path, engine)
    training = started(run, "launch-1 step 31")
    try:
        training.wait_for("launch-1 step 31", {"kohya": 15, "ai-toolkit": 30}[engine])
    finally:
        training.kill()
    assert problem_of(run, training.place) is None
    first = marker(training.place)
    run = planned(run, 60)
    again = started(run)
    assert again.process.wait(WAIT_S) == 0, again.log
    assert RunResult.model_validate_json(Path(run.result_path).read_bytes()).submission
    assert problem_of(run, again.place) is None
    assert first not in (None, LAST_MARKER)
    assert marker(again.place) == LAST_MARKER


@pytest.mark.campaign
@pytest.mark.parametrize("engine", KINDS)
def test_killed_at_any_instant_it_leaves_what_is_uploaded(tmp_path: Path, engine: str) -> None:
    trainings: list[ImageTraining] = []

    def start() -> ImageTraining:
        folder = tmp_path / str(len(trainings))
        trainings.append(started(run_of(folder, engine, 400), step_s=0.02))
        return trainings[-1]

    def check(place: Path) -> str | None:
        return problem_of(trainings[-1].run, place)

    def show(kill: Kill) -> None:
        sys.stderr.write(f"{kill}\n{trainings[-1].log if kill.problem else ''}")

    report = run_kills(start, INSTANTS, SEED, check, span_s=4.0, on_kill=show)
    sys.stderr.write(f"{engine}: {report.summary()}\n")
    assert report.problem is None, report.summary()
