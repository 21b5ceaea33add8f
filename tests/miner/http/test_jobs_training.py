"""Curves, plans and files of a job on the operator's port."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from core.runs.progress import EvalEvent, StepEvent
from core.runs.run_files import HeldOutScore, RunEnd
from miner.jobs import views
from miner.jobs.folder import AttemptFolder, job_folder
from miner.jobs.views import files_view
from tests.miner.http.job_port import Port, open_port
from tests.miner.jobs.harness import Trainer


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    async with open_port(tmp_path / "data") as port:
        yield port


def reports(trainer: Trainer, *steps: int) -> None:
    for number in steps:
        trainer.say(
            StepEvent(
                t=time.time(),
                step=number,
                total=20,
                loss=3.0 - number / 10,
                lr=1e-4,
                tokens_s=1000.0,
                samples_s=2.0,
                wait=0.01,
                memory_bytes=10**9,
            )
        )


def scores(trainer: Trainer, step: int, value: float, best: bool) -> None:
    score = HeldOutScore(value=value, step=step)
    trainer.say(EvalEvent(t=time.time(), score=score, best=best))


async def trains(trainer: Trainer) -> None:
    scores(trainer, 0, 2.0, best=False)
    reports(trainer, *range(1, 11))
    scores(trainer, 10, 1.5, best=True)
    await trainer.wait_for_stop()
    trainer.end(RunEnd.OOM)


async def series(port: Port, job: int) -> dict[str, Any]:
    found: dict[str, Any] = (await port.ask("GET", f"/jobs/{job}/series")).json()
    return found


async def test_a_job_that_has_not_begun_has_no_curves_and_no_plan(port: Port) -> None:
    port.harness.inputs.troubles = [60.0]
    job = await port.harness.start()
    assert await series(port, job) == {"job_id": job, "metric": None, "lower_is_better": None, "attempts": []}
    reply = await port.ask("GET", f"/jobs/{job}/plan")
    assert (reply.status_code, reply.json()["error"]) == (404, "no_such_job")
    assert (await port.ask("GET", f"/jobs/{job}/files")).json() == {"job_id": job, "artefacts": []}
    assert (await port.ask("GET", "/jobs/99/series")).status_code == 404
    assert (await port.ask("GET", "/jobs/1/series", headers={"authorization": ""})).status_code == 401


async def test_curves_grow_with_the_training_and_are_the_same_when_it_is_over(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = port.harness
    harness.backend.scripts = [trains]
    job = await harness.start()
    live = harness.jobs.live(job)
    await harness.until(lambda: live.best_score == 1.5)
    monkeypatch.setattr(views, "read_figures", None)  # a running attempt is shown from memory
    shown = await series(port, job)
    assert (shown["metric"], shown["lower_is_better"]) == ("eval_loss", True)
    (running,) = shown["attempts"]
    assert (running["number"], running["ended_at"], running["actions"]) == (1, None, [])
    assert running["steps"]["step"] == list(range(1, 11))
    assert running["steps"]["loss"][-1] == 2.0
    assert running["steps"]["mfu"] == [None] * 10
    assert [(one["step"], one["score"], one["best"]) for one in running["evals"]] == [
        (0, 2.0, False),
        (10, 1.5, True),
    ]
    assert running["figures"]["gain"] == 0.25
    assert (live.samples_s, live.wait, live.base_score) == (2.0, 0.01, 2.0)
    await harness.jobs.cancel(job)
    monkeypatch.undo()
    await harness.over_within(job)
    (attempt,) = await harness.attempts(job)
    AttemptFolder(attempt.folder).progress.unlink()  # as after a clean-up: what is stored counts
    (ended,) = (await series(port, job))["attempts"]
    assert (ended["steps"], ended["evals"]) == (running["steps"], running["evals"])
    assert ended["ended_at"] is not None


async def test_the_plan_is_shown_with_its_memory_by_term_beside_what_was_measured(port: Port) -> None:
    port.harness.backend.scripts = [trains]
    job = await port.harness.start()
    live = port.harness.jobs.live(job)
    await port.harness.until(lambda: live.step == 10)
    plan = (await port.ask("GET", f"/jobs/{job}/plan")).json()
    assert plan["attempt"] == 1
    memory = plan["memory"]
    assert memory["measured_bytes"] == 10**9
    assert sum(memory["terms"].values()) == memory["estimate_bytes"] == live.memory_estimate_bytes
    assert plan["expected"]["step_s"] == plan["plan"]["time"]["step_s"]
    assert live.efficiency == pytest.approx(1000.0 / plan["expected"]["tokens_s"])
    assert (await port.ask("GET", f"/jobs/{job}/plan?attempt=2")).status_code == 404


async def test_artefacts_are_listed_without_inputs_and_nothing_leads_out_of_the_job(port: Port) -> None:
    async def plants(trainer: Trainer) -> None:
        folder = Path(trainer.run.progress_path).parent
        (folder / "log").write_text("hello")
        (folder / ".part").write_text("")
        (folder / "secrets").symlink_to("/etc")
        (folder / "passwd").symlink_to("/etc/passwd")
        (folder / "odd\x1b[2J").write_text("")
        os.mkfifo(folder / "pipe")
        trainer.save(0.5)
        trainer.end()

    port.harness.backend.scripts = [plants]
    job = await port.harness.start()
    await port.harness.over_within(job)
    reply = (await port.ask("GET", f"/jobs/{job}/files")).json()
    listed = {one["name"]: one["bytes"] for one in reply["artefacts"]}
    assert listed["attempt_1/log"] == 5
    assert "attempt_1/submission/adapter_model.safetensors" in listed
    assert "submission/adapter_model.safetensors" in listed
    assert not [name for name in listed if "/." in name]
    assert not [name for name in listed if "passwd" in name or "secrets" in name or "pipe" in name]
    assert not [name for name in listed if name.startswith(("inputs", "orders")) or "\x1b" in name]


def test_a_folder_that_was_replaced_by_a_link_is_not_followed(tmp_path: Path) -> None:
    folder = job_folder(tmp_path, 1)
    (folder.path / "attempt_1").mkdir(parents=True)
    (folder.path / "attempt_2").symlink_to("/etc")
    (folder.path / "submission").symlink_to("/etc")
    assert files_view(folder) == []


def test_so_many_files_are_listed_and_no_more(tmp_path: Path) -> None:
    folder = job_folder(tmp_path, 1)
    (folder.path / "attempt_1").mkdir(parents=True)
    for number in range(views.MAX_FILES + 10):
        (folder.path / "attempt_1" / str(number)).touch()
    assert len(files_view(folder)) == views.MAX_FILES
