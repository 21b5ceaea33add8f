"""`god-miner plan`: what a task would become here, in memory, in time and in the engine's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from miner.commands import completion
from miner.commands.chosen import gpus_here, profile_places
from miner.commands.output import say, say_json, terminal

if TYPE_CHECKING:
    from core.data import DatasetFacts
    from core.hardware import Hardware
    from core.models import ModelFacts
    from core.plan import TrainingPlan
    from core.profile.load import LoadedProfile
    from core.tasks import ImageModelType, TaskType
    from miner.settings import Settings

#: What is planned for where the settings name no GPU, this host has none, and the profile does not say.
DEFAULT_GPUS = "4xH100"


class Target(NamedTuple):
    """What is planned for, and by which profile."""

    hardware: Hardware
    profile: LoadedProfile
    #: One line each: the host, and why this profile.
    why: tuple[str, ...]


Model = Annotated[str, typer.Option(help="A model's name, or a folder with its config.json.")]
TaskWord = Annotated[
    str,
    typer.Option(
        help="instruct, chat, dpo, grpo, image, or a validator's word.",
        autocompletion=completion.task_types,
    ),
]
Hours = Annotated[float, typer.Option(help="From now to the deadline.")]
Rows = Annotated[int | None, typer.Option(min=0, help="Training rows; images: pictures.")]
Dataset = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="A file of rows, JSON or JSON lines.")
]
Gpus = Annotated[
    str | None,
    typer.Option(help="Like 4xH100. Unset: this host's, or the profile's hardware where it has none."),
]
CpuCores = Annotated[
    int | None, typer.Option(min=1, help="Cores of the host. Unset: FLEET_FILE, this host's, or 32.")
]
Memory = Annotated[
    str | None, typer.Option(help="Memory of the host, like 512GB. Unset: as with the cores, or 256GB.")
]
Profile = Annotated[
    str | None,
    typer.Option(
        help="A profile's name, or the path of a file. Unset: the one that is in force.",
        autocompletion=completion.profiles,
    ),
]
Params = Annotated[str | None, typer.Option(help="Parameters, like 8B, where the name does not say.")]
ImageWord = Annotated[str | None, typer.Option(help="sdxl, flux, z-image …; unset: from the name.")]
AsJson = Annotated[bool, typer.Option("--json", help="The whole plan, for programs.")]
WriteTo = Annotated[
    Path | None, typer.Option(file_okay=False, help="Write plan and rendered configuration here.")
]
Launcher = Annotated[str, typer.Option(help="With --write, what starts it: accelerate, torchrun or slurm.")]
Nodes = Annotated[
    int, typer.Option(min=1, help="With --launcher slurm: machines that share the plan's GPUs.")
]
Against = Annotated[
    str | None,
    typer.Option(
        help="Show only what differs from this: a profile, or a plan.json written before.",
        autocompletion=completion.profiles,
    ),
]
Dirs = Annotated[list[Path] | None, typer.Option("--dir", help="Look here for profiles before PROFILE_DIR.")]


def plan(
    model: Model,
    task_type: TaskWord,
    hours: Hours,
    rows: Rows = None,
    dataset: Dataset = None,
    gpus: Gpus = None,
    cpu_cores: CpuCores = None,
    memory: Memory = None,
    profile: Profile = None,
    params: Params = None,
    image_type: ImageWord = None,
    as_json: AsJson = False,
    write: WriteTo = None,
    launcher: Launcher = "accelerate",
    nodes: Nodes = 1,
    against: Against = None,
    directories: Dirs = None,
) -> None:
    """What a task would become: GPUs, memory, timeline, what had to give way, and the configuration.

    Exit code 1 when the task cannot be promised.
    """
    kind, image = _task(task_type, model, image_type)
    facts = _model(model, params, image)
    data = _data(kind, image, rows, dataset, hours)

    target = _target(gpus, cpu_cores, memory, profile, directories)

    def planned(by: LoadedProfile) -> TrainingPlan:
        return _planned(kind, image, hours, facts, data, target.hardware, by, params)

    found = planned(target.profile)
    if against is not None:
        is_plan = against.endswith(".json")
        before = _read_plan(Path(against)) if is_plan else planned(_load(against, directories))
        _compare(before, found, as_json)
    elif as_json:
        say(found.to_json())
    else:
        for line in target.why:
            typer.echo(line)
        _show(found)
    if write is not None:
        _write(found, write, launcher, nodes)
    raise typer.Exit(0 if found.verdict.feasible else 1)


def _planned(
    kind: TaskType,
    image: ImageModelType | None,
    hours: float,
    facts: ModelFacts,
    data: DatasetFacts,
    hardware: Hardware,
    loaded: LoadedProfile,
    params: str | None,
) -> TrainingPlan:
    from core.plan_parts import TaskSpec
    from core.planning.planner import plan as make
    from core.planning.planner import usable_hours
    from core.units import parse_params

    task = TaskSpec(task_type=kind, hours=usable_hours(hours), image_type=image)
    stated = parse_params(params) if params else None
    return make(task, facts, data, hardware, loaded, stated_params=stated)


def _task(word: str, model: str, image_type: str | None) -> tuple[TaskType, ImageModelType | None]:
    from core.errors import ConfigError, Problem
    from core.model_names import image_type_from_name
    from core.profile.words import TASK_WORDS
    from core.tasks import ImageModelType, TaskType

    known = {**TASK_WORDS, **{kind.value.lower(): kind for kind in TaskType}}
    kind = known.get(word.lower())
    if kind is None:
        rule = f"a task type is one of {', '.join(TASK_WORDS)}"
        raise ConfigError("plan", [Problem("--task-type", word, rule)])
    if kind is not TaskType.IMAGE:
        return kind, None
    if image_type is None:
        return kind, image_type_from_name(model)
    if image_type not in [one.value for one in ImageModelType]:
        rule = f"an image type is one of {', '.join(one.value for one in ImageModelType)}"
        raise ConfigError("plan", [Problem("--image-type", image_type, rule)])
    return kind, ImageModelType(image_type)


def _model(name: str, params: str | None, image: ImageModelType | None) -> ModelFacts:
    from core.errors import ConfigError, Problem
    from core.model_facts import facts_from_config, facts_from_name
    from core.units import parse_params
    from miner.rows import read_json_object

    try:
        stated = parse_params(params) if params else None
    except ValueError as error:
        raise ConfigError("plan", [Problem("--params", params or "", str(error))]) from None
    config = Path(name) / "config.json"
    if image is None and config.is_file():
        return facts_from_config(read_json_object(config), name, stated)
    return facts_from_name(name, stated, image)


def _data(
    kind: TaskType, image: ImageModelType | None, rows: int | None, dataset: Path | None, hours: float
) -> DatasetFacts:
    from core.data_facts import assumed_facts
    from core.planning.planner import usable_hours
    from core.row_facts import facts_from_rows
    from core.tasks import TaskType
    from miner.rows import read_rows

    if dataset is None or kind is TaskType.IMAGE:
        return assumed_facts(kind, rows, usable_hours(hours), image)
    sample, counted = read_rows(dataset)
    return facts_from_rows(kind, sample, counted if rows is None else rows)


def _target(
    gpus: str | None,
    cpu_cores: int | None,
    memory: str | None,
    profile: str | None,
    directories: list[Path] | None,
) -> Target:
    """The host of the options, of FLEET_FILE or this machine, and what a daemon would plan with on it."""
    from core.errors import ConfigError
    from core.hardware import Hardware, parse_gpus
    from miner.offers.policies.choice import Chosen, in_force, not_in_force
    from miner.settings import load_settings

    settings = load_settings()
    here = None if gpus else gpus_here(settings)
    try:
        found = in_force(settings, here or Hardware(gpus=parse_gpus(gpus or DEFAULT_GPUS)))
    except ConfigError:
        if profile is None:
            raise
        loaded, why = _load(profile, directories), f"profile {profile}: the one in force cannot be used"
    else:
        loaded = found.profile
        if profile or directories:
            loaded = _load(profile or found.profile.name, directories)
        where = "is in force" if here else "would be in force there"
        why = f"profile {loaded.name} {where}, because {found.why_profile}"
        if loaded.file != found.profile.file:
            chosen = Chosen(found.profile.name, found.why_profile)
            why = not_in_force("profile", loaded.name, found.profile.name, chosen)
    hardware = here or Hardware(gpus=parse_gpus(gpus or loaded.hardware or DEFAULT_GPUS))
    return _on_host(hardware, settings, here is not None, cpu_cores, memory, loaded, why)


def _on_host(
    hardware: Hardware,
    settings: Settings,
    is_here: bool,
    cpu_cores: int | None,
    memory: str | None,
    loaded: LoadedProfile,
    why: str,
) -> Target:
    from core.errors import ConfigError, Problem
    from core.units import parse_bytes, show_bytes
    from miner.fleet.fleet_file import follow

    update: dict[str, Any] = {}
    if settings.fleet_file and not is_here:
        update |= follow(settings.fleet_file).current().terms.host.facts()
    if cpu_cores is not None:
        update["cpu_cores"] = cpu_cores
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
    return Target(whole, loaded, (f"{host}{how}", why))


def _load(name: str, directories: list[Path] | None) -> LoadedProfile:
    from core.profile.load import load_profile

    return load_profile(name, profile_places(directories))


def _show(found: TrainingPlan) -> None:
    from miner.plan_view import pages

    console = terminal()
    for page in pages(found, console.width):
        console.print(page)


def _compare(before: TrainingPlan, after: TrainingPlan, as_json: bool) -> None:
    from miner.plan_compare import differences
    from miner.plan_view import comparison

    if as_json:
        say_json([one._asdict() for one in differences(before, after)])
        return
    console = terminal()
    for page in comparison(before, after):
        console.print(page)


def _read_plan(path: Path) -> TrainingPlan:
    from core.errors import ConfigError, Problem
    from core.plan import TrainingPlan

    try:
        return TrainingPlan.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        rule = f"can't be read ({error.strerror}); give a plan.json that `plan --write` made, or a profile"
        raise ConfigError("plan", [Problem("--against", str(path), rule)]) from None
    except ValueError as error:
        rule = f"is no plan of this version: {str(error).splitlines()[0]}"
        raise ConfigError("plan", [Problem("--against", str(path), rule)]) from None


def _write(found: TrainingPlan, folder: Path, launcher: str, nodes: int) -> None:
    """The plan always; what an engine would read only where the plan can be promised."""
    from core.recipes.launchers import Launcher, parse
    from miner.plan_files import write_plan
    from miner.settings import load_settings

    kind, python = parse(launcher), "python"
    if kind is not Launcher.ACCELERATE:
        # Not in a container: the training environment of this installation.
        python = str(load_settings().trainer_python or python)
    for file in write_plan(found, folder, kind, nodes, python):
        typer.echo(f"wrote {file}", err=True)
