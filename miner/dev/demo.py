"""One real job from offer to published model, on the embedded defaults: no GPU, Docker, wallet, chain or hub.

A development validator offers a little task, starts it, and asks for the submission until there is one; the
daemon fetches model and rows from a site on loopback, trains in a process or on a cluster, and publishes
into a folder. What the validator gets as an answer is then checked against what is there.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from core.domain.choices import Engine
from core.domain.tasks import TaskType
from core.planning.plan import TrainingPlan
from core.runs.run_files import PLAN_FILE, RESULT_FILE, RunResult
from core.submission.digests import model_hash
from miner.backends.environment import SOURCE_ROOT, training_interpreter
from miner.backends.registry import NoBackend
from miner.backends.trial import BEING_TRIED, TRIAL_FAILED
from miner.dev import demo_inputs, stack
from miner.dev.demo_inputs import LoopbackSite
from miner.dev.samples import SampleTask
from miner.dev.validator import ValidatorClient, ValidatorOutcome
from miner.jobs.backend_ability import BACKEND_NOT_FOUND_YET
from miner.settings import BackendKind, load_settings

#: The validator grants half an hour; the plan needs half a minute of it.
TASK_HOURS = 0.5
PATIENCE_S = 300.0
_POLL_S = 0.3

#: Called with a step of the demo and a line about it.
OnDemoStep = Callable[[str, str], None]


@dataclass
class DemoResult:
    #: Why nothing was trained, or what went wrong.
    trouble: str | None = None
    model: str = demo_inputs.MODEL_ID
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

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "held": self.held}

    @property
    def held(self) -> bool:
        fell = self.base is not None and self.best is not None and self.best < self.base
        return self.trouble is None and fell


@dataclass(frozen=True)
class RunningDemo:
    """The result, and the daemon if it still runs."""

    result: DemoResult
    ground: stack.DevStack | None = None


def run_demo(
    folder: Path, tell: OnDemoStep = lambda _step, _line: None, backend: BackendKind = BackendKind.PROCESS
) -> DemoResult:
    """Run the demo in `folder`. It needs a training environment."""
    with running_demo(folder, tell, backend) as demo:
        return demo.result


@contextmanager
def running_demo(
    folder: Path, tell: OnDemoStep, backend: BackendKind = BackendKind.PROCESS
) -> Iterator[RunningDemo]:
    """Run the demo in `folder`; its daemon goes on until the end of the `with`."""
    settings = load_settings(env_file=None)
    python = settings.trainer_python
    with ExitStack() as parts:
        try:
            python = training_interpreter(settings).path
            demo = _run_with_daemon(folder, tell, python, backend, parts)
        except NoBackend as error:
            demo = RunningDemo(DemoResult(trouble=f"{error}.\n{_remedy(python)}"))
        yield demo


def _run_with_daemon(
    folder: Path, tell: OnDemoStep, python: Path, backend: BackendKind, parts: ExitStack
) -> RunningDemo:
    ground = stack.prepare_stack(folder)
    site = parts.enter_context(LoopbackSite())
    site.add_model(demo_inputs.MODEL_ID, demo_inputs.model_files())
    task = demo_task(site.add_file("/rows.json", demo_inputs.training_rows()))
    settings = demo_settings(site, folder, backend) | {"TRAINER_PYTHON": str(python)}
    child = stack.daemon_process(ground, settings)
    parts.enter_context(child)
    tell("daemon", f"answers after {child.start_s:.1f} s, keys and data in {folder}")
    result = asyncio.run(_play_validator(ground, task, tell, python))
    if result.trouble is not None:
        result.trouble += f"\nThe end of the daemon's log:\n{child.log_tail()}"
    return RunningDemo(result, ground)


def demo_settings(
    site: LoopbackSite, folder: Path, backend: BackendKind = BackendKind.PROCESS
) -> dict[str, str]:
    """Settings of the daemon. Each node of a cluster has one pretended GPU, and the operator's own variables,
    by its name, say which cluster it is."""
    own = f"{backend.upper()}_"
    cluster = {name: value for name, value in os.environ.items() if name.startswith(own)}
    return {
        **(cluster if backend.is_cluster else {}),
        "GPUS": "cpu",
        "PROFILE": "cpu-native",
        "POLICY": "everything-feasible",
        "BACKEND": backend,
        "HUB": f"local:{folder / 'hub'}",
        "HF_ENDPOINT": site.url,
        "ALLOW_PRIVATE_NETWORKS": "127.0.0.0/8",
        "MIN_FREE_DISK_BYTES": "0",
    }


def demo_task(url: str) -> SampleTask:
    return SampleTask(
        task_type=TaskType.INSTRUCT,
        task_id=str(uuid.uuid4()),
        model=demo_inputs.MODEL_ID,
        params=demo_inputs.model_params(),
        hours=TASK_HOURS,
        ds_size=None,
        expected_repo_name=str(uuid.uuid4()),
        data_url=url,
        dataset_type={"field_instruction": "instruct", "field_output": "output"},
    )


def _remedy(python: Path | None) -> str:
    """Return what mends a training environment that cannot train; one of the operator's is never removed."""
    if python is None:
        return "`make demo` makes an environment that can."
    environment = python.parent.parent
    if environment in (SOURCE_ROOT / ".venv-demo", SOURCE_ROOT / ".venv-training"):
        return f"Make it again: rm -rf {environment.name} && make demo"
    return "Install what is missing, or set TRAINER_PYTHON to another; `make demo` makes one of its own."


