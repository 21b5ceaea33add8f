"""Run an image task: pictures, plan, configuration, and an engine that knows nothing of us."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from core.domain.choices import Engine
from core.domain.tasks import ImageModelType, TaskType
from core.models.identify import image_model_facts as model_of
from core.planning.plan import TrainingPlan
from core.recipes.base import ImageFiles, RunInputs
from core.recipes.launch import PICTURE_RUN_FILE
from core.recipes.render import render
from core.runs.picture_run import PictureRun
from core.runs.progress import ControlEvent
from core.runs.run_files import RunEnd, RunResult, RunSpec
from trainer.errors import BadModel
from trainer.handoff import TrainingOutcome, read_record
from trainer.inputs.images import PreparedImages, prepare_images
from trainer.runner.image_files import (
    EvaluatedModel,
    evaluated_model,
    hub_cache,
    image_files,
    resolve_model_path,
)
from trainer.runner.image_monitor import LAST_FILE, ImageMonitor, is_whole_file
from trainer.runner.main import write_result
from trainer.runner.planning import FailedLaunch, Remedy, make_own_plan, remedy_for
from trainer.runner.processes import (
    EngineProcess,
    StopRequest,
    child_environment,
    engine_environment,
    free_port,
)
from trainer.runner.supervise import (
    LaunchResult,
    ProcessEnd,
    SupervisedProcess,
    SupervisionLimits,
    Termination,
    launch_result,
    supervise,
)
from trainer.session.control import ControlFile
from trainer.session.failures import end_of, is_disk_full
from trainer.session.progress_log import ProgressLog
from trainer.session.submission import Submission

#: Interpreters of the picture trainer and of the engine, and where its scripts lie.
PICTURES_PYTHON_VARIABLE = "GOD_MINER_PICTURES_PYTHON"
PYTHON_VARIABLE = "GOD_MINER_ENGINE_PYTHON"
KOHYA_VARIABLE, KOHYA = "GOD_MINER_KOHYA", "/app/sd-scripts"
TOOLKIT_VARIABLE, TOOLKIT = "GOD_MINER_AI_TOOLKIT", "/app/ai-toolkit"
_DIRECTORIES = {Engine.KOHYA: (KOHYA_VARIABLE, KOHYA), Engine.AI_TOOLKIT: (TOOLKIT_VARIABLE, TOOLKIT)}
#: From ending the engine to `end_by`: time to put the last file in place.
PLACE_S, PLACE_SHARE = 10.0, 0.1
#: An engine without output for so long, whether it loads, encodes or trains, hangs.
HANG_S = 1500.0
#: The picture trainer ends by itself; so long after the time is over it is ended.
OVERRUN_S = 20.0
#: Another engine takes over if so much time is left.
LEAST_LEFT_S = 120.0
log = logging.getLogger(__name__)

StartEngine = Callable[[Sequence[str], Mapping[str, str], Path, Callable[[str], None]], SupervisedProcess]


@dataclass
class ImageRunner:
    run: RunSpec
    stop: StopRequest
    retries: bool
    start: StartEngine = EngineProcess
    launches: int = 0
    control: ControlFile = field(init=False)
    #: Files outside the model's own directory, looked up once.
    parts: ImageFiles = field(default_factory=ImageFiles)

    def __post_init__(self) -> None:
        self.work = Path(self.run.work_dir)
        self.progress = ProgressLog(Path(self.run.progress_path))
        path = self.run.control_path
        self.control = ControlFile(Path(path) if path else None, self.progress.note)
        self.kind = self.run.image_type or ImageModelType.SDXL

    def execute(self) -> RunResult:
        self.progress.stage("data", "pictures are unpacked and looked at")
        model = resolve_model_path(Path(self.run.model_path))
        self.parts, warnings = image_files(self.kind, model)
        for warning in warnings:
            log.warning("%s", warning)
            self.progress.note("missing", warning)
        scored = self._evaluated_model(model)
        pictures, plan = self._prepare(scored is not None)
        if plan.engine is Engine.PICTURES and scored is not None:
            attempt = self._train_pictures(plan, pictures, scored)
            if not self._may_take_over(attempt):
                return write_result(self.run, attempt)
            pictures, plan = self._prepare(False)
            self.progress.note(
                "engine", f"{plan.engine} takes over from the picture trainer: {attempt.detail}"
            )
        for note in (*pictures.notes, *plan.notes):
            self.progress.note("plan", note)
        if not plan.verdict.feasible:
            return self._finish(LaunchResult(RunEnd.INFEASIBLE, plan.verdict.reason), None)
        if plan.engine is Engine.AI_TOOLKIT and self.kind is ImageModelType.FLUX:
            _check_flux_layout(model)
        remedies: list[Remedy] = []
        while True:
            self.launches += 1
            began = time.time()
            attempt, monitor = self._train(plan, pictures, model)
            remedy = self._remedy(plan, attempt, began, remedies)
            if remedy is None:
                return self._finish(attempt, monitor)
            remedies.append(remedy)
            self.progress.note("remedy", str(remedy))
            plan = remedy.plan

    def _evaluated_model(self, model: Path) -> EvaluatedModel | None:
        """Find what the picture trainer loads; None where another engine trains, as the daemon's plans want
        it."""
        if self.run.plan_path is not None:
            return None
        try:
            scored = evaluated_model(self.kind, model)
        except BadModel as error:
            self.progress.note("engine", f"the picture trainer cannot train this: {error}")
            return None
        for note in scored.notes:
            self.progress.note("missing", note)
        return scored

    def _train_pictures(
        self, plan: TrainingPlan, pictures: PreparedImages, scored: EvaluatedModel
    ) -> LaunchResult:
        """It submits, measures and ends by itself."""
        self.launches += 1
        launch = self.work / f"launch-{self.launches}"
        shutil.rmtree(launch, ignore_errors=True)
        launch.mkdir(parents=True)
        (launch / "plan.json").write_text(plan.to_json(), encoding="utf-8")
        assert plan.image is not None
        assert plan.image.recipe is not None
        run = PictureRun(
            model=scored.model,
            twin_path=scored.model.base_path if plan.image.twin else None,
            recipe=plan.image.recipe,
            pictures_dir=str(pictures.folder),
            model_id=self.run.model_id,
            submission_dir=self.run.submission_dir,
            submission_file=LAST_FILE,
            work_dir=str(launch),
            progress_path=self.run.progress_path,
            outcome_path=str(launch / "outcome.json"),
            stop_path=self.run.stop_path,
            end_by=self.run.end_by,
            seed=self.run.seed,
        )
        (launch / PICTURE_RUN_FILE).write_text(run.model_dump_json(indent=1), encoding="utf-8")
        python = os.environ.get(PICTURES_PYTHON_VARIABLE, "python")
        inputs = self._inputs(plan, pictures, Path(scored.model.base_path), launch, launch)
        rendered = render(plan, inputs.model_copy(update={"python": python}))
        for note in (*pictures.notes, *plan.notes):
            self.progress.note("plan", note)
        env = child_environment(self.work, {**rendered.env, **self._caches()})
        heard = [0.0]

        def hear(line: str) -> None:
            heard[0] = time.time()

        try:
            child = self.start(rendered.command, env, self.work, hear)
        except OSError as error:
            return LaunchResult(RunEnd.CRASHED, f"{python} cannot be started: {error}")
        signs = (Path(self.run.progress_path),)
        end = self.run.end_by + min(OVERRUN_S, (self.run.deadline_at - self.run.end_by) / 2)
        place = Path(self.run.submission_dir)
        limits = SupervisionLimits(end, begun=place, signs=signs, hang_s=HANG_S, heard=lambda: heard[0])
        ended = supervise(child, limits, self.stop)
        outcome = read_record(TrainingOutcome, Path(run.outcome_path))
        return launch_result(ended, outcome, (), marked=True)

    def _may_take_over(self, attempt: LaunchResult) -> bool:
        """Return whether another engine should try: nothing is trained yet, for no reason that it shares."""
        shared = (RunEnd.STOPPED, RunEnd.CLOCK, RunEnd.BAD_DATA, RunEnd.DISK_FULL)
        if attempt.end in (RunEnd.FINISHED, RunEnd.EARLY, *shared) or self.stop.asked:
            return False
        trained = self._submission().trained
        late = self.run.end_by - time.time() < LEAST_LEFT_S
        return bool(installed_engines()) and not late and (trained is None or trained.step == 0)

    def _submission(self) -> Submission:
        place, base = Path(self.run.submission_dir), Path(self.run.model_path)
        return Submission(place, self.run.model_id, base, TaskType.IMAGE, image_type=self.run.image_type)

    def _prepare(self, pictures: bool) -> tuple[PreparedImages, TrainingPlan]:
        """Pictures first: how many there are decides about the plan, and the plan about repeats."""
        folder = self.work / "data"
        first = prepare_images(self.run, folder, verbatim=pictures)
        if self.run.plan_path is not None:
            plan = TrainingPlan.from_json(Path(self.run.plan_path).read_bytes())
        else:
            facts = model_of(self.run.model_id, self.kind)
            plan = make_own_plan(self.run, facts, first.facts, installed_engines(), pictures=pictures)
        if not pictures and plan.image is not None and plan.image.repeats != first.facts.image_repeats:
            first = prepare_images(self.run, folder, repeats=plan.image.repeats)
        return first, plan

    def _train(
        self, plan: TrainingPlan, pictures: PreparedImages, model: Path
    ) -> tuple[LaunchResult, ImageMonitor]:
        launch = self.work / f"launch-{self.launches}"
        # A folder of its own, without what an earlier attempt left: ai-toolkit goes on from whatever file it
        # finds, and its files would be taken for this training's.
        shutil.rmtree(launch, ignore_errors=True)
        output = launch / "output"
        output.mkdir(parents=True, exist_ok=True)
        (launch / "plan.json").write_text(plan.to_json(), encoding="utf-8")
        rendered = render(plan, self._inputs(plan, pictures, model, launch, output))
        for name, text in rendered.files.items():
            (launch / name).write_text(text, encoding="utf-8")
        (launch / "command.txt").write_text(shlex.join(rendered.command), encoding="utf-8")
        for note in rendered.notes:
            self.progress.note("engine", note)
        monitor = ImageMonitor(self.run, plan, output, self.progress)
        monitor.submission.prepare()
        monitor.earlier = monitor.submission.trained
        if self.launches == 1 and monitor.earlier is not None:
            step = monitor.earlier.step
            self.progress.note("submission", f"an earlier attempt has left one, of step {step:,}")
        env = engine_environment(self.work, {**rendered.env, **self._caches()})
        self.progress.stage("train", f"{plan.engine}, {plan.steps.total:,} steps")
        # Both engines import their own modules from where they are started.

        def check() -> Termination | None:
            self._refuse_control(plan)
            return monitor.check()

        child = self.start(rendered.command, env, engine_directory(plan.engine), monitor.on_line)
        signs = (Path(self.run.progress_path),)
        limits = SupervisionLimits(
            self._training_end,
            signs=signs,
            hang_s=HANG_S,
            heard=lambda: monitor.heard_at,
            doing=lambda: monitor.doing + (f" of start {self.launches}" if self.launches > 1 else ""),
            more=check,
        )
        ended = supervise(child, limits, self.stop)
        monitor.place()
        if monitor.placed is None and monitor.earlier is not None:
            self.progress.note("submission", "what was submitted before stays: no file came as far")
        return self._result(ended, monitor, output), monitor

    @property
    def _training_end(self) -> float:
        """When the engine is ended."""
        room = max(self.run.end_by - self.run.began_at, 0.0)
        return self.run.end_by - min(PLACE_S, PLACE_SHARE * room)

    def _inputs(
        self, plan: TrainingPlan, pictures: PreparedImages, model: Path, launch: Path, output: Path
    ) -> RunInputs:
        kohya = plan.engine is Engine.KOHYA
        return RunInputs(
            model_path=str(model),
            train_path=str(pictures.parent if kohya else pictures.folder),
            output_dir=str(output),
            work_dir=str(self.work),
            config_dir=str(launch),
            plan_path=str(launch / "plan.json"),
            image=self.parts,
            port=plan.launch.port or free_port(),
            kohya_dir=str(engine_directory(Engine.KOHYA)),
            ai_toolkit_dir=str(engine_directory(Engine.AI_TOOLKIT)),
            python=os.environ.get(PYTHON_VARIABLE, "python"),
        )

    def _caches(self) -> dict[str, str]:
        """Tokenizers are loaded by name from the validator's cache, which cannot be written."""
        cache = hub_cache()
        return {"HF_HUB_CACHE": str(cache)} if cache else {}

    def _result(self, ended: ProcessEnd, monitor: ImageMonitor, output: Path) -> LaunchResult:
        """Exit code 0 proves nothing: sd-scripts ends with it when it finds no pictures."""
        finished = any(is_whole_file(path) for path in output.rglob(LAST_FILE))
        if ended.termination is not None and not (finished and ended.termination.end is RunEnd.CLOCK):
            return LaunchResult(ended.termination.end, ended.termination.detail)
        if finished and (ended.code == 0 or ended.termination is not None):
            return _unplaced(monitor) or LaunchResult(
                RunEnd.FINISHED, f"all {monitor.plan.steps.total:,} steps done"
            )
        if monitor.out_of_memory:
            return LaunchResult(RunEnd.OOM, "the engine ran out of GPU memory", moment="train")
        if monitor.no_data:
            return LaunchResult(RunEnd.BAD_DATA, "the engine found no pictures to train on")
        if any(is_disk_full(line) for line in ended.tail):
            return LaunchResult(RunEnd.DISK_FULL, "the engine found no room for its files")
        return _unplaced(monitor) or launch_result(ended, None, (), marked=True)

    def _refuse_control(self, plan: TrainingPlan) -> None:
        asked = self.control.take()
        if asked is not None:
            text = f"{plan.engine} cannot change while it runs"
            micro = plan.batch.micro
            event = ControlEvent(t=time.time(), number=asked.number, applied=False, micro=micro, text=text)
            self.progress.write(event)

    def _remedy(
        self, plan: TrainingPlan, attempt: LaunchResult, began: float, earlier: list[Remedy]
    ) -> Remedy | None:
        if not self.retries or attempt.end is RunEnd.FINISHED:
            return None
        now = time.time()
        start_s, left_s = min(now - began, 600.0), self._training_end + PLACE_S - now
        failed = FailedLaunch(attempt.end, attempt.moment, start_s, left_s, attempt.detail)
        return remedy_for(plan, failed, earlier)

    def _finish(self, attempt: LaunchResult, monitor: ImageMonitor | None) -> RunResult:
        steps = monitor.step.step if monitor is not None and monitor.step else 0
        return write_result(self.run, attempt, steps=steps)


def _unplaced(monitor: ImageMonitor) -> LaunchResult | None:
    """The reason, where there were files and none is a submission."""
    if monitor.problem is None or monitor.submission.exists:
        return None
    return LaunchResult(end_of(monitor.problem), f"no file could be put in place: {monitor.problem}")


def _check_flux_layout(model: Path) -> None:
    """ai-toolkit reads Flux as diffusers directories; a single weight file is for sd-scripts alone."""
    if not (model / "transformer").is_dir():
        raise BadModel(
            f"{model} has no transformer directory: ai-toolkit, the only engine in this image, loads Flux"
            " from the diffusers layout; standalone-image-trainer.dockerfile has sd-scripts, which trains it"
        )


def engine_directory(engine: Engine) -> Path:
    variable, default = _DIRECTORIES[engine]
    return Path(os.environ.get(variable, default))


def installed_engines() -> list[Engine]:
    """The image engines that this container has."""
    return [engine for engine in _DIRECTORIES if engine_directory(engine).is_dir()]
