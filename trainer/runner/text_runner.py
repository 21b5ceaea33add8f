"""Run a text task: rows, plan, configuration, training; again with a remedy where one helps.

A retry resumes from the newest whole checkpoint only: engines take the newest directory whatever it holds.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from core.domain.choices import Engine, EvalMetric
from core.domain.units import show_seconds
from core.planning.plan import TrainingPlan
from core.recipes.base import RenderedRun, RunInputs
from core.recipes.launch import NO_PROGRESS_BARS, launch_command
from core.recipes.render import render
from core.runs.run_files import RunEnd, RunResult, RunSpec
from trainer.handoff import (
    LAUNCH_SPEC_VARIABLE,
    LaunchSpec,
    PreparedRows,
    PrepareSpec,
    TrainingFailure,
    TrainingOutcome,
    read_record,
)
from trainer.rewards.source import REWARD_MODULE
from trainer.runner.machines import Machine, ask_machines, lost_machine, this_machine, with_machine_ends
from trainer.runner.main import write_result
from trainer.runner.planning import FailedLaunch, Remedy, remedy_for
from trainer.runner.processes import EngineProcess, StopRequest, child_environment, free_port
from trainer.runner.supervise import (
    LaunchResult,
    SupervisedProcess,
    SupervisionLimits,
    Termination,
    launch_result,
    supervise,
)
from trainer.session.progress_log import ProgressLog
from trainer.session.submission import submission_kind

#: Engines write this one last.
LAST_WRITTEN = "trainer_state.json"
#: Of the native trainer's checkpoints, which get their name once they are completely on disk.
NATIVE_MARKER = "position.json"


def newest_checkpoint(output: Path) -> str | None:
    """The newest complete checkpoint. Incomplete ones are deleted: engines would take them."""
    newest_first = sorted(output.glob("checkpoint-*"), key=_checkpoint_step, reverse=True)
    whole = [folder for folder in newest_first if is_whole_checkpoint(folder)]
    for folder in newest_first:
        if folder not in whole:
            shutil.rmtree(folder, ignore_errors=True)
    return str(whole[0]) if whole else None


def is_whole_checkpoint(folder: Path) -> bool:
    if (folder / NATIVE_MARKER).is_file():
        return True
    return (folder / LAST_WRITTEN).is_file() and submission_kind(folder) is not None


def _checkpoint_step(folder: Path) -> int:
    number = folder.name.rpartition("-")[2]
    return int(number) if number.isdigit() else -1


PLUGIN = "trainer.axolotl.plugin.GodMinerPlugin"
#: From `end_by` to being ended from outside: how far off a forecast may be, within the reserve.
OVERRUN_S, OVERRUN_SHARE = 60.0, 0.4
#: No step, evaluation or save takes this many times what was planned; none is given up sooner than this.
HANG_FACTOR, HANG_MIN_S = 30.0, 1200.0
#: How many times the planned time to the first step may pass before our plugin must have been loaded, or be
#: seen to be imported still.
MARKER_FACTOR, MARKER_MIN_S = 3.0, 300.0
#: Time limit for loading a tokenizer and encoding some rows: seconds, or a minute or two for one that must be
#: converted first on a busy host. Imports do not count.
TRIAL_S = 300.0


@dataclass
class TextRunner:
    run: RunSpec
    stop: StopRequest
    #: Whether a failed training is retried here; with a daemon, the daemon decides.
    retries: bool
    #: How programs are started.
    start: Callable[[Sequence[str], Mapping[str, str], Path], SupervisedProcess] = EngineProcess
    machine: Machine = field(default_factory=this_machine)
    launches: int = 0
    _started: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.work = Path(self.run.work_dir)
        self.progress = ProgressLog(Path(self.run.progress_path))

    def execute(self) -> RunResult:
        plan: TrainingPlan | None = None
        prepared: PreparedRows | None = None
        resume = self.run.resume_from
        remedies: list[Remedy] = []
        while True:
            self.launches += 1
            self._started = time.time()
            if prepared is None:
                ready = self._prepare(plan)
                if isinstance(ready, LaunchResult):
                    return write_result(self.run, ready)
                prepared, plan = ready
            assert plan is not None
            attempt = self._train(plan, prepared, resume)
            remedy = self._remedy(plan, attempt, remedies)
            if remedy is None:
                return write_result(self.run, attempt)
            remedies.append(remedy)
            self.progress.note("remedy", str(remedy))
            if remedy.plan.sequence != plan.sequence or remedy.plan.steps.eval_rows != plan.steps.eval_rows:
                prepared = None
            plan = remedy.plan
            resume = self._resume_from(remedy)

    def _resume_from(self, remedy: Remedy) -> str | None:
        """The checkpoint that the next launch resumes from. For one that starts again the old ones are
        deleted: engines keep the checkpoints with the highest numbers, which would be those of the previous
        launch."""
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

    def _prepare(self, plan: TrainingPlan | None) -> tuple[PreparedRows, TrainingPlan] | LaunchResult:
        """In a child process: it loads the tokenizer and, where there is no plan yet, looks for GPUs."""
        folder = self.work / f"data-{self.launches}"
        folder.mkdir(parents=True, exist_ok=True)
        self.progress.stage("data", "rows are read and tokenised")
        plan_file = self._plan_file(plan)
        spec = PrepareSpec(
            run=self.run,
            plan_path=str(plan_file) if plan_file else None,
            plan_out=str(folder / "plan.json"),
            folder=str(folder),
            prepared_out=str(folder / "prepared.json"),
            failure_out=str(folder / "failure.json"),
        )
        spec_path = folder / "prepare.json"
        spec_path.write_text(spec.model_dump_json(indent=2), encoding="utf-8")
        command = (sys.executable, "-m", "trainer.runner.prepare", str(spec_path))
        spec.trial_path.unlink(missing_ok=True)  # of a launch in the same place that was ended in it
        child = self.start(command, child_environment(self.work, NO_PROGRESS_BARS), self.work)
        limits = SupervisionLimits(hard_end=self.hard_end, more=TrialLimit(spec.trial_path))
        ended = supervise(child, limits, self.stop)
        prepared = read_record(PreparedRows, Path(spec.prepared_out))
        if prepared is None or ended.termination is not None:
            return launch_result(
                ended, None, [read_record(TrainingFailure, Path(spec.failure_out))], marked=True
            )
        followed = TrainingPlan.from_json(Path(spec.plan_out).read_bytes())
        if not followed.verdict.feasible:
            return LaunchResult(RunEnd.INFEASIBLE, followed.verdict.reason)
        return prepared, followed

    def _plan_file(self, plan: TrainingPlan | None) -> Path | None:
        if plan is None:
            return Path(self.run.plan_path) if self.run.plan_path else None
        path = self.work / f"data-{self.launches}" / "asked-plan.json"
        path.write_text(plan.to_json(), encoding="utf-8")
        return path

    # — the engine

    def _train(self, plan: TrainingPlan, prepared: PreparedRows, resume: str | None) -> LaunchResult:
        launch = self.work / f"launch-{self.launches}"
        launch.mkdir(parents=True, exist_ok=True)
        plan_path = launch / "plan.json"
        plan_path.write_text(plan.to_json(), encoding="utf-8")
        if plan.launch.machines > self.machine.count:
            why = f"the plan is for {plan.launch.machines} machines; it was started on {self.machine.count}"
            return LaunchResult(RunEnd.INFEASIBLE, why)
        inputs = self._inputs(plan, prepared, plan_path, resume)
        rendered = render(_for_engine(plan), inputs)
        for name, text in rendered.files.items():
            (launch / name).write_text(text, encoding="utf-8")
        spec = LaunchSpec(
            run=self.run,
            plan_path=str(plan_path),
            launch_dir=str(launch),
            prepared=prepared,
            wrapper_pid=os.getpid(),
            resume_from=resume,
        )
        if (machines := plan.launch.machines) > 1:
            ask_machines(spec, _commands(plan, inputs, rendered), rendered.env)
        child = self._launch(rendered, prepared, spec)
        ended = supervise(child, self._limits(plan, spec), self.stop)
        failures = [
            read_record(TrainingFailure, spec.failure_path(rank)) for rank in range(plan.launch.processes)
        ]
        result = launch_result(
            ended, read_record(TrainingOutcome, spec.outcome_path), failures, spec.marker_path.exists()
        )
        return with_machine_ends(result, spec, machines)

    def _launch(self, rendered: RenderedRun, prepared: PreparedRows, spec: LaunchSpec) -> SupervisedProcess:
        rewards = (str(prepared.rewards_dir),) if prepared.rewards_dir else ()
        more = {**rendered.env, LAUNCH_SPEC_VARIABLE: str(spec.write())}
        (Path(spec.launch_dir) / "command.txt").write_text(shlex.join(rendered.command), encoding="utf-8")
        for note in rendered.notes:
            self.progress.note("engine", note)
        return self.start(rendered.command, child_environment(self.work, more, rewards), self.work)

    def _inputs(
        self, plan: TrainingPlan, prepared: PreparedRows, plan_path: Path, resume: str | None
    ) -> RunInputs:
        own = plan.steps.eval_metric is EvalMetric.LOSS
        return RunInputs(
            model_path=self.run.model_path,
            train_path=str(prepared.train_path),
            eval_path=str(prepared.eval_path) if own and prepared.eval_path else None,
            output_dir=str(self.output),
            work_dir=str(self.work),
            config_dir=str(plan_path.parent),
            plan_path=str(plan_path),
            dataset=self.run.dataset,
            era=self.run.era,
            pad_token=prepared.pad_token,
            resume_from=resume,
            plugins=(PLUGIN,),
            reward_module=REWARD_MODULE,
            port=plan.launch.port or free_port(),
            python=sys.executable,
            head=self.machine.head,
        )

    def _limits(self, plan: TrainingPlan, spec: LaunchSpec) -> SupervisionLimits:
        names = [phase.name for phase in plan.time.phases]
        before = plan.time.phases[: names.index("train") if "train" in names else 0]
        opening = sum(phase.seconds for phase in before if phase.name != "download")
        longest = max(plan.time.step_s, plan.time["evaluate"], plan.time["save"], opening / HANG_FACTOR)
        return SupervisionLimits(
            hard_end=self.hard_end,
            begun=spec.started_path,
            marker=spec.marker_path,
            marker_s=max(MARKER_FACTOR * opening, MARKER_MIN_S),
            processes=plan.launch.processes,
            signs=(Path(self.run.progress_path), spec.marker_path, spec.started_path),
            hang_s=max(HANG_FACTOR * longest, HANG_MIN_S),
            more=lost_machine(spec, plan.launch.machines),
        )

    # — what follows

    def _remedy(self, plan: TrainingPlan, attempt: LaunchResult, earlier: list[Remedy]) -> Remedy | None:
        ended_well = attempt.outcome is not None and attempt.end is not RunEnd.NAN
        # Other machines wait for one launch only.
        if ended_well or not self.retries or plan.launch.machines > 1:
            return None
        failed = FailedLaunch(
            end=attempt.end,
            moment=attempt.moment,
            start_s=min(time.time() - self._started, plan.time.total_s),
            left_s=self.run.end_by - time.time(),
            detail=attempt.detail,
        )
        return remedy_for(plan, failed, earlier)


@dataclass
class TrialLimit:
    """A time limit for a trial: a template or a tokenizer that never ends would use up the job's time, and
    hold its GPUs. It uses our own clock, since a file system's may differ."""

    path: Path
    now: Callable[[], float] = time.monotonic
    _trial: int | None = None
    _seen_at: float = 0.0

    def __call__(self) -> Termination | None:
        try:
            trial = self.path.stat().st_mtime_ns
        except OSError:
            trial = None
        if trial is None or trial != self._trial:
            self._trial, self._seen_at = trial, self.now()
            return None
        if self.now() - self._seen_at <= TRIAL_S:
            return None
        late = f"did not encode the first rows in {show_seconds(TRIAL_S)}"
        return Termination(RunEnd.BAD_MODEL, f"the base model's tokenizer or chat template {late}")


def _commands(plan: TrainingPlan, inputs: RunInputs, rendered: RenderedRun) -> list[tuple[str, ...]]:
    """By machine."""
    config = rendered.command[-1]
    ranks = [inputs.model_copy(update={"machine_rank": rank}) for rank in range(plan.launch.machines)]
    return [launch_command(plan, each, config) for each in ranks]


def _for_engine(plan: TrainingPlan) -> TrainingPlan:
    """The plan as the engine sees it: where the session scores, the engine itself holds nothing out. The
    native trainer has only the session's evaluation, and reads the held-out rows and the patience from the
    plan."""
    if plan.engine is Engine.NATIVE or plan.steps.eval_metric is EvalMetric.LOSS:
        return plan
    update = {"eval_rows": 0, "load_best": False, "early_stopping_patience": None}
    return plan.model_copy(update={"steps": plan.steps.model_copy(update=update)})
