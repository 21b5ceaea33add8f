"""The course of an image run: pictures, plan, configuration, training by an engine that knows nothing of
us."""

from __future__ import annotations

import logging
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from core.choices import Engine
from core.model_facts import image_facts as model_of
from core.plan import TrainingPlan
from core.recipes.render import render
from core.recipes.run import ImageFiles, RunInputs
from core.run_files import RunEnd, RunResult, RunSpec
from core.tasks import ImageModelType
from trainer.callbacks.failures import end_of, is_disk_full
from trainer.callbacks.report import Report
from trainer.errors import BadModel
from trainer.inputs.images import PreparedImages, prepare_images
from trainer.own_plan import own_plan
from trainer.wrapper.course import free_port
from trainer.wrapper.environment import engine_environment
from trainer.wrapper.files import LAST, is_whole
from trainer.wrapper.image_files import hub_cache, image_files, model_path
from trainer.wrapper.image_watch import ImageWatch
from trainer.wrapper.processes import Child
from trainer.wrapper.remedy import Failed, Remedy, remedy_for
from trainer.wrapper.result import conclude
from trainer.wrapper.signals import StopRequest
from trainer.wrapper.supervise import Ended, Limits, Running, supervise
from trainer.wrapper.verdict import Attempt, judged

#: The engine's interpreter, and where its scripts lie: their images have their own Python.
PYTHON_VARIABLE = "GOD_MINER_ENGINE_PYTHON"
KOHYA_VARIABLE, KOHYA = "GOD_MINER_KOHYA", "/app/sd-scripts"
TOOLKIT_VARIABLE, TOOLKIT = "GOD_MINER_AI_TOOLKIT", "/app/ai-toolkit"
_DIRECTORIES = {Engine.KOHYA: (KOHYA_VARIABLE, KOHYA), Engine.AI_TOOLKIT: (TOOLKIT_VARIABLE, TOOLKIT)}
#: Between ending the engine and `end_by`: the last file is put in place.
PLACE_S, PLACE_SHARE = 10.0, 0.1
#: An engine that says nothing for so long while it loads, encodes or trains hangs.
HANG_S = 1500.0
#: Files on the way at least, where the steps were cut down.
FILES = 4
#: Lines of the configuration check that are told.
MOST_SAID = 10

log = logging.getLogger(__name__)

Start = Callable[[Sequence[str], Mapping[str, str], Path, Callable[[str], None]], Running]


