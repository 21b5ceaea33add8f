"""`god-miner profile`: what tuning profiles there are, what they say, and what becomes of it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from miner.commands import completion
from miner.commands.chosen import chosen_here, chosen_or_why_not, profile_places, tell_where_not_in_force
from miner.commands.output import terminal

if TYPE_CHECKING:
    from rich.table import Table

    from core.profile.explain import Finding, Remark, Setting, Subject
    from core.profile.load import LoadedProfile

app = typer.Typer(help="Tuning profiles: list, show, check, compare, explain.", no_args_is_help=True)

Name = Annotated[
    str, typer.Argument(help="A profile's name, or the path of a file.", autocompletion=completion.profiles)
]
OrInForce = Annotated[
    str | None,
    typer.Argument(
        help="A profile's name, or the path of a file. Unset: the one in force.",
        autocompletion=completion.profiles,
    ),
]
Dirs = Annotated[
    list[Path] | None,
    typer.Option(
        "--dir", help="Look here first, then in PROFILE_DIR, then at the shipped ones; may be repeated."
    ),
]
Task = Annotated[
    str | None,
    typer.Option("--task", help="instruct, chat, dpo, grpo or image.", autocompletion=completion.task_types),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", help="A model's name, for its size and family; for images its type (sdxl, flux …)."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]

DEFAULT_MODEL = "meta-llama/Llama-3.1-8B"


@app.command("list")
def list_profiles(directories: Dirs = None, as_json: AsJson = False) -> None:
    """Every profile that can be called by name, and which one is in force."""
    from core.errors import ConfigError
    from core.profile.load import load_profile, profile_files

    rows, places = [], profile_places(directories)
    for name, file in profile_files(places).items():
        try:
            profile = load_profile(str(file), places)
            rows.append((name, profile.hardware or "", profile.description, str(file)))
        except ConfigError as error:
            rows.append((name, "", f"broken: {error.problems[0]}", str(file)))
    keys = ("name", "hardware", "description", "file")
    found = chosen_or_why_not()
    if as_json:
        used = found and str(found.profile.file)
        _print_json([{**dict(zip(keys, row, strict=True)), "in_force": row[-1] == used} for row in rows])
        return
    _print_table(_table(keys[:3], [row[:3] for row in rows]))
    if found is not None:
        typer.echo(f"in force: {found.profile.name}, because {found.why_profile}")


@app.command()
def show(
    name: OrInForce = None,
    task: Task = None,
    model: Model = None,
    defaults: Annotated[bool, typer.Option("--defaults", help="Also what nobody wrote.")] = False,
    directories: Dirs = None,
    as_json: AsJson = False,
) -> None:
    """What a profile comes to for a task and a model: every value and the line it comes from."""
    from core.profile.explain import settings
    from core.profile.resolve import resolve

    profile, about = _load_or_in_force(name, directories, as_json), _subject(task, model)
    resolved = resolve(profile, about.task_type, about.model)
    found = settings(resolved, defaults)
    if as_json:
        _print_json(
            {
                "profile": resolved.name,
                "digest": resolved.digest,
                "sections": resolved.sections,
                "for": about.words,
                "settings": [setting._asdict() for setting in found],
            }
        )
        return
    typer.echo(f"{profile.name} for {about.words}; sections: {', '.join(resolved.sections) or 'none'}")
    rows = [(setting.path, _value(setting), setting.origin) for setting in found]
    _print_table(_table(("key", "value", "from"), rows))


@app.command()
def check(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Names or paths; none: all by name.", autocompletion=completion.profiles),
    ] = None,
    directories: Dirs = None,
    as_json: AsJson = False,
) -> None:
    """Every section against representative tasks and models; exit code 1 when something is wrong."""
    from core.profile.explain import Level
    from core.profile.load import profile_files

    start = time.perf_counter()
    places = profile_places(directories)
    found = {name: _findings(name, directories) for name in names or profile_files(places)}
    seconds = time.perf_counter() - start
    wrong = any(finding.level is Level.ERROR for each in found.values() for finding in each)
    if as_json:
        _print_json({name: [finding._asdict() for finding in each] for name, each in found.items()})
    else:
        for name, each in found.items():
            typer.echo(f"{name}: {_tally(each)}")
            for finding in each:
                typer.echo(f"  {finding.level.value}: {finding.where}: {finding.message}")
            if names and not any(one.level is Level.ERROR for one in each):
                tell_where_not_in_force("profile", name)
        typer.echo(f"{len(found)} checked in {seconds:.1f} s")
    raise typer.Exit(1 if wrong else 0)


@app.command()
def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="The reference page instead.")] = False,
) -> None:
    """JSON Schema of a profile file, for editors."""
    from core.profile.docs import json_schema
    from core.profile.docs import markdown as reference

    typer.echo(reference() if markdown else json.dumps(json_schema(), indent=2, ensure_ascii=False))


@app.command()
def diff(
    left: Name,
    right: Name,
    task: Task = None,
    model: Model = None,
    directories: Dirs = None,
    as_json: AsJson = False,
) -> None:
    """Where two profiles differ for a task and a model."""
    from core.profile.display import in_words
    from core.profile.explain import diff as compare

    about = _subject(task, model)
    found = compare(_load(left, directories), _load(right, directories), about)
    if as_json:
        _print_json([each._asdict() for each in found])
        return
    typer.echo(f"{left} and {right} for {about.words}: {len(found)} values differ")
    rows = [
        (
            each.path,
            in_words(each.path, each.left),
            in_words(each.path, each.right),
            f"{each.left_origin} | {each.right_origin}",
        )
        for each in found
    ]
    _print_table(_table(("key", left, right, "from"), rows))


@app.command()
def explain(
    name: OrInForce = None,
    task: Task = None,
    model: Model = None,
    directories: Dirs = None,
    as_json: AsJson = False,
) -> None:
    """What today's engines make of the values: renamed, without effect, doubtful, done by ourselves."""
    from core.profile.explain import explain as remarks_of

    profile = _load_or_in_force(name, directories, as_json)
    remarks = remarks_of(profile, [_subject(task, model)] if task or model else None)
    notes = [note for layer in profile.layers for note in layer.content.notes]
    files = [layer.file.name for layer in profile.layers]
    if as_json:
        _print_json({"files": files, "notes": notes, "remarks": [each._asdict() for each in remarks]})
        return
    typer.echo(f"{profile.name}: {' ← '.join(reversed(files))}")
    for remark in remarks:
        typer.echo(_remark(remark))
    for note in notes:
        typer.echo(f"not set: {note}")


