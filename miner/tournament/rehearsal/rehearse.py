"""Do with a commit what validators do: clone, build, run, kill at the limit, upload, score.

Everything happens in one directory; what was made in Docker is removed again. Inputs that the operator does
not name are made up: they show that a task runs from end to end, not how good its model is.
"""

from __future__ import annotations

import json
import random
import secrets
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from core.domain.errors import GodMinerError
from core.domain.tournament_rules import CACHE, CHECKPOINTS, DATASETS_FOLDER, MAX_TRAINING_ATTEMPTS
from core.domain.units import show_seconds
from core.system.files import remove_tree, temporary_tree, write_atomically
from miner.backends.docker.client import DockerClient
from miner.reports.report import redact_report
from miner.tournament.checkout import clone_repository
from miner.tournament.rehearsal.build import Build, build_entry, remove_entry
from miner.tournament.rehearsal.cache_layout import CacheLayout, RehearsedTask, lay_out_cache
from miner.tournament.rehearsal.container import (
    ContainerOptions,
    TrainerContainer,
    TrainingMachine,
    container_options,
    give_to_root,
    internal_network,
    take_over,
    training_machine,
)
from miner.tournament.rehearsal.inputs import (
    STATISTICS,
    Opponent,
    RehearsalInputs,
    RehearsalOptions,
    Save,
    Say,
    check_entry,
    check_inputs,
    make_model_and_statistics,
    training_data,
)
from miner.tournament.rehearsal.leftovers import IMAGE, OPPONENT, RECORD, RehearsalRecord, rehearsal_record
from miner.tournament.rehearsal.report import (
    KilledTraining,
    OpponentClone,
    Rehearsal,
    TaskRehearsal,
    log_problems,
    review_log,
    secret_values,
)
from miner.tournament.rehearsal.scoring import (
    AGAINST,
    CannotScore,
    FolderScore,
    ImageScorer,
    NoScorer,
    keep_order,
    load_problems,
    pictures_in,
    score_games,
    score_pictures,
    score_text,
)
from miner.tournament.rehearsal.upload import Upload, as_published, what_is_uploaded
from miner.tournament.rules import TournamentTask, repository_name

# Rehearse one task on a built image: train as a validator does, upload, score, kill.

#: Whose entry it is, as paths and names show it.
HOTKEY = "5RehearsalRehearsalRehearsalRehearsalRehearsalRe"
TOURNAMENT = "tourn_rehearsal"
#: Hours of a task with stand-ins: their training takes a minute, starting it on a busy CPU up to five.
STAND_IN_HOURS = 0.2
#: The kill comes in this part of the time after the first submission; a second training may be shorter.
KILL_SHARE = 0.6
#: Where our trainer works.
_WORK_PLACES = (
    "/tmp/.god-miner-{task}",  # noqa: S108 - in the container
    f"{CHECKPOINTS}/{{task}}/.god-miner-{{task}}",
)


@dataclass(frozen=True)
class EntryImages:
    """The images of one entry: each Dockerfile is built once, though validators build it for every task."""

    client: DockerClient
    root: Path
    stack: ExitStack
    record: RehearsalRecord
    say: Say
    builds: list[Build]

    def built(self, task: TournamentTask, options: RehearsalOptions, *, ours: bool = True) -> Build:
        for build in self.builds:
            if build.dockerfile.endswith(task.dockerfile):
                return build
        self.say(f"building {task.dockerfile}" + ("" if ours else " of the opponent"))
        tag = f"{IMAGE}:{uuid.uuid4().hex[:12]}"
        self.record.add_build(tag)
        build = build_entry(
            self.client,
            self.root,
            task.dockerfile,
            tag,
            arguments=options.build_arguments if ours else {},
            network=options.build_network,
            on_line=lambda line: self.say(f"  {line}") if line.startswith("Step ") else None,
            on_step=self.record.add_step,
        )
        if not options.keep:
            self.stack.callback(remove_entry, self.client, build)
        self.builds.append(build)
        self.say(f"  {build.problem or f'built in {show_seconds(build.seconds)}'}")
        return build


@dataclass(frozen=True)
class RehearsalSetup:
    """Client, options, machine and network shared by the tasks of a rehearsal."""

    client: DockerClient
    options: RehearsalOptions
    machine: TrainingMachine
    network: str
    say: Say
    #: Writes the report.
    save: Save
    opponent: EntryImages | None = None