@dataclass
class ImageCourse:
    run: RunSpec
    stop: StopRequest
    retries: bool
    start: Start = Child
    launches: int = 0
    #: What lies outside the model's own directory, found once.
    parts: ImageFiles = field(default_factory=ImageFiles)

    def __post_init__(self) -> None:
        self.work = Path(self.run.work_dir)
        self.report = Report(Path(self.run.progress_path))
        self.kind = self.run.image_type or ImageModelType.SDXL

    def follow(self) -> RunResult:
        self.report.stage("data", "pictures are unpacked and looked at")
        model = model_path(Path(self.run.model_path))
        self.parts, warnings = image_files(self.kind, model)
        for warning in warnings:
            log.warning("%s", warning)
            self.report.note("missing", warning)
        pictures, plan = self._prepared()
        for note in (*pictures.notes, *plan.notes):
            self.report.note("plan", note)
        if not plan.verdict.feasible:
            return self._concluded(Attempt(RunEnd.INFEASIBLE, plan.verdict.reason), None)
        if plan.engine is Engine.AI_TOOLKIT and self.kind is ImageModelType.FLUX:
            _check_flux_layout(model)
        remedies: list[Remedy] = []
        may_refit = True
        while True:
            self.launches += 1
            began = time.time()
            attempt, watch = self._trained(plan, pictures, model, may_refit)
            if watch.refit is not None:
                may_refit, plan = False, fewer_steps(plan, watch.refit)
                self.report.note("refit", attempt.detail)
                continue
            remedy = self._remedy(plan, attempt, began, remedies)
            if remedy is None:
                return self._concluded(attempt, watch)
            remedies.append(remedy)
            self.report.note("remedy", str(remedy))
            plan = remedy.plan

    def _prepared(self) -> tuple[PreparedImages, TrainingPlan]:
        """Pictures first: how many there are decides about the plan, and the plan about repeats."""
        folder = self.work / "data"
        first = prepare_images(self.run, folder)
        if self.run.plan_path is not None:
            plan = TrainingPlan.from_json(Path(self.run.plan_path).read_bytes())
        else:
            plan = own_plan(self.run, model_of(self.run.model_id, self.kind), first.facts, engines_here())
        if plan.image is None or plan.image.repeats == first.facts.image_repeats:
            return first, plan
        return prepare_images(self.run, folder, repeats=plan.image.repeats, seed=plan.seed), plan

    def _trained(
        self, plan: TrainingPlan, pictures: PreparedImages, model: Path, may_refit: bool
    ) -> tuple[Attempt, ImageWatch]:
        launch = self.work / f"launch-{self.launches}"
        # A folder of its own: ai-toolkit goes on from whatever file it finds.
        output = launch / "output"
        output.mkdir(parents=True, exist_ok=True)
        (launch / "plan.json").write_text(plan.to_json(), encoding="utf-8")
        rendered = render(plan, self._inputs(plan, pictures, model, launch, output))
        for name, text in rendered.files.items():
            (launch / name).write_text(text, encoding="utf-8")
        (launch / "command.txt").write_text(shlex.join(rendered.command), encoding="utf-8")
        for note in rendered.notes:
            self.report.note("engine", note)
        watch = ImageWatch(
            self.run, plan, output, self._hard_end, self.report, may_refit=may_refit and self._in_time
        )
        watch.submission.prepare()
        env = engine_environment(self.work, {**rendered.env, **self._caches()})
        self.report.stage("train", f"{plan.engine}, {plan.steps.total:,} steps")
        # Both engines import their own modules from where they are started.
        child = self.start(rendered.command, env, engine_directory(plan.engine), watch.heard)
        signs = (Path(self.run.progress_path),)
        limits = Limits(self._hard_end, signs=signs, hang_s=HANG_S, more=watch.look)
        ended = supervise(child, limits, self.stop)
        watch.place()
        return self._judged(ended, watch, output), watch

    @property
    def _in_time(self) -> bool:
        return self.run.end_by > time.time()

    @property
    def _hard_end(self) -> float:
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

    def _judged(self, ended: Ended, watch: ImageWatch, output: Path) -> Attempt:
        """Exit code 0 proves nothing: sd-scripts ends with it when it finds no pictures."""
        if watch.problem is not None and not watch.submission.exists:
            return Attempt(end_of(watch.problem), f"no file could be put in place: {watch.problem}")
        finished = any(is_whole(path) for path in output.rglob(LAST))
        if ended.verdict is not None and not (finished and ended.verdict.end is RunEnd.CLOCK):
            return Attempt(ended.verdict.end, ended.verdict.detail)
        if finished and (ended.code == 0 or ended.verdict is not None):
            return Attempt(RunEnd.FINISHED, f"all {watch.plan.steps.total:,} steps done")
        if watch.out_of_memory:
            return Attempt(RunEnd.OOM, "the engine ran out of GPU memory", moment="train")
        if watch.no_data:
            return Attempt(RunEnd.BAD_DATA, "the engine found no pictures to train on")
        if any(is_disk_full(line) for line in ended.tail):
            return Attempt(RunEnd.DISK_FULL, "the engine found no room for its files")
        return judged(ended, None, (), marked=True)

    def _remedy(
        self, plan: TrainingPlan, attempt: Attempt, began: float, earlier: list[Remedy]
    ) -> Remedy | None:
        if not self.retries or attempt.end is RunEnd.FINISHED:
            return None
        now = time.time()
        failed = Failed(attempt.end, attempt.moment, min(now - began, 600.0), self.run.end_by - now)
        return remedy_for(plan, failed, earlier)

    def _concluded(self, attempt: Attempt, watch: ImageWatch | None) -> RunResult:
        steps = watch.step.step if watch is not None and watch.step else 0
        return conclude(self.run, attempt.end, attempt.detail, steps=steps, moment=attempt.moment)


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


def engines_here() -> list[Engine]:
    """The image engines that this container has."""
    return [engine for engine in _DIRECTORIES if engine_directory(engine).is_dir()]


def fewer_steps(plan: TrainingPlan, total: int) -> TrainingPlan:
    """The same training, shorter, with files on the way as before."""
    steps = plan.steps
    epochs = total / max(steps.per_epoch, 1)
    every = max(total // FILES, 1)
    image = plan.image and plan.image.model_copy(update={"save_every_epochs": max(int(epochs / FILES), 1)})
    warmup = min(plan.optimizer.warmup_steps, total // 4)
    update = {"total": total, "epochs": epochs, "eval_every": every, "save_every": every}
    return plan.model_copy(
        update={
            "steps": steps.model_copy(update=update),
            "image": image,
            "optimizer": plan.optimizer.model_copy(update={"warmup_steps": warmup}),
        }
    )
