"""`god-miner profile`: list, show, check, compare and explain tuning profiles."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from core.domain.errors import ConfigError, Problem
from miner.cli import options
from miner.cli.options import (
    AsJson,
    load_profile_from,
    local_policy_and_profile,
    local_policy_and_profile_or_warn,
    problem_findings,
    profile_directories,
    warn_if_not_in_force,
)
from miner.cli.output import echo_json, findings_line, print_table

if TYPE_CHECKING:
    from core.profile.explain import ProfileFinding, ProfileRemark, ProfileSetting, Subject
    from core.profile.resolve import LoadedProfile

app = typer.Typer(help="List, show, check, compare and explain tuning profiles.", no_args_is_help=True)

Name = Annotated[
    str,
    typer.Argument(help="Name or path of a profile.", autocompletion=options.complete_profiles),
]
OrInForce = Annotated[
    str | None,
    typer.Argument(
        help="Name or path of a profile. Default: the one in force.",
        autocompletion=options.complete_profiles,
    ),
]
Dirs = Annotated[
    list[Path] | None,
    typer.Option("--dir", help="Directory to search before PROFILE_DIR (repeatable)."),
]
Task = Annotated[
    str | None,
    typer.Option(
        "--task",
        help="Task type: instruct, chat, dpo, grpo or image.",
        autocompletion=options.complete_task_types,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", help="Name of a model, for its size and family; for images its type (sdxl, flux, …)."
    ),
]
Pictures = Annotated[
    int | None,
    typer.Option(min=1, help="Number of an image task's pictures, which some sections depend on."),
]

DEFAULT_MODEL = "meta-llama/Llama-3.1-8B"


@app.command("list")
def list_profiles(directories: Dirs = None, as_json: AsJson = False) -> None:
    """List every profile that can be named, and which one is in force."""
    from core.profile.resolve import load_profile, profile_files

    rows, places = [], profile_directories(directories)
    for name, file in profile_files(places).items():
        try:
            profile = load_profile(str(file), places)
            rows.append((name, profile.hardware or "", profile.description, str(file)))
        except ConfigError as error:
            rows.append((name, "", f"broken: {error.problems[0]}", str(file)))
    keys = ("name", "hardware", "description", "file")
    found = local_policy_and_profile_or_warn()
    if as_json:
        used = found and str(found.profile.file)
        echo_json([{**dict(zip(keys, row, strict=True)), "in_force": row[-1] == used} for row in rows])
        return
    print_table(keys[:3], [row[:3] for row in rows])
    if found is not None:
        typer.echo(f"in force: {found.profile.name}, because {found.why_profile}")


@app.command()
def show(
    name: OrInForce = None,
    task: Task = None,
    model: Model = None,
    pictures: Pictures = None,
    defaults: Annotated[bool, typer.Option("--defaults", help="Include defaults.")] = False,
    directories: Dirs = None,
    as_json: AsJson = False,
) -> None:
    """Show a profile resolved for a task and a model: every value and the line it comes from."""
    from core.profile.explain import profile_settings
    from core.profile.resolve import resolve_profile

    profile = _load_or_in_force(name, directories, as_json)
    about = _subject(task, model, pictures)
    resolved = resolve_profile(profile, about.task_type, about.model, about.pictures)
    found = profile_settings(resolved, defaults)
    if as_json:
        echo_json(
            {
                "profile": resolved.name,
                "digest": resolved.digest,
                "sections": resolved.sections,
                "for": about.label,
                "settings": [setting._asdict() for setting in found],
            }
        )
        return
    typer.echo(f"{profile.name} for {_described(about)}; sections: {', '.join(resolved.sections) or 'none'}")
    rows = [(setting.path, _show_value(setting), setting.origin) for setting in found]
    print_table(("key", "value", "from"), rows)


@app.command()
def check(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names or paths. Default: all that have a name.", autocompletion=options.complete_profiles
        ),
    ] = None,
    directories: Dirs = None,
    as_json: AsJson = False,
) -> None:
    """Check every section against typical tasks and models. Exit code 1 if something is wrong."""
    from core.profile.explain import ProfileFindingLevel
    from core.profile.resolve import profile_files

    start = time.perf_counter()
    places = profile_directories(directories)
    found = {name: _findings(name, directories) for name in names or profile_files(places)}
    seconds = time.perf_counter() - start
    wrong = any(finding.level is ProfileFindingLevel.ERROR for each in found.values() for finding in each)
    if as_json:
        echo_json({name: [finding._asdict() for finding in each] for name, each in found.items()})
    else:
        for name, each in found.items():
            typer.echo(f"{name}: {findings_line(each)}")
            for finding in each:
                typer.echo(f"  {finding.level.value}: {finding.where}: {finding.message}")
            if names and not any(one.level is ProfileFindingLevel.ERROR for one in each):
                warn_if_not_in_force("profile", name)
        typer.echo(f"{len(found)} checked in {seconds:.1f} s")
    raise typer.Exit(1 if wrong else 0)


@app.command()
def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the reference page instead.")] = False,
) -> None:
    """Print the JSON Schema of a profile file, for editors."""
    from core.profile.docs import json_schema
    from core.profile.docs import markdown as reference

    typer.echo(reference() if markdown else json.dumps(json_schema(), indent=2, ensure_ascii=False))


@app.command()
def diff(
    left: Name,
    right: Name,
    task: Task = None,
    model: Model = None,
    pictures: Pictures = None,
    directories: Dirs = None,
    as_json: AsJson = False,
) -> None:
    """Show where two profiles differ for a task and a model."""
    from core.profile.explain import diff_profiles as compare
    from core.profile.explain import format_value

    about = _subject(task, model, pictures)
    found = compare(load_profile_from(left, directories), load_profile_from(right, directories), about)
    if as_json:
        echo_json([each._asdict() for each in found])
        return
    typer.echo(f"{left} and {right} for {_described(about)}: {len(found)} values differ")
    rows = [
        (
            each.path,
            format_value(each.path, each.left),
            format_value(each.path, each.right),
            f"{each.left_origin} | {each.right_origin}",
        )
        for each in found
    ]
    print_table(("key", left, right, "from"), rows)


@app.command()
def explain(
    name: OrInForce = None,
    task: Task = None,
    model: Model = None,
    pictures: Pictures = None,
    directories: Dirs = None,
    as_json: AsJson = False,
) -> None:
    """Explain how the engines treat each value: renamed, without effect, doubtful, done by us."""
    from core.profile.explain import explain_profile as remarks_of

    profile = _load_or_in_force(name, directories, as_json)
    about = [_subject(task, model, pictures)] if task or model or pictures else None
    remarks = remarks_of(profile, about)
    notes = [note for layer in profile.layers for note in layer.content.notes]
    files = [layer.file.name for layer in profile.layers]
    if as_json:
        echo_json({"files": files, "notes": notes, "remarks": [each._asdict() for each in remarks]})
        return
    typer.echo(f"{profile.name}: {' ← '.join(reversed(files))}")
    for remark in remarks:
        typer.echo(_remark_line(remark))
    for note in notes:
        typer.echo(f"not set: {note}")


def _show_value(setting: ProfileSetting) -> str:
    from core.profile.explain import format_value

    text = format_value(setting.path, setting.value)
    return text if setting.unscaled is None else f"{text} (scaled from {setting.unscaled:g})"


def _remark_line(remark: ProfileRemark) -> str:
    from core.profile.explain import format_value

    who = "" if len(remark.subjects) > 3 else f" [{', '.join(remark.subjects)}]"
    value = format_value(remark.path, remark.value)
    return f"{remark.path} = {value} ({remark.origin}), {remark.effect.value}: {remark.text}{who}"


def _load_or_in_force(name: str | None, directories: list[Path] | None, as_json: bool) -> LoadedProfile:
    """Load the profile; warn people, not programs, if another one is in force."""
    if name is None:
        found = local_policy_and_profile()
        if not as_json:
            typer.echo(f"{found.profile.name} is in force, because {found.why_profile}", err=True)
        return found.profile
    loaded = load_profile_from(name, directories)
    if not as_json:
        warn_if_not_in_force("profile", name)
    return loaded


def _described(about: Subject) -> str:
    from core.data.facts import TYPICAL_PICTURES

    unknown = not about.task_type.is_text and about.pictures is None
    return f"{about.label}, {TYPICAL_PICTURES} pictures assumed" if unknown else about.label


def _subject(task: str | None, model: str | None, pictures: int | None) -> Subject:
    from core.domain.tasks import TASK_WORDS, ImageModelType
    from core.models.identify import facts_from_name
    from core.models.image_families import image_type_from_name
    from core.profile.explain import Subject

    image = next((kind for kind in ImageModelType if kind.value == model), None)
    task_type = TASK_WORDS.get(task or ("image" if image else "instruct"))
    if task_type is None:
        words = ", ".join(TASK_WORDS)
        raise ConfigError("--task", [Problem("--task", str(task), f"a task is one of {words}")])
    if not task_type.is_text:
        image = image or image_type_from_name(model or "sdxl")
        return Subject(task_type, facts_from_name(model or image.value, None, image), pictures)
    if pictures is not None:
        rule = "only image tasks have pictures: add --task image, or an image model type as --model"
        raise ConfigError("--pictures", [Problem("--pictures", str(pictures), rule)])
    return Subject(task_type, facts_from_name(model or DEFAULT_MODEL))


def _findings(name: str, directories: list[Path] | None) -> list[ProfileFinding]:
    from core.profile.explain import check_profile
    from core.recipes.dry_run import check_profile_plan

    try:
        return check_profile(load_profile_from(name, directories), check_profile_plan)
    except ConfigError as error:
        return problem_findings(error)
