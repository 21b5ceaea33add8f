"""One real job from offer to published model, on the embedded defaults: no GPU, Docker, wallet, chain or hub.

A development validator offers a little task, starts it, and asks for the submission until there is one; the
daemon fetches model and rows from a site on loopback, trains in a process of its own, and publishes into a
folder. What the validator is told is then checked against what lies there.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from core.run_files import RESULT_FILE, RunResult
from core.submission.model_hash import model_hash
from core.tasks import TaskType
from miner.dev import little, stack
from miner.dev.client import ValidatorClient
from miner.dev.reading import Outcome
from miner.dev.samples import SampleTask
from miner.dev.site import Site
from miner.engines.choose import NoEngine, training_interpreter
from miner.settings import load_settings

#: Half an hour is what the validator grants; the plan needs half a minute of it.
HOURS = 0.5
PATIENCE_S = 300.0
_POLL_S = 0.3

#: The job's state, and a line about it.
OnChange = Callable[[dict[str, Any]], None]


@dataclass
class JobResult:
    #: Why nothing can be trained here; then nothing else is known.
    skipped: str | None = None
    trouble: str | None = None
    model: str = little.MODEL_ID
    seconds: float = 0.0
    #: Held-out loss of the base and of what was published.
    base: float | None = None
    best: float | None = None
    steps: int = 0
    submission: str | None = None
    model_hash: str | None = None
    #: Where the model lies.
    folder: str | None = None
    states: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "held": self.held}

    @property
    def held(self) -> bool:
        fell = self.base is not None and self.best is not None and self.best < self.base
        return self.skipped is not None or (self.trouble is None and fell)


def run_job(folder: Path, on_change: OnChange = lambda _: None) -> JobResult:
    """Everything of it lies in `folder`."""
    try:
        python = training_interpreter(load_settings(env_file=None)).path
    except NoEngine as error:
        return JobResult(skipped=str(error))
    ground = stack.prepare(folder)
    with Site() as site:
        site.add_model(little.MODEL_ID, little.model_files())
        task = _task(site.add_file("/rows.json", little.rows()))
        with stack.daemon(ground, _settings(site, folder) | {"TRAINER_PYTHON": str(python)}):
            return asyncio.run(_follow(ground, task, on_change))


def _settings(site: Site, folder: Path) -> dict[str, str]:
    return {
        "GPUS": "cpu",
        "PROFILE": "cpu-native",
        "POLICY": "everything-feasible",
        "ENGINE": "process",
        "HUB": f"local:{folder / 'hub'}",
        "HF_ENDPOINT": site.url,
        "ALLOW_PRIVATE_NETWORKS": "127.0.0.0/8",
        "MIN_FREE_DISK_BYTES": "0",
    }


def _task(url: str) -> SampleTask:
    return SampleTask(
        task_type=TaskType.INSTRUCT,
        task_id=str(uuid.uuid4()),
        model=little.MODEL_ID,
        params=little.params(),
        hours=HOURS,
        ds_size=None,
        expected_repo_name=str(uuid.uuid4()),
        data_url=url,
        dataset_type={"field_instruction": "instruct", "field_output": "output"},
    )


async def _follow(ground: stack.Stack, task: SampleTask, on_change: OnChange) -> JobResult:
    result, began = JobResult(), time.monotonic()
    async with (
        ValidatorClient(ground.url, ground.keys.validator, ground.keys.miner.ss58_address) as validator,
        httpx.AsyncClient(base_url=ground.operator_url, timeout=10) as operator,
    ):
        for asked, wanted in ((validator.offer, Outcome.ACCEPTED), (validator.start, Outcome.START_NOTED)):
            exchange = await asked(task)
            if exchange.conclusion.outcome is not wanted:
                result.trouble = f"{exchange.call}: {exchange.conclusion}"
                return result
        job = await _to_its_end(operator, task.task_id, result, on_change)
        result.seconds = time.monotonic() - began
        if job is None:
            return result
        asked_for = await validator.submission(task.task_id, task.expected_repo_name)
    _conclude(result, job, asked_for.text, Path(ground.folder) / "hub")
    return result


async def _to_its_end(
    operator: httpx.AsyncClient, task_id: str, result: JobResult, on_change: OnChange
) -> dict[str, Any] | None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        reply = await operator.get(f"/jobs/{task_id}")
        if reply.status_code == httpx.codes.SERVICE_UNAVAILABLE:  # the daemon is still looking for its engine
            await asyncio.sleep(_POLL_S)
            continue
        reply.raise_for_status()
        job: dict[str, Any] = reply.json()
        if job["state"] not in result.states:
            result.states.append(job["state"])
        on_change(job)
        if job["state"] == "done":
            return job
        if job["state"] in ("failed", "cancelled"):
            result.trouble = f"the job {job['state']}: {job['end_reason']}: {job['detail']}"
            return None
        await asyncio.sleep(_POLL_S)
    result.trouble = f"the job was not done within {PATIENCE_S:g} s"
    return None


def _conclude(result: JobResult, job: dict[str, Any], reply: str, hub: Path) -> None:
    """What the trainer measured, and whether what the validator was told is what lies in the hub."""
    attempt = job["attempts"][-1]
    trained = RunResult.model_validate_json((Path(attempt["folder"]) / RESULT_FILE).read_bytes())
    result.steps = trained.steps
    result.base = trained.base.value if trained.base else None
    result.best = trained.best.value if trained.best else None
    told = json.loads(reply)
    result.submission, result.model_hash = told["repo"], told["model_hash"]
    place = hub / told["repo"]
    result.folder = str(place)
    found = model_hash({str(path.relative_to(place)): _fingerprint(path) for path in _files(place)})
    if found != told["model_hash"]:
        result.trouble = f"{place} has the hash {found}, and the validator was told {told['model_hash']}"


def _files(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if path.is_file()]


def _fingerprint(path: Path) -> tuple[int, str]:
    content = path.read_bytes()
    return len(content), hashlib.sha256(content).hexdigest()