class TaskRun:
    """One task on a built image; `run` fills its report."""

    def __init__(self, setup: RehearsalSetup, task: TournamentTask, build: Build) -> None:
        options = setup.options
        self.setup, self.task, self.build = setup, task, build
        self.client, self.options, self.say, self.save = setup.client, options, setup.say, setup.save
        self.given = options.inputs.get(task.name, RehearsalInputs())
        self.folder = options.output / task.name
        #: Validators give none to image tasks.
        self.datasets = options.datasets if task.image_type is None else {}
        #: What an image engine was started with.
        self.order: Path | None = None
        #: Image tasks are given the validator's own; nothing may read or print it.
        self.hub_token = f"hf_{secrets.token_hex(17)}"
        task_id = str(uuid.UUID(int=random.Random(task.name).getrandbits(128)))  # noqa: S311
        stand_ins = self.given.model is None or self.given.data is None
        self.rehearsed = RehearsedTask(
            task,
            task_id,
            HOTKEY,
            self.given.model_id,
            repository=repository_name(TOURNAMENT, task_id, HOTKEY),
            hours=options.hours or (STAND_IN_HOURS if stand_ins else task.hours),
            trigger_word=options.trigger_word,
            more_environment=self._more_environment(),
        )
        self.report = TaskRehearsal(task.name, build.dockerfile, self.rehearsed.hours)

    def run(self) -> None:
        began = time.monotonic()
        self._name_deviations()
        if self.build.image is None:
            self.report.problems.append(f"the image is not built: {self.build.problem}")
            self.report.complete = True
            return
        try:
            self._rehearse(self.build.image)
            self.report.complete = True
        except (GodMinerError, OSError) as error:
            self.report.problems.append(str(error))
            self.report.complete = True
        finally:
            if not self.options.keep:
                try:
                    self._clear(self.build.image)
                except (GodMinerError, OSError) as error:  # the next task is rehearsed nevertheless
                    self.report.deviations.append(
                        f"not everything is removed: {error}; run god-miner tournament clean"
                    )
            self.report.seconds = time.monotonic() - began
            self.save()

    def _name_deviations(self) -> None:
        add = self.report.deviations.append
        if self.options.build_arguments:
            named = ", ".join(f"{name}={value}" for name, value in self.options.build_arguments.items())
            add(f"built with {named}; validators give no build arguments")
        if self.build.image and not self.build.pulled:
            add("the base images were here already; validators' limit of the build includes their download")
        if self.options.build_network:
            add(f"built on the network {self.options.build_network}; validators build on an open one")
        if self.rehearsed.hours != self.task.hours:
            add(f"{self.rehearsed.hours:g} hours; such a task usually has {self.task.hours:g}")
        if self.given.model is None:
            add(f"the model is a stand-in: {self.task.stand_in} of two layers, random weights")
        if self.given.data is None:
            add("the data are made up")
        if self.task.task_type == "EnvTask":
            add("there are no environment servers, and the score is of games against the model it began with")

    def _rehearse(self, image: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        train, test = training_data(self.task, self.given, self.folder)
        layout = lay_out_cache(
            self.folder / "cache",
            self.rehearsed,
            model=self._model(image, train),
            data=train,
            hub_cache=self.options.hub_cache,
            datasets=self.datasets,
        )
        self.report.deviations += [f"the cache has no {path}" for path in layout.missing]
        made = self.folder / "made" / STATISTICS
        if layout.statistics is not None and made.is_file():
            made.rename(layout.statistics)
            self.report.deviations.append(
                "the statistics lack what takes a forward pass (training, throughput) and the duplicate rate"
            )
        options = self._container_options(image, layout, "checkpoints")
        self.report.deviations += options.deviations
        self._attempts(options, self.report)
        self._review_log(options)
        if not self.report.attempts[-1].is_success:
            return
        take_over(self.client, image, options.checkpoints)
        if not self._upload(options.place, self.report):
            return
        against = self.options.against
        if self.setup.opponent is not None:
            against = self._opponents_submission(self.setup.opponent, layout)
        self._score(image, layout, options.place, test, against if isinstance(against, Path) else None)
        self.save()
        if self.options.kill:
            self._kill(image, layout, test)

    def _model(self, image: str, rows: Path) -> Path:
        """The operator's, or a tiny one."""
        if self.task.image_type is not None and self.given.model is not None:
            return self.given.model
        self.say(f"{self.task.name}: making what is missing, in the image")
        made = self.folder / "made"
        self.report.deviations += make_model_and_statistics(
            self.client, image, self.task, self.given, rows, made
        )
        return self.given.model or made / "model"

    # — the training

    def _more_environment(self) -> dict[str, str]:
        more = {}
        if self.task.image_type is not None:
            more = {"HUGGINGFACE_TOKEN": self.hub_token, "HUGGINGFACE_USERNAME": "rehearsal"}
        if self.datasets:
            arrived = ",".join(name.replace("/", "--") for name in self.datasets)
            more = {"MINER_DATASETS_DIR": f"{CACHE}/{DATASETS_FOLDER}", "MINER_DATASETS": arrived}
        return more

    def _container_options(self, image: str, layout: CacheLayout, checkpoints: str) -> ContainerOptions:
        return container_options(
            self.rehearsed,
            self.setup.machine,
            image=image,
            network=self.setup.network,
            cache=layout.root,
            checkpoints=self.folder / checkpoints,
        )

    def _attempts(self, options: ContainerOptions, report: TaskRehearsal) -> None:
        """Train, ours or the opponent's."""
        ours = report is self.report
        who = self.task.name if ours else f"{self.task.name}, the opponent"
        limit_s = max(1, int(self.rehearsed.hours * 3600))
        give_to_root(self.client, options.image, options.checkpoints)
        for number in range(1, MAX_TRAINING_ATTEMPTS + 1):
            self.say(f"{who}: attempt {number}, at most {show_seconds(limit_s)}")
            log = self.folder / f"{'log' if ours else OPPONENT}-{number}.txt"
            look = _first_seen(report, options.place)
            with TrainerContainer(self.client, options, log, self._say_line) as container:
                end = container.wait(limit_s, look)
                look()
                own = self._keep_console(container, number) if ours else None
            report.attempts.append(end)
            self.save()
            how = "killed at its limit" if end.timed_out else f"exit code {end.exit_code}"
            self.say(f"{who}: {how} after {show_seconds(end.seconds)}")
            if end.is_success:
                return
            there = " although something is there" if options.place.is_dir() else ""
            text = f"attempt {number} ended with exit code {end.exit_code}: nothing is uploaded{there}"
            last = number == MAX_TRAINING_ATTEMPTS
            (report.problems if last else report.warnings).append(f"{text}; see {own or log}")

    def _opponents_submission(self, images: EntryImages, layout: CacheLayout) -> Path | None:
        """Train the opponent on the same inputs; return its repository, or None if it makes none."""
        build = images.built(self.task, self.options, ours=False)
        report = self.report.opponent = TaskRehearsal(self.task.name, build.dockerfile, self.rehearsed.hours)
        began = time.monotonic()
        repository: Path | None = None
        if build.image is None:
            report.problems.append(f"the image is not built: {build.problem}")
        else:
            options = self._container_options(build.image, layout, OPPONENT)
            try:
                self._attempts(options, report)
                take_over(self.client, build.image, options.checkpoints)
                if report.attempts[-1].is_success:
                    repository = self._published_by(options.place, report, layout)
            except (GodMinerError, OSError) as error:
                # Such as an image that cannot be started, or files that cannot be read: no failure of ours.
                report.problems.append(str(error))
        report.seconds = time.monotonic() - began
        report.complete = True
        self.save()
        return repository

    def _published_by(self, place: Path, report: TaskRehearsal, layout: CacheLayout) -> Path | None:
        upload = self._upload(place, report)
        if upload is None:
            return None
        repository = as_published(upload, self.folder / f"{OPPONENT}s-model")
        report.problems += load_problems(repository, self.task, layout.model, self.given.model_id)
        return None if report.problems else repository

    def _say_line(self, line: str) -> None:
        self.say(f"  | {line}")

    def _keep_console(self, container: TrainerContainer, number: int) -> Path | None:
        """Copy what our trainer keeps from the public log, and the picture trainer's order."""
        target = self.folder / f"console-{number}.log"
        for place in _WORK_PLACES:
            work = place.format(task=self.rehearsed.task_id)
            if container.copy_out(f"{work}/console.log", target):
                if self.task.image_type is not None:
                    self.order = keep_order(container, work, self.folder)
                return target
        return None

    def _review_log(self, options: ContainerOptions) -> None:
        lines = [
            line
            for path in sorted(self.folder.glob("log-*.txt"))
            for line in path.read_text("utf-8", "replace").replace("\r", "\n").splitlines()
        ]
        self.report.log_lines = len(lines)
        self.report.log_findings = review_log(lines, secret_values(options.environment))
        problems, warnings = log_problems(self.report.log_findings)
        self.report.problems += problems
        self.report.warnings += warnings

    # — what becomes of the result

    def _upload(self, place: Path, report: TaskRehearsal) -> Upload | None:
        """Return what gets into a repository; None if it is no submission."""
        found = what_is_uploaded(place, self.given.model_id, image=self.task.image_type is not None)
        report.problems += found.problems
        report.uploaded = [found.published(path) for path in found.files]
        report.upload_bytes = found.size
        report.rewritten = [f"{one.path}: {one.before} -> {one.after}" for one in found.rewrites]
        return None if found.problems else found

    def _score(self, image: str, layout: CacheLayout, place: Path, test: Path, against: Path | None) -> None:
        try:
            found = self._scored(image, layout, place, test, against)
        except CannotScore as error:
            opponent = self.report.opponent
            if opponent is None or AGAINST not in str(error):
                raise
            opponent.problems.append(f"it cannot be scored: {error}")
            found = self._scored(image, layout, place, test)
        if found is None:
            return
        self.report.score, self.report.score_text = found.as_dict(), found.summary()
        if not found.beats_base:
            self.report.warnings.append("the submission is not better than the model that it began with")

    def _scored(
        self,
        image: str,
        layout: CacheLayout,
        place: Path,
        test: Path,
        against: Path | None = None,
        brief: bool = False,
    ) -> FolderScore | None:
        """The score of what would be in the repository; None for kinds that have none here. `CannotScore`.
        `brief`: whether it has a score at all."""
        is_image = self.task.image_type is not None
        with temporary_tree("score-", parent=self.folder) as folder:
            upload = what_is_uploaded(place, self.given.model_id, image=is_image)
            repository = as_published(upload, folder / "repository")
            problems = load_problems(repository, self.task, layout.model, self.given.model_id)
            if problems:
                raise CannotScore(f"evaluators would reject it: {'; '.join(problems)}")
            self.say(f"{self.task.name}: scoring")
            scorer = ImageScorer(
                self.client,
                image,
                self.task,
                folder / "scratch",
                repository,
                against,
                self.setup.machine.gpus[: self.task.gpus],
                brief,
            )
            try:
                if self.task.task_type == "EnvTask":
                    return score_games(scorer, base=layout.model)
                if is_image:
                    return self._scored_pictures(scorer, layout, test)
                return score_text(scorer, base=layout.model, rows=test)
            except NoScorer as error:
                self._note_deviation(str(error))
                return None

    def _scored_pictures(self, scorer: ImageScorer, layout: CacheLayout, test: Path) -> FolderScore:
        if self.order is None:
            raise NoScorer
        return score_pictures(scorer, cache=layout.root, order=self.order, pictures=pictures_in(test))

    def _note_deviation(self, text: str) -> None:
        if text not in self.report.deviations:
            self.report.deviations.append(text)

    def _kill(self, image: str, layout: CacheLayout, test: Path) -> None:
        """Kill one more training, at a random moment between its first submission and the usual end."""
        first = self.report.attempts[-1]
        usual_s = first.seconds - (self.report.first_submission_s or first.seconds)
        options = self._container_options(image, layout, "killed")
        self.say(f"{self.task.name}: one more training, to be killed")
        give_to_root(self.client, options.image, options.checkpoints)
        with TrainerContainer(self.client, options, self.folder / "killed.txt", self._say_line) as container:
            submitted_s = container.wait_for(options.place.is_dir, self.rehearsed.hours * 3600)
            if submitted_s is not None:
                self.say(f"{self.task.name}: submitted after {show_seconds(submitted_s)}; the kill is next")
            end = container.wait(random.uniform(0, KILL_SHARE * usual_s))  # noqa: S311 - a moment
        if submitted_s is None:
            problem: str | None = f"no submission within {show_seconds(end.seconds)}"
        elif not end.timed_out:
            problem = "the training had ended before its kill: give it more time"
        else:
            problem = self._problem_of_killed(image, layout, options.place, test)
        self.report.kill = KilledTraining(submitted_s, round(end.seconds, 2), problem)
        self.say(f"  {self.report.kill.summary()}")
        if problem:
            self.report.problems.append(self.report.kill.summary())

    def _problem_of_killed(self, image: str, layout: CacheLayout, place: Path, test: Path) -> str | None:
        take_over(self.client, image, place.parent)
        is_image = self.task.image_type is not None
        if problems := what_is_uploaded(place, self.given.model_id, image=is_image).problems:
            return "; ".join(problems)
        try:
            self._scored(image, layout, place, test, brief=True)
        except CannotScore as error:
            return str(error)
        return None

    def _clear(self, image: str) -> None:
        """Leave the logs only."""
        for name in ("checkpoints", "killed", OPPONENT):
            if (self.folder / name).exists():
                take_over(self.client, image, self.folder / name)
                remove_tree(self.folder / name)
        for name in ("cache", "made", f"{OPPONENT}s-model"):
            remove_tree(self.folder / name)


def _first_seen(report: TaskRehearsal, place: Path) -> Callable[[], None]:
    began = time.monotonic()

    def look() -> None:
        if report.first_submission_s is None and place.is_dir():
            report.first_submission_s = round(time.monotonic() - began, 1)

    return look


#: In the output directory.
REPORT = "report.json"


def rehearse(
    client: DockerClient, source: str, options: RehearsalOptions, say: Say = lambda text: None
) -> Rehearsal:
    """Rehearse every task; a task that fails is a part of the report. `GodMinerError` where nothing can be
    rehearsed: no repository, no Docker, inputs that are not there. The report is written after every part."""
    began = time.monotonic()
    check_inputs(options)
    machine = training_machine(client, options.gpus)
    options.output.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        record = stack.enter_context(rehearsal_record(options.output))
        stack.callback(_remove_unused, options.output)
        if options.keep:
            stack.callback(record.keep)
        else:
            stack.callback(remove_tree, options.output / "checkout")
        say(f"cloning {source}")
        clone = clone_repository(source, options.commit, options.output / "checkout")
        check_entry(clone.directory, options.tasks)
        report = Rehearsal(source, clone.commit, clone.seconds, clone.size_bytes, output=str(options.output))

        def save() -> None:
            report.seconds = time.monotonic() - began
            found = redact_report(report.as_dict(), options.hide)
            text = json.dumps(found, indent=2) + "\n"
            write_atomically(options.output / REPORT, text.encode(), mode=0o644)

        save()
        images = EntryImages(client, clone.directory, stack, record, say, report.builds)
        opponent = _opponents_images(images, report, options)
        save()
        network, no_bridge = stack.enter_context(internal_network(client, options.output))
        setup = RehearsalSetup(client, options, machine, network, say, save, opponent)
        for task in options.tasks:
            run = TaskRun(setup, task, images.built(task, options))
            if no_bridge:
                run.report.deviations.append(no_bridge)
            report.tasks.append(run.report)
            save()
            run.run()
            save()
        report.complete = True
        save()
    return report


def _opponents_images(ours: EntryImages, report: Rehearsal, options: RehearsalOptions) -> EntryImages | None:
    if not isinstance(options.against, Opponent):
        return None
    ours.say(f"cloning {options.against.source}")
    folder = options.output / OPPONENT
    if not options.keep:
        ours.stack.callback(remove_tree, folder)
    clone = clone_repository(options.against.source, options.against.commit, folder)
    report.opponent = OpponentClone(options.against.source, clone.commit)
    return replace(ours, root=clone.directory, builds=report.opponent.builds)


def _remove_unused(output: Path) -> None:
    """A rehearsal that was refused leaves no directory."""
    if [path.name for path in output.iterdir()] == [RECORD]:
        remove_tree(output)
