"""Replies that programs read: the operator's GET routes, and every reading command of the CLI.

One store, filled by the code itself at a time that stands still: three trainings in a pipeline with stand-ins
around it, offers with their decisions, a history of jobs, measurements, ranks and alerts.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from contextlib import chdir
from pathlib import Path
from typing import Any

#: Thursday, 2025-10-02, 00:00 UTC.
NOW = 1_759_363_200.0
DAY = 86_400.0
SETTINGS = {"GPUS": "4xH100", "POLICY": "h100x4", "PROFILE": "h100x4-strategy", "OPERATOR_TOKEN": "t" * 32}
TASK = "--gpus 4xH100 --cpu-cores 64 --memory 512GB --hours 3"
#: Of the operator's port. `JOB`, `OFFER`: each that is stored.
ROUTES = (
    "/status",
    "/overview",
    "/fleet",
    "/jobs",
    "/jobs?limit=2",
    "/jobs?open=true",
    "/jobs?q=llama",
    "/jobs/JOB",
    "/jobs/JOB/log",
    "/jobs/JOB/series",
    "/jobs/JOB/plan",
    "/jobs/JOB/files",
    "/jobs/no-such-job",
    "/offers",
    "/offers?accepted=false&limit=3",
    "/offers/OFFER",
    "/offers/no-such-offer",
    "/alerts",
    "/alerts?open=true",
    "/samples",
    "/samples/history?hours=72",
    *(f"/report?period={one}&at={NOW - DAY}" for one in ("daily", "weekly", "monthly")),
    "/report?period=hourly",
    "/config",
    "/config/alerts/alerts",
    "/config/profiles/none",
    "/config/profiles/PROFILE",
    "/config/policies/POLICY",
)
#: Of the CLI, each as text and as JSON where it has `--json`.
COMMANDS = (
    "config show",
    "config env",
    "chain status",
    "fleet show",
    "events -n 1000",
    "events --alerts",
    "events --kind job_*",
    "jobs list -n 50",
    "jobs list --open",
    "jobs stats --days 365",
    "jobs show JOB",
    "jobs show 999",
    "jobs logs JOB",
    "jobs replay JOB",
    "offers list",
    "offers list --accepted",
    "offers list --refused",
    "offers show OFFER",
    "offers explain OFFER",
    "alerts list",
    "alerts list --all",
    "alerts check",
    "alerts test gpu-hot 91",
    *(f"report {one} --at 2025-10-01" for one in ("daily", "weekly", "monthly")),
    "report daily --at 2025-10-01 --backtest",
    "report daily --at 2025-10-01 --markdown",
    "report daily --at 2025-10-01 --html",
    "profile list",
    "profile check",
    "profile schema",
    "profile schema --markdown",
    "profile check PROFILE",
    "profile show PROFILE",
    "profile show PROFILE --defaults",
    "profile show PROFILE --task grpo --model meta-llama/Llama-3.1-8B",
    "profile explain PROFILE",
    "profile explain PROFILE --task dpo --model Qwen/Qwen2.5-32B",
    "profile diff base PROFILE",
    "policy list",
    "policy check",
    "policy schema",
    "policy schema --markdown",
    "policy check POLICY",
    "policy show POLICY",
    "policy diff base POLICY",
    "policy backtest",
    "policy backtest --policy POLICY --fleet 8xH100",
    "policy backtest --set rules.hours.InstructTextTask=12",
    "policy backtest --offer OFFER",
    "policy generate --days 1",
    *(
        f"plan {TASK} --model meta-llama/Llama-3.1-8B --task-type {kind} --rows 20000 --profile PROFILE"
        for kind in ("instruct", "dpo", "grpo", "chat")
    ),
    f"plan {TASK} --model black-forest-labs/FLUX.1-dev --task-type image --rows 20 --profile PROFILE",
    f"plan {TASK} --model no/such --task-type instruct",
    "models list",
    "models prune --dry-run",
    "submission hash jobs/1",
    "submission check jobs/1 --base tiny/llama --task-type instruct",
    "tournament calendar --offline",
    "tournament field show",
)


async def fill_jobs(data: Path) -> None:
    """Run one training that is published, one that runs out of memory first, and one that fails."""
    from core.runs.run_files import HeldOutScore, RunEnd
    from tests.miner.jobs.harness import Trainer, ending, open_harness

    async def whole(trainer: Trainer) -> None:
        log = Path(trainer.run.progress_path).with_name("log")
        log.write_text("".join(f"line {number}\n" for number in range(60)))
        trainer.stage("load")
        for step in range(1, 31):
            trainer.step(step, 30, 2.0 - step / 30)
        trainer.save(0.5, 30)
        base, best = HeldOutScore(value=2.25, step=0), HeldOutScore(value=1.75, step=25)
        trainer.end(base=base, best=best, steps=30, seconds=600, tokens_s=12_345.0, memory_bytes=61 * 10**9)

    async with open_harness(data) as harness:
        for number, scripts in enumerate(
            ([], [ending(RunEnd.OOM, "CUDA out of memory", "train")], [ending(RunEnd.BAD_DATA, "no rows")])
        ):
            harness.backend.scripts, harness.backend.default = scripts, whole
            job = await harness.start(task_id=f"t{number}", name=f"repo-{number}")
            await harness.over_within(job)


def fill_history(data: Path) -> None:
    """Add offers with their decisions, jobs that have ended, and what was measured meanwhile."""
    from core.domain.decisions import ExpectedValue
    from core.domain.job_states import EndReason, JobState
    from core.domain.tasks import TaskType
    from miner.api.alerts import Severity
    from miner.observe.alerts import AlertSubject
    from miner.store import alerts, database, ranks
    from tests.miner import history
    from tests.miner.offers import builders, filled

    worth = ExpectedValue(10.0, 0.9, 0.2, 0.1, 1.5, 8.0)
    policy = builders.policy("h100x4")
    with filled.store(data) as db:
        several: tuple[dict[str, Any], ...] = (
            {},
            {"hours_to_complete": 12.0},
            {"task_type": TaskType.DPO, "model": "Qwen/Qwen2.5-32B-Instruct"},
            {"task_type": TaskType.GRPO, "model_params_count": 10**12},
            {"task_type": TaskType.IMAGE, "model": "rayonlabs/FLUX.1-dev", "ds_size": 20},
        )
        for number, changes in enumerate(several):
            asked, at = builders.offer(task_id=f"offer-{number}", **changes), builders.NOON + 60 * number
            filled.answer(db, asked, at, builders.decided(asked, policy, now=at))
        filled.job(db, builders.offer(task_id="offer-0"))
        filled.job(db, builders.offer(task_id="offer-2"), state=JobState.FAILED, reason=EndReason.OOM)
        filled.lapse(db, "offer-4")
        for number in range(12):
            kind, done = list(TaskType)[number % 4], number % 5 != 3
            history.add_job(
                db,
                f"past-{number}",
                NOW - number * DAY / 2 - 600,
                state="done" if done else "failed",
                reason="published" if done else "oom",
                took=1 + number % 3,
                task_type=kind,
                model=("org/Llama-3.1-8B", "org/Qwen2.5-3B")[number % 2],
                params=(8, 3)[number % 2] * 10**9,
                value=worth,
                gain=0.1 + number / 100 if done else None,
                target_missed=number % 4 == 0,
            )
        for hour in range(48):
            for gpu in ("0", "1"):
                history.add_rollup(
                    db, NOW - 3600 * hour, gpu, busy=(hour % 4) / 4, utilization=0.5 + hour / 100
                )
            ranks.record_rank(db, history.rank_row(NOW - 3600 * hour, 5 + hour % 3))
        for rule in ("gpu-hot", "gpu-idle"):
            alert = alerts.NewAlert(rule, AlertSubject.parse("gpu:0"), Severity.WARNING, "above 85 °C", 91.0)
            alerts.record_alert(db, alert, NOW - 900, notify=True)
        alerts.resolve_alert(db, "gpu-idle", AlertSubject.parse("gpu:0"), "", NOW - 300)
    assert database.schema_version(data / database.FILE_NAME)


def with_names(template: str, names: dict[str, list[str]]) -> list[str]:
    """Return the words with each name in place of its kind."""
    for kind, found in names.items():
        if kind in template:
            return [template.replace(kind, name) for name in found]
    return [template]


async def ask_routes(folder: Path, names: dict[str, list[str]]) -> dict[str, Any]:
    """Ask a daemon over the store; first a validator has offered and started tasks there."""
    from random import Random

    from core.domain.tasks import OFFERED_TASKS
    from miner.dev.samples import sample_task
    from miner.http.apps import operator_app
    from tests.miner.http.daemon_in_process import open_daemon

    found: dict[str, Any] = {}
    async with open_daemon(folder, **SETTINGS) as running:
        for kind in OFFERED_TASKS:
            task = sample_task(kind, Random(f"goldens {kind}"))  # noqa: S311 - repeatable on purpose
            for call in (running.offer, running.start):
                reply = await call(task)
                found[f"{call.__name__} {kind}"] = {"status": reply.status_code, "body": reply.json()}
        ids = (
            running.rows("SELECT id FROM jobs WHERE task_id NOT LIKE 'past-%'"),
            running.rows("SELECT id FROM offers"),
        )
        names |= {
            key: [str(row["id"]) for row in rows] for key, rows in zip(("JOB", "OFFER"), ids, strict=True)
        }
        for route in (one for template in ROUTES for one in with_names(template, names)):
            reply = await running.operator.get(route)
            found[f"GET {route}"] = {"status": reply.status_code, "body": reply.json()}
        page = (await running.operator.get("/metrics")).text
        found["GET /metrics"] = sorted(line for line in page.splitlines() if line.startswith("# "))
        found |= {
            f"schema of {path}": one for path, one in operator_app(running.daemon).openapi()["paths"].items()
        }
    return found


def surface(command: Any, name: str = "god-miner") -> dict[str, Any]:
    """Describe each command: its arguments and options, and what its help says."""
    found = {
        name: {
            "help": command.help,
            "parameters": [
                {"names": [*one.opts, *one.secondary_opts], "help": getattr(one, "help", None)}
                | {"metavar": one.metavar, "default": repr(one.default), "required": one.required}
                for one in command.params
            ],
        }
    }
    for word, one in getattr(command, "commands", {}).items():
        found |= surface(one, f"{name} {word}")
    return found


def ask_commands(folder: Path, names: dict[str, list[str]]) -> dict[str, Any]:
    """Run each command beside the store, without a daemon."""
    import typer
    from typer.testing import CliRunner

    from miner.__main__ import app

    os.environ |= SETTINGS | {
        "DATA_DIR": str(folder / "data"),
        "NODES_FILE": str(folder / "nodes.json"),
        "CHAIN": "file",
        "COLUMNS": "300",
        "MIN_FREE_DISK_BYTES": "0",
    }
    commands = surface(typer.main.get_command(app))
    found: dict[str, Any] = dict(commands)
    with chdir(folder / "data"):
        for words in (one for template in COMMANDS for one in with_names(template, names)):
            known = max((one for one in commands if f"god-miner {words} ".startswith(f"{one} ")), key=len)
            has_json = any("--json" in one["names"] for one in commands[known]["parameters"])
            for line in (words, f"{words} --json") if has_json else (words,):
                done = CliRunner().invoke(app, line.split())
                case: dict[str, Any] = {"code": done.exit_code, "error": done.stderr}
                if done.exception is not None and not isinstance(done.exception, SystemExit):
                    case["exception"] = repr(done.exception)
                try:
                    case["body"] = json.loads(done.stdout)
                except ValueError:
                    case["lines"] = [" ".join(line.split()) for line in done.stdout.splitlines()]
                found[line] = case
    return found


def read_all(folder: Path, names: dict[str, list[str]]) -> dict[str, Any]:
    """Return the answers by route and by command line."""
    # Before the first import of what takes it as a default.
    time.time, time.time_ns = (lambda: NOW), (lambda: int(NOW * 10**9))
    asyncio.run(fill_jobs(folder / "data"))
    fill_history(folder / "data")
    routes = asyncio.run(ask_routes(folder, names))
    return routes | ask_commands(folder, names)
