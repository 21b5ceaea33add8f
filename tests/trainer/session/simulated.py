"""A training whose time passes at will: steps, evaluations and saves take what the test says."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.domain.evaluation import RewardScore
from core.planning.plan import StepsPlan, TrainingPlan
from core.runs.progress import ProgressEvent, parse_events
from core.runs.run_files import HeldOutScore, RunControl
from core.submission.folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tests.core.builders import plan
from trainer.handoff import TrainingOutcome
from trainer.session.clock import RunClock
from trainer.session.control import MicroChange
from trainer.session.learning_rate import Prober
from trainer.session.progress_log import ProgressLog
from trainer.session.ranks import Communicator
from trainer.session.session import Session
from trainer.session.submission import Submission

START = 1_000_000.0


@dataclass
class Time:
    now: float = START

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def plan_of(total: int, wanted: int, step_s: float, eval_rows: int = 100, **changes: Any) -> TrainingPlan:
    whole = plan()
    time = whole.time.model_copy(update={"step_s": step_s})
    steps = StepsPlan(
        epochs=1,
        per_epoch=wanted,
        total=total,
        wanted=wanted,
        eval_every=max(total // 10, 1),
        save_every=max(total // 10, 1),
        eval_rows=eval_rows,
    )
    return whole.model_copy(update={"steps": steps, "time": time, **changes})


def safetensors(values: int = 4, name: str = "weight") -> bytes:
    """A whole file with one tensor."""
    entry = {name: {"dtype": "F32", "shape": [values], "data_offsets": [0, 4 * values]}}
    head = json.dumps(entry).encode()
    return struct.pack("<Q", len(head)) + head + bytes(4 * values)


def write_adapter(folder: Path, content: bytes | None = None) -> None:
    (folder / ADAPTER_WEIGHTS).write_bytes(content or safetensors())
    config = {"peft_type": "LORA", "r": 8, "base_model_name_or_path": "/cache/models/x"}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config), encoding="utf-8")


@dataclass
class FakeScorer:
    """Scores along a curve over the steps."""

    run: Simulation
    curve: Callable[[int], float]
    metric: str = "eval_loss"
    lower_is_better: bool = True
    rewarded: RewardScore | None = None
    pass_seconds: float = 0.0

    def score_base(self, budget_s: float, untouched: bool) -> float:
        self.pass_seconds = min(self.run.eval_s, budget_s)
        self.run.time.pass_by(self.pass_seconds + self.run.warm_s)
        return self.curve(0)

    def score(self) -> float:
        run = self.run
        run.time.pass_by(run.eval_s)
        run.scored.append(run.session.step)
        return self.curve(run.session.step)


@dataclass
class Simulation:
    folder: Path
    plan: TrainingPlan
    #: From the start to `end_by`.
    seconds: float
    #: A step's duration, by its number.
    step_s: Callable[[int], float]
    eval_s: float = 1.0
    #: What the base's evaluation takes beyond that.
    warm_s: float = 0.0
    submit_s: float = 0.5
    save_s: float = 1.0
    curve: Callable[[int], float] | None = lambda step: 1 / (1 + step)
    prober: Prober | None = None
    stop_at: int | None = None
    #: Requests of the control file, by the step after which they are there.
    asked: dict[int, RunControl] = field(default_factory=dict)
    #: The largest micro-batch that the engine takes.
    largest: int = 64
    time: Time = field(default_factory=Time)
    scored: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    #: When each submission was complete.
    submitted: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.scorer = FakeScorer(self, self.curve) if self.curve else None
        self.session = Session(
            plan=self.plan,
            clock=RunClock(self.plan, end_by=START + self.seconds, now=self.time),
            submission=Submission(self.folder / "submission", "org/model", self.folder / "base"),
            progress=ProgressLog(self.folder / "progress.jsonl"),
            ranks=Communicator(),
            host=self,
            stop_requested=lambda: self.stop_at is not None and self.session.step >= self.stop_at,
            take_control=lambda: self.asked.pop(self.session.step, None),
            sleep=self.time.pass_by,
        )

    def write(self, folder: Path | None) -> None:
        assert folder is not None
        self.time.pass_by(self.submit_s)
        write_adapter(folder)
        self.submitted.append(self.time.now)

    def regroup(self, micro: int | None) -> MicroChange:
        planned = self.plan.batch.micro
        if micro is not None and micro > self.largest:
            return MicroChange(self.session.controls.micro, f"{micro} is too large")
        return MicroChange(planned if micro is None else micro)

    @contextmanager
    def averaged(self) -> Iterator[bool]:
        yield False

    def run(self, most: int = 1_000_000) -> TrainingOutcome:
        session = self.session
        session.begin()
        while session.stop is None and session.step < most:
            seconds = self.step_s(session.step)
            self.time.pass_by(seconds)
            self.rates.append(session.rate)
            session.optimizer_stepped()
            orders = session.stepped(seconds)
            if orders.save and session.stop is None:
                self.time.pass_by(self.save_s)
                self.saved.append(session.step)
                session.checkpointed(self.folder / f"checkpoint-{session.step}", self.save_s)
        return session.finish()

    @property
    def events(self) -> list[ProgressEvent]:
        data = (self.folder / "progress.jsonl").read_bytes()
        return [line.event for line in parse_events(data) if line.event is not None]

    @property
    def left(self) -> float:
        return START + self.seconds - self.time.now


def scored(value: float, step: int = 1) -> HeldOutScore:
    return HeldOutScore(value=value, step=step)
