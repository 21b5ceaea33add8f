"""The course of a text run: rows, plan, configuration, training; again with a remedy where one helps."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from core.choices import EvalMetric
from core.plan import TrainingPlan
from core.recipes.render import render
from core.recipes.run import Rendered, RunInputs
from core.run_files import RunEnd, RunResult, RunSpec
from trainer.callbacks.report import Report
from trainer.rewards import MODULE
from trainer.sheet import (
    SHEET_VARIABLE,
    Ask,
    Failure,
    Outcome,
    Prepared,
    Sheet,
    read_record,
)
from trainer.wrapper.checkpoints import newest_checkpoint
from trainer.wrapper.environment import child_environment
from trainer.wrapper.processes import Child
from trainer.wrapper.remedy import Failed, Remedy, remedy_for
from trainer.wrapper.result import conclude
from trainer.wrapper.signals import StopRequest
from trainer.wrapper.supervise import Limits, Running, supervise
from trainer.wrapper.verdict import Attempt, judged

PLUGIN = "trainer.axolotl_plugin.GodMinerPlugin"
#: From `end_by` to being ended from outside: what a forecast may have been off by, within the reserve.
OVERRUN_S, OVERRUN_SHARE = 60.0, 0.4
#: No step, evaluation or save takes as long as these many of the plan's, and none is given up sooner.
HANG_FACTOR, HANG_LEAST_S = 30.0, 1200.0
#: How many times the planned time to the first step may pass without a sign of our plugin.
MARKER_FACTOR, MARKER_LEAST_S = 3.0, 300.0


@dataclass
class TextCourse:
    run: RunSpec
    stop: StopRequest
    #: Whether a failed training is tried again here; with a daemon that is the daemon's to decide.
    retries: bool
    #: How programs are started.
    start: Callable[[Sequence[str], Mapping[str, str], Path], Running] = Child
    launches: int = 0
    _started: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.work = Path(self.run.work_dir)
        self.report = Report(Path(self.run.progress_path))

    def follow(self) -> RunResult:
        """To the end, whatever it is."""
        plan: TrainingPlan | None = None
        prepared: Prepared | None = None
        resume = self.run.resume_from
        remedies: list[Remedy] = []
        while True:
            self.launches += 1
            self._started = time.time()
            if prepared is None:
                ready = self._prepared(plan)
                if isinstance(ready, Attempt):
                    return self._concluded(ready)
                prepared, plan = ready
            assert plan is not None
            attempt = self._trained(plan, prepared, resume)
            remedy = self._remedy(plan, attempt, remedies)
            if remedy is None:
                return self._concluded(attempt)
            remedies.append(remedy)
            self.report.note("remedy", str(remedy))
            if remedy.plan.sequence != plan.sequence or remedy.plan.steps.eval_rows != plan.steps.eval_rows:
                prepared = None
            plan = remedy.plan
            resume = self._begun_again(remedy)

    def _begun_again(self, remedy: Remedy) -> str | None:
        """Where the next launch goes on. Before one that begins anew everything is cleared away: engines keep
        the checkpoints with the highest numbers, which would be those of the launch before."""
        if remedy.resumes:
            return newest_checkpoint(self.output)
        shutil.rmtree(self.output, ignore_errors=True)
        return None

    @property
    def output(self) -> Path:
        return self.work / "output"

    @property
    def hard_end(self) -> float:
        room = max(self.run.deadline_at - self.run.end_by, 0.0)
        return self.run.end_by + min(OVERRUN_S, OVERRUN_SHARE * room)

    # — rows and plan

    def _prepared(self, plan: TrainingPlan | None) -> tuple[Prepared, TrainingPlan] | Attempt:
        """In a child: it needs the tokenizer, and where there is no plan yet the sight of the GPUs."""
        folder = self.work / f"data-{self.launches}"
        folder.mkdir(parents=True, exist_ok=True)
        self.report.stage("data", "rows are read and tokenised")
        given = self._plan_file(plan)
        ask = Ask(
            run=self.run,
            plan_path=str(given) if given else None,
            plan_out=str(folder / "plan.json"),
            folder=str(folder),
            prepared_out=str(folder / "prepared.json"),
            failure_out=str(folder / "failure.json"),
        )
        asked = folder / "ask.json"
        asked.write_text(ask.model_dump_json(indent=2), encoding="utf-8")
        command = (sys.executable, "-m", "trainer.prepare", str(asked))
        child = self.start(command, child_environment(self.work, {}), self.work)
        ended = supervise(child, Limits(hard_end=self.hard_end), self.stop)
        made = read_record(Prepared, Path(ask.prepared_out))
        if made is None or ended.verdict is not None:
            return judged(ended, None, [read_record(Failure, Path(ask.failure_out))], marked=True)
        followed = TrainingPlan.from_json(Path(ask.plan_out).read_bytes())
        if not followed.verdict.feasible:
            return Attempt(RunEnd.INFEASIBLE, followed.verdict.reason)
        return made, followed

    def _plan_file(self, plan: TrainingPlan | None) -> Path | None:
        if plan is None:
            return Path(self.run.plan_path) if self.run.plan_path else None
        path = self.work / f"data-{self.launches}" / "asked-plan.json"
        path.write_text(plan.to_json(), encoding="utf-8")
        return path

    # — the engine

    def _trained(self, plan: TrainingPlan, prepared: Prepared, resume: str | None) -> Attempt:
        launch = self.work / f"launch-{self.launches}"
        launch.mkdir(parents=True, exist_ok=True)
        plan_path = launch / "plan.json"
        plan_path.write_text(plan.to_json(), encoding="utf-8")
        rendered = render(_for_engine(plan), self._inputs(plan, prepared, plan_path, resume))
        for name, text in rendered.files.items():
            (launch / name).write_text(text, encoding="utf-8")
        sheet = Sheet(
            run=self.run,
            plan_path=str(plan_path),
            launch_dir=str(launch),
            prepared=prepared,
            wrapper_pid=os.getpid(),
            resume_from=resume,
        )
        child = self._launch(rendered, prepared, sheet)
        ended = supervise(child, self._limits(plan, sheet), self.stop)
        failures = [read_record(Failure, sheet.failure_path(rank)) for rank in range(plan.launch.processes)]
        return judged(ended, read_record(Outcome, sheet.outcome_path), failures, sheet.marker_path.exists())

    def _launch(self, rendered: Rendered, prepared: Prepared, sheet: Sheet) -> Running:
        rewards = (prepared.rewards_dir,) if prepared.rewards_dir else ()
        more = {**rendered.env, SHEET_VARIABLE: str(sheet.write())}
        (Path(sheet.launch_dir) / "command.txt").write_text(shlex.join(rendered.command), encoding="utf-8")
        for note in rendered.notes:
            self.report.note("engine", note)
        return self.start(rendered.command, child_environment(self.work, more, rewards), self.work)

    def _inputs(
        self, plan: TrainingPlan, prepared: Prepared, plan_path: Path, resume: str | None
    ) -> RunInputs:
        own = plan.steps.eval_metric is EvalMetric.LOSS
        return RunInputs(
            model_path=self.run.model_path,
            train_path=prepared.train_path,
            eval_path=prepared.eval_path if own else None,
            output_dir=str(self.output),
            work_dir=str(self.work),
            config_dir=str(plan_path.parent),
            plan_path=str(plan_path),
            dataset=self.run.dataset,
            era=self.run.era,
            pad_token=prepared.pad_token,
            resume_from=resume,
            plugins=(PLUGIN,),
            reward_module=MODULE,
            port=plan.launch.port or free_port(),
            python=sys.executable,
        )

    def _limits(self, plan: TrainingPlan, sheet: Sheet) -> Limits:
        names = [phase.name for phase in plan.time.phases]
        before = plan.time.phases[: names.index("train") if "train" in names else 0]
        opening = sum(phase.seconds for phase in before if phase.name != "download")
        longest = max(plan.time.step_s, plan.time["evaluate"], plan.time["save"], opening / HANG_FACTOR)
        return Limits(
            hard_end=self.hard_end,
            begun=sheet.begun_path,
            marker=sheet.marker_path,
            marker_s=max(MARKER_FACTOR * opening, MARKER_LEAST_S),
            signs=(Path(self.run.progress_path), sheet.marker_path, sheet.begun_path),
            hang_s=max(HANG_FACTOR * longest, HANG_LEAST_S),
        )

    # — what follows

    def _remedy(self, plan: TrainingPlan, attempt: Attempt, earlier: list[Remedy]) -> Remedy | None:
        if not self.retries or (attempt.outcome is not None and attempt.end is not RunEnd.NAN):
            return None
        failed = Failed(
            end=attempt.end,
            moment=attempt.moment,
            start_s=min(time.time() - self._started, plan.time.total_s),
            left_s=self.run.end_by - time.time(),
            detail=f"{attempt.detail}\n{attempt.stack}",
        )
        return remedy_for(plan, failed, earlier)

    def _concluded(self, attempt: Attempt) -> RunResult:
        outcome = attempt.outcome
        return conclude(
            self.run,
            attempt.end,
            attempt.detail,
            best=outcome.best if outcome else None,
            base=outcome.base if outcome else None,
            steps=outcome.steps if outcome else 0,
            moment=attempt.moment,
        )


def _for_engine(plan: TrainingPlan) -> TrainingPlan:
    """The plan as the engine is to see it: where the session judges, the engine holds nothing out by
    itself."""
    if plan.steps.eval_metric is EvalMetric.LOSS:
        return plan
    update = {"eval_rows": 0, "load_best": False, "early_stopping_patience": None}
    return plan.model_copy(update={"steps": plan.steps.model_copy(update=update)})


def free_port() -> int:
    """Free now; accelerate takes it a few seconds later."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
