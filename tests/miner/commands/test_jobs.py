from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from core.run_files import RunEnd, RunSpec
from miner.cli import app
from tests.miner.jobs.house import House, Trainer, opened

Run = Callable[..., Result]


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with opened(tmp_path / "data") as made:
        yield made


@pytest.fixture
def run(house: House, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """The command line beside books that are in use, without a daemon."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATA_DIR", str(house.folder))
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *words: CliRunner().invoke(app, ["jobs", *words])


async def write_log(trainer: Trainer) -> None:
    Path(trainer.run.progress_path).with_name("log").write_text("".join(f"line {n}\n" for n in range(100)))
    trainer.save(0.5)
    trainer.end(RunEnd.FINISHED)


@pytest.fixture
async def done(house: House) -> int:
    house.engine.default = write_log
    job = await house.start()
    await house.over_within(job)
    return job


async def test_jobs_are_listed(run: Run, done: int) -> None:
    shown = await asyncio.to_thread(run, "list")
    assert "me/repo-1" in shown.output
    assert "published" in shown.output
    (job,) = json.loads((await asyncio.to_thread(run, "list", "--json")).output)
    assert (job["id"], job["state"]) == (done, "done")
    assert json.loads((await asyncio.to_thread(run, "list", "--open", "--json")).output) == []


async def test_a_job_is_shown_with_its_attempts_and_what_its_end_means(run: Run, done: int) -> None:
    shown = (await asyncio.to_thread(run, "show", "t1")).output
    assert "The model is published." in shown
    assert "coroutine" in shown
    whole = json.loads((await asyncio.to_thread(run, "show", str(done), "--json")).output)
    assert whole["steps"][0]["name"] == "fetch"


async def test_logs_show_the_last_lines_and_follow_to_the_end(run: Run, done: int) -> None:
    assert (await asyncio.to_thread(run, "logs", "1", "-n", "2")).output == "line 98\nline 99\n"
    followed = await asyncio.wait_for(asyncio.to_thread(run, "logs", "1", "-f", "-n", "1"), 10)
    assert followed.output == "line 99\n"
    piece = json.loads((await asyncio.to_thread(run, "logs", "1", "-n", "1", "--json")).output)
    assert (piece["attempt"], piece["text"], piece["ended"]) == (1, "line 99\n", True)


async def test_an_attempt_can_be_run_again_by_hand_in_a_folder_of_its_own(
    run: Run, done: int, house: House
) -> None:
    script = (await asyncio.to_thread(run, "replay", "1")).output
    assert "-m trainer.text --run" in script
    found = json.loads((await asyncio.to_thread(run, "replay", "1", "--json")).output)
    spec = RunSpec.from_json(found["run_json"])
    assert found["folder"].endswith("/jobs/1/replay_1")
    written = (spec.work_dir, spec.submission_dir, spec.progress_path, spec.result_path, spec.plan_path)
    assert all(str(path).startswith(found["folder"]) for path in written)
    assert found["environment"]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert found["missing"] == []
    Path(spec.data_path).unlink()
    assert f"# MISSING: {spec.data_path}" in (await asyncio.to_thread(run, "replay", "1")).output


async def test_changes_need_a_daemon(run: Run, done: int) -> None:
    for word in ("cancel", "retry"):
        refused = await asyncio.to_thread(run, word, "1")
        assert refused.exit_code == 1
        assert "no daemon runs on" in str(refused.exception)


@pytest.mark.parametrize(
    "words", [("show", "nope"), ("logs", "nope"), ("replay", "nope"), ("logs", "1", "--attempt", "7")]
)
async def test_what_is_not_there_is_told_in_a_line(run: Run, done: int, words: tuple[str, ...]) -> None:
    refused = await asyncio.to_thread(run, *words)
    assert refused.exit_code == 1
    assert "no job" in str(refused.exception) or "no attempt 7" in str(refused.exception)
