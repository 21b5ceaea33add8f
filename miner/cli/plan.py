"""`god-miner plan`: a task's plan on this host: memory, time and the engine's configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from core.domain.errors import ConfigError, Problem
from core.domain.units import parse_bytes, parse_params, show_bytes
from miner.cli import options
from miner.cli.options import (
    DEFAULT_GPUS,
    load_profile_from,
    load_settings,
    local_hardware,
    read_json_object,
    with_options,
)
from miner.cli.output import echo, echo_json, print_pages

if TYPE_CHECKING:
    from core.data.facts import DatasetFacts
    from core.domain.hardware import Hardware
    from core.domain.tasks import ImageModelType, TaskType
    from core.models.facts import ModelFacts
    from core.planning.plan import TrainingPlan
    from core.profile.resolve import LoadedProfile
    from miner.settings import Settings
    from miner.tournament.rules import TournamentTask


class PlanTarget(NamedTuple):
    """The hardware and the profile to plan for."""

    hardware: Hardware
    profile: LoadedProfile
    #: One line each: the host, and why this profile.
    why: tuple[str, ...]


@dataclass(frozen=True)
class PlannedTask:
    """The task to plan, and the facts about its model and data."""

    kind: TaskType
    image: ImageModelType | None
    hours: float
    #: Parameters that the operator stated.
    params: int | None
    model: ModelFacts
    data: DatasetFacts
    #: In a container of a tournament: with its model there, its evaluation, and our picture trainer.
    tournament: TournamentTask | None = None

    def plan(self, hardware: Hardware, profile: LoadedProfile) -> TrainingPlan:
        from core.domain.evaluation import Era
        from core.planning.conditions import JobConditions
        from core.planning.plan import TaskSpec
        from core.planning.planner import plan_task, usable_hours
        from core.profile.resolve import resolve_profile
        from core.runs.run_files import tournament_reserve_s

        hours, rules = usable_hours(self.hours), self.tournament
        kl = rules.kl_coefficient if rules else None
        task = TaskSpec(task_type=self.kind, hours=hours, image_type=self.image, kl_coefficient=kl)
        conditions = JobConditions(hardware)
        own = resolve_profile(profile, self.kind, self.model, self.data.pictures)
        if rules:
            era = Era.TOURNAMENTS
            own = own.for_tournament(tournament_reserve_s(3600 * hours, self.image is not None))
            conditions = JobConditions(hardware, model_cached=True, publishes=False, era=era, pictures=True)
        stated = self.params
        return plan_task(
            task, self.model, self.data, hardware, own, conditions=conditions, stated_params=stated
        )

    def in_container(self, where: TargetOptions) -> TargetOptions:
        """Fill in where a tournament trains it; options count first."""
        from core.domain.tournament_rules import CPUS_PER_GPU, MEMORY_PER_GPU
        from miner.tournament.rules import gpus_of

        if self.tournament is None:
            return where
        count = gpus_of(self.tournament, self.model.params_total / 1e9)
        return replace(
            where,
            gpus=where.gpus or f"{count}xH100",
            cpu_cores=where.cpu_cores or CPUS_PER_GPU * count,
            memory=where.memory or show_bytes(MEMORY_PER_GPU * count),
            profile=where.profile or "steady",
        )


@dataclass(frozen=True)
class TaskOptions:
    """The options that describe a task."""

    model: Annotated[str, typer.Option(help="Name of a model, or a directory with its config.json.")]
    task_type: Annotated[
        str,
        typer.Option(
            help="Task type: instruct, chat, dpo, grpo, image, environment, or a validator's word; with "
            "--tournament also instruct-kl, instruct-large, continuous and the picture families.",
            autocompletion=options.complete_task_types,
        ),
    ]
    hours: Annotated[float, typer.Option(help="Time to the deadline.")]
    rows: Annotated[int | None, typer.Option(min=0, help="Number of training rows, or of images.")] = None
    dataset: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="File of rows, JSON or JSON lines.")
    ] = None
    params: Annotated[
        str | None, typer.Option(help="Number of parameters, e.g. 8B. Default: from the name.")
    ] = None
    image_type: Annotated[
        str | None,
        typer.Option(help="Type of an image model: sdxl, flux, z-image, … Default: from the name."),
    ] = None
    tournament: Annotated[
        bool,
        typer.Option(
            "--tournament",
            help="Plan as in a tournament's container: its H100s by the rules, steady.",
        ),
    ] = False

    def read(self) -> PlannedTask:
        rules = _tournament_task(self.task_type, self.model, self.image_type) if self.tournament else None
        if rules:
            kind, image = rules.kind, rules.image_type
        else:
            kind, image = _parse_task(self.task_type, self.model, self.image_type)
        data = _dataset_facts(kind, image, self.rows, self.dataset, self.hours)
        stated = _parse_params(self.params)
        model = _model_facts(self.model, stated, image)
        return PlannedTask(kind, image, self.hours, stated, model, data, rules)


@dataclass(frozen=True)
class TargetOptions:
    """The options that name the hardware and the profile to plan for."""

    gpus: Annotated[
        str | None,
        typer.Option(
            help="GPUs to plan for, e.g. 4xH100. Default: this host's, or the profile's hardware if it has "
            "none."
        ),
    ] = None
    cpu_cores: Annotated[
        int | None, typer.Option(min=1, help="Cores of the host. Default: FLEET_FILE, this host's, or 32.")
    ] = None
    memory: Annotated[
        str | None, typer.Option(help="Host memory, e.g. 512GB. Default: FLEET_FILE, this host's, or 256GB.")
    ] = None
    profile: Annotated[
        str | None,
        typer.Option(
            help="Name or path of a profile. Default: the one in force.",
            autocompletion=options.complete_profiles,
        ),
    ] = None
    directories: Annotated[
        list[Path] | None,
        typer.Option("--dir", help="Directory to search before PROFILE_DIR (repeatable)."),
    ] = None

    def read(self) -> PlanTarget:
        """Return the host from options, FLEET_FILE or this machine, and the profile that a daemon would use
        on it.
        """
        from core.domain.hardware import Hardware, parse_gpus
        from miner.offers.policies.load import ChosenName, active_config, inactive_text

        settings = load_settings()
        here = None if self.gpus else local_hardware(settings)
        try:
            found = active_config(settings, here or Hardware(gpus=parse_gpus(self.gpus or DEFAULT_GPUS)))
        except ConfigError:
            if self.profile is None:
                raise
            loaded = load_profile_from(self.profile, self.directories)
            why = f"profile {self.profile}: the one in force cannot be used"
        else:
            loaded = found.profile
            if self.profile or self.directories:
                loaded = load_profile_from(self.profile or found.profile.name, self.directories)
            where = "is in force" if here else "would be in force there"
            why = f"profile {loaded.name} {where}, because {found.why_profile}"
            if loaded.file != found.profile.file:
                chosen = ChosenName(found.profile.name, found.why_profile)
                why = inactive_text("profile", loaded.name, found.profile.name, chosen)
        hardware = here or Hardware(gpus=parse_gpus(self.gpus or loaded.hardware or DEFAULT_GPUS))
        hardware, host = _on_host(hardware, settings, here is not None, self.cpu_cores, self.memory)
        return PlanTarget(hardware, loaded, (host, why))


@with_options
def plan(
    asked: TaskOptions,
    where: TargetOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole plan as JSON.")] = False,
    write: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Directory to write the plan and the rendered configuration to."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Profile or plan.json to compare with: show only the differences.",
            autocompletion=options.complete_profiles,
        ),
    ] = None,
) -> None:
    """Show a task's plan: GPUs, memory, timeline, concessions and the configuration.

    Exit code 1 when the task cannot be done.
    """
    task = asked.read()
    where = task.in_container(where)
    target = where.read()
    made = task.plan(target.hardware, target.profile)
    if against is not None:
        _print_comparison(_plan_before(against, task, target, where.directories), made, as_json)
    elif as_json:
        echo(made.to_json())
    else:
        for line in target.why:
            typer.echo(line)
        from miner.cli.render.plan import plan_pages

        print_pages(plan_pages(made, list(_plans_on_fewer(made, task, target))))
    if write is not None:
        from miner.cli.render.plan import write_plan

        for file in write_plan(made, write):
            typer.echo(f"wrote {file}", err=True)
    raise typer.Exit(0 if made.verdict.feasible else 1)


def _plans_on_fewer(made: TrainingPlan, task: PlannedTask, target: PlanTarget) -> Iterator[TrainingPlan]:
    """Yield the plans for fewer GPUs of one node, the largest number first."""
    from core.planning.search.gpu_count import node_counts

    gpus = target.hardware.gpus
    counts = [count for count in node_counts(gpus.per_node) if count < made.gpus.count]
    for count in reversed(counts if made.gpus.nodes == 1 else []):
        plan = task.plan(target.hardware.model_copy(update={"gpus": gpus.take(count)}), target.profile)
        if not plan.verdict.feasible:
            return
        if plan.gpus.count == count:
            yield plan


def _plan_before(
    against: str, task: PlannedTask, target: PlanTarget, directories: list[Path] | None
) -> TrainingPlan:
    """Return the plan to compare with: a written one, or the one by another profile."""
    if against.endswith(".json"):
        return _read_plan(Path(against))
    return task.plan(target.hardware, load_profile_from(against, directories))


def _tournament_task(word: str, model: str, image_type: str | None) -> TournamentTask:
    """A kind of tournaments by its own word, or by those of tasks."""
    from miner.tournament.rules import TASKS

    if word in TASKS:
        return TASKS[word]
    kind, image = _parse_task(word, model, image_type)
    found = next((one for one in TASKS.values() if (one.kind, one.image_type) == (kind, image)), None)
    if found is None:
        rule = f"a tournament's task is one of {', '.join(TASKS)}"
        raise ConfigError("plan", [Problem("--task-type", word, rule)])
    return found


def _parse_task(word: str, model: str, image_type: str | None) -> tuple[TaskType, ImageModelType | None]:
    from core.domain.tasks import TASK_WORDS, ImageModelType, task_type_named
    from core.models.image_families import image_type_from_name

    kind = task_type_named(word)
    if kind is None:
        rule = f"a task type is one of {', '.join(TASK_WORDS)}"
        raise ConfigError("plan", [Problem("--task-type", word, rule)])
    if kind.is_text:
        return kind, None
    if image_type is None:
        return kind, image_type_from_name(model)
    if image_type not in [one.value for one in ImageModelType]:
        rule = f"an image type is one of {', '.join(one.value for one in ImageModelType)}"
        raise ConfigError("plan", [Problem("--image-type", image_type, rule)])
    return kind, ImageModelType(image_type)


def _parse_params(params: str | None) -> int | None:
    try:
        return parse_params(params) if params else None
    except ValueError as error:
        raise ConfigError("plan", [Problem("--params", params or "", str(error))]) from None


def _model_facts(name: str, stated: int | None, image: ImageModelType | None) -> ModelFacts:
    from core.models.identify import facts_from_config, facts_from_name

    config = Path(name) / "config.json"
    if image is None and config.is_file():
        return facts_from_config(read_json_object(config), name, stated)
    return facts_from_name(name, stated, image)


def _dataset_facts(
    kind: TaskType, image: ImageModelType | None, rows: int | None, dataset: Path | None, hours: float
) -> DatasetFacts:
    from core.data.facts import assumed_facts, facts_from_rows
    from core.data.rows import sample_rows
    from core.planning.planner import usable_hours

    if dataset is None or not kind.is_text:
        return assumed_facts(kind, rows, usable_hours(hours), image)
    sample, counted = sample_rows(dataset)
    return facts_from_rows(kind, sample, counted if rows is None else rows)


def _on_host(
    hardware: Hardware, settings: Settings, is_here: bool, cpu_cores: int | None, memory: str | None
) -> tuple[Hardware, str]:
    """Return the hardware with its host's cores and memory, and a line that describes it."""
    from miner.fleet.fleet_file import follow_fleet_file

    update: dict[str, object] = {}
    if settings.fleet_file and not is_here:
        update |= follow_fleet_file(settings.fleet_file).current.content.host.facts()
    if cpu_cores is not None:
        update |= {"cpu_cores": cpu_cores, "cores": ()}
    if memory is not None:
        try:
            update["memory_bytes"] = parse_bytes(memory)
        except ValueError as error:
            raise ConfigError("plan", [Problem("--memory", memory, str(error))]) from None
    whole = hardware.model_copy(update=update)
    assumed = [] if is_here else [name for name in ("cpu_cores", "memory_bytes") if name not in update]
    shown = {"cpu_cores": "cores", "memory_bytes": "memory"}
    how = " (this host)" if is_here else ""
    if assumed:
        how = f" ({' and '.join(shown[name] for name in assumed)} assumed)"
    host = f"host: {whole.gpus}, {whole.cpu_cores} cores, {show_bytes(whole.memory_bytes)}"
    return whole, f"{host}{how}"


def _print_comparison(before: TrainingPlan, after: TrainingPlan, as_json: bool) -> None:
    from core.recipes.dry_run import plan_differences
    from miner.cli.render.plan import comparison_pages

    if as_json:
        echo_json([one._asdict() for one in plan_differences(before, after)])
        return
    print_pages(comparison_pages(before, after))


def _read_plan(path: Path) -> TrainingPlan:
    from core.planning.plan import TrainingPlan

    try:
        return TrainingPlan.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        rule = f"cannot be read ({error.strerror}); give a plan.json that `plan --write` made, or a profile"
        raise ConfigError("plan", [Problem("--against", str(path), rule)]) from None
    except ValueError as error:
        rule = f"is not a plan of this version: {str(error).splitlines()[0]}"
        raise ConfigError("plan", [Problem("--against", str(path), rule)]) from None
