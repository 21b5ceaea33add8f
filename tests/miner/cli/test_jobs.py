from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from core.domain.tasks import TaskType
from core.domain.units import show_bytes
from core.runs.run_files import HeldOutScore, RunEnd, RunSpec
from miner.__main__ import app
from miner.api.comparison import JobComparison
from miner.api.jobs import AttemptFigures, LiveJob
from miner.cli.render.jobs import comparison_pages, job_pages
from miner.cli.render.terminal import Terminal
from miner.jobs import views
from miner.store.actions import ActionOutcome, ActionRow, NewAction, add_action
from miner.store.database import DataDirLock
from tests.miner.cli.pages import JOB, job_details
from tests.miner.history import add_job
from tests.miner.jobs.harness import JobsHarness, Trainer, open_harness

pytestmark = pytest.mark.process


Run = Callable[..., Awaitable[Result]]


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[JobsHarness]:
    async with open_harness(tmp_path / "data") as made:
        yield made


@pytest.fixture
def run(harness: JobsHarness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """The command line beside a store that is in use, without a daemon."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATA_DIR", str(harness.folder))
    monkeypatch.setenv("COLUMNS", "200")

    async def run(*words: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, app, ["jobs", *words])

    return run


async def write_log(trainer: Trainer) -> None:
    Path(trainer.run.progress_path).with_name("log").write_text("".join(f"line {n}\n" for n in range(100)))
    trainer.save(0.5)
    trainer.end(
        RunEnd.FINISHED,
        base=HeldOutScore(value=2.25, step=0),
        best=HeldOutScore(value=1.75, step=90),
        steps=120,
        seconds=600,
        tokens_s=12_345.0,
        memory_bytes=61_200_000_000,
    )


@pytest.fixture
async def done(harness: JobsHarness) -> int:
    harness.backend.default = write_log
    job = await harness.start()
    await harness.over_within(job)
    return job


async def test_jobs_are_listed_and_one_is_shown_with_its_attempts_and_what_its_end_means(
    run: Run, done: int
) -> None:
    listed = (await run("list")).output
    assert "me/repo-1" in listed
    assert "published" in listed
    (job,) = json.loads((await run("list", "--json")).output)
    assert (job["id"], job["state"]) == (done, "done")
    assert json.loads((await run("list", "--open", "--json")).output) == []
    shown = (await run("show", "t1")).output
    assert "The model is published." in shown
    assert "coroutine" in shown
    whole = json.loads((await run("show", str(done), "--json")).output)
    assert whole["steps"][0]["name"] == "fetch"
    assert whole["attempts"][0]["end_by"].endswith("Z")


async def test_what_a_training_has_come_to_is_in_the_list_on_the_page_and_in_json(
    run: Run, done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (listed,) = json.loads((await run("list", "--json")).output)
    whole = json.loads((await run("show", "1", "--json")).output)
    wanted = {
        "attempt": 1,
        "end": "finished",
        "metric": "eval_loss",
        "base": 2.25,
        "best": 1.75,
        "best_step": 90,
        "gain": pytest.approx(0.5 / 2.25),
        "steps": 120,
        "seconds": 600.0,
        "tokens_s": 12_345.0,
        "memory_bytes": 61_200_000_000,
    }
    assert listed["result"] == whole["result"] == whole["attempts"][0]["result"] == wanted
    monkeypatch.setenv("COLUMNS", "80")
    shown = (await run("list")).output.splitlines()
    assert len(shown) == 2
    assert "2.250 → 1.750" in shown[1]
    page = (await run("show", "1")).output
    words = " ".join(page.split())
    assert "eval_loss 2.2500 → 1.7500, best at step 90 of attempt 1" in words
    assert "gain +22.2% over the base" in words
    assert "target loss below 0.064, 15 % better than the base: not reached" in words
    assert "120 steps in 10 min 00 s" in words
    figures = whole["attempts"][0]["figures"]
    assert figures["gain"] == pytest.approx(0.5 / 2.25)
    planned = figures["memory_estimate_bytes"]
    assert f"speed 12,345 tokens/s, {figures['efficiency']:.0%} of the planned speed" in words
    assert f"61.2 GB at most, {show_bytes(planned)} planned ({61_200_000_000 / planned:.0%})" in words
    assert max(map(len, page.splitlines())) <= 80


async def test_success_time_and_gain_are_reported_by_type_family_and_size(
    run: Run, harness: JobsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "No job has ended in the last 30 days" in (await run("stats")).output
    now = time.time()
    llama = {"model": "org/Llama-3.1-8B", "params": 8 * 10**9}
    await harness.store.write(add_job, "a", now - 60, took=2.0, gain=0.1, **llama)
    await harness.store.write(add_job, "b", now - 50, took=4.0, gain=0.3, **llama)
    await harness.store.write(add_job, "c", now - 40, state="failed", reason="oom", **llama)
    flux = {"model": "org/flux-dev", "params": 12 * 10**9, "task_type": TaskType.DPO}
    await harness.store.write(add_job, "d", now - 30, took=1.0, **flux)
    await harness.store.write(add_job, "old", now - 40 * 86_400, state="failed", reason="nan", **llama)
    found = json.loads((await run("stats", "--json")).output)
    assert (found["all"]["jobs"], found["all"]["published"], found["all"]["rate"]) == (4, 3, 0.75)
    kinds = {row["name"]: row for row in found["type"]}
    assert kinds["instruct"] == {
        "name": "instruct",
        "jobs": 3,
        "published": 2,
        "rate": pytest.approx(2 / 3),
        "mean_hours": pytest.approx(3.0),
        "mean_gain": pytest.approx(0.2),
    }
    assert kinds["dpo"]["mean_gain"] is None
    assert {row["name"] for row in found["family"]} >= {"llama"}
    shown = (await run("stats")).output
    assert max(map(len, shown.splitlines())) <= 80
    row = next(line for line in shown.splitlines() if line.startswith("instruct"))
    assert row.split() == ["instruct", "3", "2", "67%", "3", "h", "00", "min", "+20.0%"]


async def test_of_several_attempts_the_best_model_that_was_left_counts(harness: JobsHarness) -> None:
    async def worse(trainer: Trainer) -> None:
        trainer.save(0.9)
        trainer.end(RunEnd.OOM, best=HeldOutScore(value=0.9, step=5), steps=5)

    async def nothing(trainer: Trainer) -> None:
        trainer.end(RunEnd.OOM, best=HeldOutScore(value=0.1, step=5), steps=1)

    harness.backend.scripts, harness.backend.default = [worse, nothing], write_log
    job = await harness.start()
    await harness.over_within(job)
    rows = await harness.attempts(job)
    picked = [views.training_result(rows[:count]) for count in range(len(rows) + 1)]
    assert picked[0] is None
    assert [result.attempt for result in picked[1:] if result] == [1, 1, 1]


async def test_logs_show_the_last_lines_and_follow_to_the_end(run: Run, done: int) -> None:
    assert (await run("logs", "1", "-n", "2")).output == "line 98\nline 99\n"
    followed = await asyncio.wait_for(run("logs", "1", "-f", "-n", "1"), 60)
    assert followed.output == "line 99\n"
    piece = json.loads((await run("logs", "1", "-n", "1", "--json")).output)
    assert (piece["attempt"], piece["text"], piece["ended"]) == (1, "line 99\n", True)


async def test_an_attempt_can_be_run_again_by_hand_in_a_folder_of_its_own(
    run: Run, done: int, harness: JobsHarness
) -> None:
    script = (await run("replay", "1")).output
    assert "-m trainer.text --run" in script
    found = json.loads((await run("replay", "1", "--json")).output)
    spec = RunSpec.from_json(found["run_json"])
    assert found["folder"].endswith("/jobs/1/replay_1")
    written = (spec.work_dir, spec.submission_dir, spec.progress_path, spec.result_path, spec.plan_path)
    assert all(str(path).startswith(found["folder"]) for path in written)
    assert found["environment"]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert found["missing"] == []
    Path(spec.data_path).unlink()
    assert f"# MISSING: {spec.data_path}" in (await run("replay", "1")).output
    orders = Path(spec.plan_path).parents[1] / "orders/attempt_1.plan.json"
    orders.write_text('{"version": 1}')
    refused = await run("replay", "1")
    assert "plan of version 1" in str(refused.exception)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("cancel", "1"), "no daemon runs on"),
        (("retry", "1"), "no daemon runs on"),
        (("show", "nope"), "no job"),
        (("logs", "nope"), "no job"),
        (("replay", "nope"), "no job"),
        (("logs", "1", "--attempt", "7"), "no attempt 7"),
    ],
    ids=" ".join,
)
async def test_what_is_not_there_is_an_error(run: Run, done: int, words: tuple[str, ...], why: str) -> None:
    refused = await run(*words)
    assert refused.exit_code == 1
    assert why in str(refused.exception)


def test_a_long_trouble_is_wrapped_and_said_once_at_80_columns() -> None:
    trouble = "the hub says that too much was asked of it: " + "wait a little " * 12 + "and try again"
    paused = "the container is paused: `docker unpause` lets it go on " + "x " * 60 + "END"
    job = job_details(
        detail=trouble,
        live=LiveJob(1, "t1", "training", trouble=paused),
        attempts=[{**JOB["attempts"][0], "detail": trouble}],
        steps=[{**JOB["steps"][0], "detail": trouble}, {**JOB["steps"][0], "detail": "another trouble"}],
    )
    out = io.StringIO()
    console = Terminal(file=out, force_terminal=False, width=80)
    for page in job_pages(job, 0.0):
        console.print(page)
    text = " ".join(out.getvalue().split())
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert "the container is paused" in text
    assert "END" in text
    assert text.count("and try again") == 1
    assert "step fetch: another trouble" in text


def test_a_training_that_runs_is_shown_beside_its_plan_at_80_columns() -> None:
    figures = AttemptFigures(
        steps=420,
        tokens_s=5_612.0,
        samples_s=2.5,
        mfu=0.312,
        wait=0.012,
        efficiency=0.93,
        memory_bytes=61_200_000_000,
        memory_estimate_bytes=68_000_000_000,
        utilization=0.97,
        base=2.25,
        best=1.75,
        metric="eval_loss",
        lower_is_better=True,
        gain=0.2222,
    )
    losses = [3.0 - number / 20 for number in range(40)]
    attempt = {**JOB["attempts"][0], "figures": figures.model_dump(), "losses": losses}
    out = io.StringIO()
    console = Terminal(file=out, force_terminal=False, width=80)
    for page in job_pages(job_details(attempts=[attempt]), 0.0):
        console.print(page)
    text = " ".join(out.getvalue().split())
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert "so far eval_loss 2.2500 → 1.7500, +22.2%" in text
    assert "▂▁▁▁▁▁ 3 → 1.05" in text
    assert "5,612 tokens/s, 2.5 samples/s, MFU 31.2%, 93% of the planned speed, 1.2% waiting for data" in text
    assert "61.2 GB at most, 68.0 GB planned (90%)" in text
    assert "GPUs busy 97% of the time" in text


async def test_what_rules_did_to_a_job_is_in_its_json(harness: JobsHarness, run: Run, done: int) -> None:
    numbers = ({"micro": 8}, {"micro": 7}, ActionOutcome.APPLIED)
    await harness.store.write(add_action, NewAction("gpu-memory", done, 1, "batch", *numbers), 5.0)
    (action,) = json.loads((await run("show", str(done), "--json")).output)["actions"]
    assert (action["rule"], action["before"], action["after"]) == ("gpu-memory", {"micro": 8}, {"micro": 7})
    assert (action["outcome"], action["asked_at"]) == ("applied", "1970-01-01T00:00:05.000Z")


def test_what_rules_did_is_shown_at_80_columns() -> None:
    kept, undone, later = ActionOutcome.KEPT, ActionOutcome.UNDONE, ActionOutcome.NEXT_ATTEMPT
    rows = [
        ActionRow("gpu-memory", 1, 1, "batch", {"micro": 8}, {"micro": 7}, kept, "93 %", 1, 5.0),
        ActionRow("gpu-hot", 1, 1, "duty", {"duty": 1.0}, {"duty": 0.97}, undone),
        ActionRow("a-rule-of-my-own-with-a-long-name", 1, 2, "batch", {"micro": 1}, {}),
        ActionRow("gpu-memory", 1, 2, "batch", {"micro": 9}, {"micro": 6}, later),
    ]
    out = io.StringIO()
    console = Terminal(file=out, force_terminal=False, width=80)
    for page in job_pages(job_details(actions=rows), 0.0):
        console.print(page)
    text = " ".join(out.getvalue().split())
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert "gpu-memory 1 01-01 00:00:05 micro batch 8 → 7 kept" in text
    assert "duty 100% → 97% undone" in text
    assert "9 → 6 next attempt" in text
    assert "rule gpu-memory: 93 %" in text


COMPARED = """\
                         job 1            job 2
model                    model            model
profile                  a                b
tags                     ab               ab best
state                    published        training
held out                 2.0000 → 1.5000
gain                     +25.0%
loss                     █▁
steps                    400              80
took                     1 h 00 min
tokens/s                 5,000
GPU-hours                4.00             1.00
cost                     $10.00
optimizer.learning_rate  0.0001           0.0002
"""


def test_jobs_are_compared_in_one_table_at_80_columns() -> None:
    result = {"metric": "loss", "base": 2.0, "best": 1.5, "gain": 0.25}
    figures = AttemptFigures(steps=400, tokens_s=5000.0, **result)
    curve = {"step": [1, 400], "seconds": [0.0, 9.0], "value": [3.0, 1.0]}
    nothing: dict[str, list[float]] = {"step": [], "seconds": [], "value": []}
    first = {**JOB, "model": "org/model", "state": "done", "end_reason": "published", "took_s": 3600.0}
    first |= {"tags": ["ab"], "gpu_hours": 4.0, "cost": 10.0}
    second = {**first, "id": 2, "state": "training", "end_reason": None, "took_s": None, "cost": None}
    second |= {"tags": ["ab", "best"], "gpu_hours": 1.0}
    page = {
        "jobs": [
            {"job": first, "profile": "a", "figures": figures, "loss": curve, "held_out": nothing},
            {"job": second, "profile": "b", "figures": {"steps": 80}, "loss": nothing, "held_out": nothing},
        ],
        "plan": [{"name": "optimizer.learning_rate", "values": [0.0001, 0.0002]}],
    }
    out = io.StringIO()
    for part in comparison_pages(JobComparison.model_validate(page), 80):
        Terminal(file=out, width=80).print(part)
    shown = "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())
    assert shown == COMPARED


async def test_jobs_are_tagged_found_and_compared_without_a_daemon(
    run: Run, done: int, harness: JobsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DataDirLock, "acquire", lambda _: None)  # the harness stands for a daemon that is off
    shown = (await run("tag", str(done), "good", "ab", "--note", "the one to keep")).output
    assert shown == f"job {done}: ab, good; the one to keep\n"
    assert (await run("tag", str(done), "--remove", "ab")).output == f"job {done}: good; the one to keep\n"
    for words, count in ((("--tag", "good"), 1), (("--tag", "ab"), 0), (("-s", "TO KEEP"), 1)):
        assert len(json.loads((await run("list", *words, "--json")).output)) == count
    assert json.loads((await run("list", "--state", "failed", "--json")).output) == []
    compared = json.loads((await run("compare", str(done), "--json")).output)
    assert [one["job"]["tags"] for one in compared["jobs"]] == [["good"]]
    assert "a tag is 1 to 40 letters" in str((await run("tag", str(done), "two words")).exception)