async def _play_validator(
    ground: stack.DevStack, task: SampleTask, tell: OnDemoStep, python: Path
) -> DemoResult:
    result, began = DemoResult(), time.monotonic()
    async with (
        ValidatorClient(ground.url, ground.keys.validator, ground.keys.miner.ss58_address) as validator,
        httpx.AsyncClient(
            base_url=ground.operator_url, timeout=60, headers=ground.operator_headers()
        ) as operator,
    ):
        try:
            missing = await wait_for_trial(operator)
        except stack.StackError as error:
            result.trouble = str(error)
            return result
        if missing is not None:
            raise NoBackend(f"{python} cannot train: {missing}")
        tell("backend", f"tried out after {time.monotonic() - began:.1f} s: it can train")
        for asked, wanted in (
            (validator.offer, ValidatorOutcome.ACCEPTED),
            (validator.start, ValidatorOutcome.START_NOTED),
        ):
            exchange = await asked(task)
            if exchange.conclusion.outcome is not wanted:
                result.trouble = f"{exchange.call}: {exchange.conclusion}"
                return result
            tell(exchange.call, exchange.conclusion.reason or str(exchange.conclusion))
        job = await _wait_for_job(operator, task.task_id, result, DemoNarrator(tell))
        result.seconds = time.monotonic() - began
        if job is None:
            return result
        asked_for = await validator.submission(task.task_id, task.expected_repo_name)
    _check_submission(result, job, asked_for.text, Path(ground.folder) / "hub")
    tell("submission", f"{result.submission}, {(result.model_hash or '')[:12]}…")
    return result