def _value(setting: Setting) -> str:
    from core.profile.display import in_words

    text = in_words(setting.path, setting.value)
    return text if setting.unscaled is None else f"{text} (scaled from {setting.unscaled:g})"


def _remark(remark: Remark) -> str:
    from core.profile.display import in_words

    who = "" if len(remark.subjects) > 3 else f" [{', '.join(remark.subjects)}]"
    value = in_words(remark.path, remark.value)
    return f"{remark.path} = {value} ({remark.origin}), {remark.effect.value}: {remark.text}{who}"


def _load(name: str, directories: list[Path] | None) -> LoadedProfile:
    from core.profile.load import load_profile

    return load_profile(name, profile_places(directories))


def _load_or_in_force(name: str | None, directories: list[Path] | None, as_json: bool) -> LoadedProfile:
    """Tell, but not programs, which one is in force, where it is another."""
    if name is None:
        found = chosen_here()
        if not as_json:
            typer.echo(f"{found.profile.name} is in force, because {found.why_profile}", err=True)
        return found.profile
    loaded = _load(name, directories)
    if not as_json:
        tell_where_not_in_force("profile", name)
    return loaded


def _subject(task: str | None, model: str | None) -> Subject:
    from core.errors import ConfigError, Problem
    from core.model_facts import facts_from_name
    from core.model_names import image_type_from_name
    from core.profile.explain import Subject
    from core.profile.words import TASK_WORDS
    from core.tasks import ImageModelType, TaskType

    image = next((kind for kind in ImageModelType if kind.value == model), None)
    task_type = TASK_WORDS.get(task or ("image" if image else "instruct"))
    if task_type is None:
        words = ", ".join(TASK_WORDS)
        raise ConfigError("--task", [Problem("--task", str(task), f"a task is one of {words}")])
    if task_type is TaskType.IMAGE:
        image = image or image_type_from_name(model or "sdxl")
        return Subject(task_type, facts_from_name(model or image.value, None, image))
    return Subject(task_type, facts_from_name(model or DEFAULT_MODEL))


def _findings(name: str, directories: list[Path] | None) -> list[Finding]:
    from core.errors import ConfigError
    from core.planning.check import plan_check
    from core.profile.explain import Finding, Level
    from core.profile.explain import check as check_profile

    try:
        return check_profile(_load(name, directories), plan_check)
    except ConfigError as error:
        return [
            Finding(Level.ERROR, problem.where, f"{problem.value} {problem.rule}".strip())
            for problem in error.problems
        ]


def _tally(findings: list[Finding]) -> str:
    errors = sum(finding.level.value == "error" for finding in findings)
    return f"{errors} errors, {len(findings) - errors} warnings" if findings else "fine"


def _table(keys: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for key in keys:
        table.add_column(key, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _print_table(table: Table) -> None:
    terminal().print(table)


def _print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
