"""`god-miner plan`: what a task would become here, in memory, in time and in the engine's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from core.data import DatasetFacts
    from core.hardware import Hardware
    from core.models import ModelFacts
    from core.plan import TrainingPlan
    from core.profile.load import LoadedProfile
    from core.tasks import ImageModelType, TaskType

DEFAULT_PROFILE = "h100x4"


def plan(
    model: Annotated[str, typer.Option(help="A model's name, or a folder with its config.json.")],
    task_type: Annotated[str, typer.Option(help="instruct, chat, dpo, grpo, image, or a validator's word.")],
    hours: Annotated[float, typer.Option(help="From now to the deadline.")],
    rows: Annotated[int | None, typer.Option(min=0, help="Training rows; images: pictures.")] = None,
    dataset: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A file of rows, JSON or JSON lines.")
    ] = None,
    gpus: Annotated[str | None, typer.Option(help="Like 4xH100. Unset: the profile's own hardware.")] = None,
    profile: Annotated[str, typer.Option(help="A profile's name, or the path of a file.")] = DEFAULT_PROFILE,
    params: Annotated[
        str | None, typer.Option(help="Parameters, like 8B, where the name does not say.")
    ] = None,
    image_type: Annotated[
        str | None, typer.Option(help="sdxl, flux, z-image …; unset: from the name.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole plan, for programs.")] = False,
    write: Annotated[
        Path | None, typer.Option(file_okay=False, help="Write plan and rendered configuration here.")
    ] = None,
    launcher: Annotated[
        str, typer.Option(help="With --write, what starts it: accelerate, torchrun or slurm.")
    ] = "accelerate",
    nodes: Annotated[
        int, typer.Option(min=1, help="With --launcher slurm: machines that share the plan's GPUs.")
    ] = 1,
    against: Annotated[
        str | None,
        typer.Option(help="Show only what differs from this: a profile, or a plan.json written before."),
    ] = None,
    directories: Annotated[
        list[Path] | None,
        typer.Option("--dir", help="Look here for profiles first.", envvar="GOD_MINER_PROFILE_DIR"),
    ] = None,
) -> None:
    """What a task would become: GPUs, memory, timeline, what had to give way, and the configuration.

    Exit code 1 when the task cannot be promised.
    """
    from core.profile.load import load_profile

    kind, image = _task(task_type, model, image_type)
    facts = _model(model, params, image)
    data = _data(kind, image, rows, dataset, hours)

    def planned(name: str) -> TrainingPlan:
        return _planned(kind, image, hours, facts, data, gpus, load_profile(name, directories or ()), params)

    found = planned(profile)
    if against is not None:
        _compare(_read_plan(Path(against)) if against.endswith(".json") else planned(against), found, as_json)
    elif as_json:
        typer.echo(found.to_json())
    else:
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
    gpus: str | None,
    loaded: LoadedProfile,
    params: str | None,
) -> TrainingPlan:
    from core.plan_parts import TaskSpec
    from core.planning.planner import plan as make
    from core.planning.planner import usable_hours
    from core.units import parse_params

    task = TaskSpec(task_type=kind, hours=usable_hours(hours), image_type=image)
    stated = parse_params(params) if params else None
    return make(task, facts, data, _hardware(gpus, loaded), loaded, stated_params=stated)


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
    from core.row_facts import facts_from_rows
    from core.tasks import TaskType
    from miner.rows import read_rows

    if dataset is None or kind is TaskType.IMAGE:
        return assumed_facts(kind, rows, hours, image)
    sample, counted = read_rows(dataset)
    return facts_from_rows(kind, sample, counted if rows is None else rows)


def _hardware(gpus: str | None, loaded: LoadedProfile) -> Hardware:
    from core.hardware import Hardware, parse_gpus

    return Hardware(gpus=parse_gpus(gpus or loaded.hardware or "4xH100"))


def _show(found: TrainingPlan) -> None:
    from rich.console import Console

    from miner.plan_view import pages

    console = Console(markup=False, highlight=False)
    for page in pages(found, console.width):
        console.print(page)


def _compare(before: TrainingPlan, after: TrainingPlan, as_json: bool) -> None:
    import json

    from rich.console import Console

    from miner.plan_compare import differences
    from miner.plan_view import comparison

    if as_json:
        typer.echo(json.dumps([one._asdict() for one in differences(before, after)], indent=2))
        return
    console = Console(markup=False, highlight=False)
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