async def wait_for_trial(operator: httpx.AsyncClient) -> str | None:
    """Wait until the daemon has tried out what the demo trains with: what that lacks, or None. `StackError`
    when it could not be tried out."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        reply = await operator.get("/status")
        training = reply.raise_for_status().json()["training"]
        trouble, lacks = training["trouble"], training["lacks"].get(Engine.NATIVE)
        if trouble is None and lacks is None:
            return None
        seen = str(trouble or lacks)
        if trouble is None and seen.startswith(TRIAL_FAILED):
            raise stack.StackError(seen)
        if trouble is None and lacks != BEING_TRIED:
            return seen
        if training["backend"] is None and trouble not in (None, BACKEND_NOT_FOUND_YET.problem):
            raise stack.StackError(seen)
        if time.monotonic() >= deadline:
            raise stack.StackError(f"the trial did not finish within {PATIENCE_S:g} s: {seen}")
        await asyncio.sleep(_POLL_S)


async def _wait_for_job(
    operator: httpx.AsyncClient, task_id: str, result: DemoResult, narrator: DemoNarrator
) -> dict[str, Any] | None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        reply = await operator.get(f"/jobs/{task_id}")
        if reply.status_code == httpx.codes.SERVICE_UNAVAILABLE:  # the daemon has not chosen its backend yet
            await asyncio.sleep(_POLL_S)
            continue
        reply.raise_for_status()
        job: dict[str, Any] = reply.json()
        if job["state"] not in result.states:
            result.states.append(job["state"])
        narrator.see(job)
        if job["state"] == "done":
            return job
        if job["state"] in ("failed", "cancelled"):
            result.trouble = f"the job {job['state']}: {job['end_reason']}: {job['detail']}"
            return None
        await asyncio.sleep(_POLL_S)
    result.trouble = f"the job was not done within {PATIENCE_S:g} s"
    return None


class DemoNarrator:
    """Turn what `/jobs` shows of a job into one line per event."""

    def __init__(self, tell: OnDemoStep) -> None:
        self._tell = tell
        self._done: set[int] = set()
        self._stage = ""
        self._step = 0

    def see(self, job: Mapping[str, Any]) -> None:
        for number, step in enumerate(job["steps"]):
            # The record of an attempt follows the step that wrote its files.
            recorded = step["name"] != "write" or job["attempts"]
            if step["outcome"] == "ok" and recorded and number not in self._done:
                self._done.add(number)
                self._finished(step["name"], job)
        live = job["live"] or {}
        if live.get("step") and live["step"] != self._step:
            self._step = live["step"]
            self._tell("train", _progress_line(live))
        elif live.get("stage") in ("data", "load") and live["stage"] != self._stage:
            self._stage = live["stage"]
            self._tell("train", {"data": "reads the rows", "load": "loads the model"}[self._stage])

    def _finished(self, name: str, job: Mapping[str, Any]) -> None:
        match name:
            case "fetch":
                self._tell("fetch", f"{job['model']} and its rows")
            case "write":
                self._tell("plan", _plan_line(Path(job["attempts"][-1]["folder"]) / PLAN_FILE))
            case "launch":
                self._tell("train", "started")
            case "publish early":
                self._tell("publish", "the best model so far")
            case "publish":
                self._tell("publish", "the best model")


def _plan_line(path: Path) -> str:
    plan = TrainingPlan.from_json(path.read_bytes())
    how = f"LoRA of rank {plan.adapter.rank}" if plan.adapter else "all weights"
    return (
        f"{how}, {plan.steps.total} steps of {plan.batch.micro} rows, rate {plan.optimizer.learning_rate:g}"
    )


def _progress_line(live: Mapping[str, Any]) -> str:
    """Return step, loss and speed, as far as known."""
    said = [f"step {live['step']:>2}" + (f" of {live['steps']}" if live.get("steps") else "")]
    if live.get("loss") is not None:
        said.append(f"loss {live['loss']:.3f}")
    if live.get("best_score") is not None:
        said.append(f"held out {live['best_score']:.3f}")
    if live.get("tokens_s") is not None:
        said.append(f"{live['tokens_s']:,.0f} tokens/s")
    return ", ".join(said)


def _check_submission(result: DemoResult, job: dict[str, Any], reply: str, hub: Path) -> None:
    """Return what the trainer measured, and compare the validator's submission with the hub's files."""
    attempt = job["attempts"][-1]
    trained = RunResult.model_validate_json((Path(attempt["folder"]) / RESULT_FILE).read_bytes())
    result.steps = trained.steps
    result.base = trained.base.value if trained.base else None
    result.best = trained.best.value if trained.best else None
    answer = json.loads(reply)
    result.submission, result.model_hash = answer["repo"], answer["model_hash"]
    place = hub / answer["repo"]
    result.folder = str(place)
    found = model_hash({str(path.relative_to(place)): _fingerprint(path) for path in _files(place)})
    if found != answer["model_hash"]:
        result.trouble = f"{place} has the hash {found}, and the validator got {answer['model_hash']}"


def _files(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if path.is_file()]


def _fingerprint(path: Path) -> tuple[int, str]:
    content = path.read_bytes()
    return len(content), hashlib.sha256(content).hexdigest()
