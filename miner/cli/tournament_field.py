"""`god-miner tournament field`: what last week's entries trained with, beside our plans."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from miner.cli.options import AsJson, load_settings
from miner.cli.output import echo, echo_json, print_pages

if TYPE_CHECKING:
    from miner.settings import Settings

app = typer.Typer(no_args_is_help=True, help="The field: what others' entries trained with.")


class FieldKind(StrEnum):
    """Kinds of tournaments whose entries leave figures of a training."""

    TEXT = "text"
    IMAGE = "image"
    ENVIRONMENT = "environment"


Kinds = Annotated[
    list[FieldKind] | None,
    typer.Option("--kind", help="Tournament kind (repeatable). Default: text and image."),
]
TournamentId = Annotated[
    str | None,
    typer.Option("--tournament", help="Tournament id, e.g. tourn_…_20261116. Default: the latest."),
]
Ranks = Annotated[int, typer.Option(min=1, help="Entries of each task, best first.")]
Past = Annotated[
    int, typer.Option(min=0, help="Also results of so many earlier tournaments of each kind, for `odds`.")
]
To = Annotated[
    Path | None,
    typer.Option(file_okay=False, help="Directory to save to. Default: DATA_DIR/tournament/field."),
]
From = Annotated[
    Path | None,
    typer.Option(
        "--from",
        file_okay=False,
        help="Directory that `pull --to` saved, or folders with an entry's own files.",
    ),
]
Family = Annotated[str | None, typer.Option(help="Only this family or type of task.")]
Hotkey = Annotated[
    str | None, typer.Option(help="Also count the first places and wins of this hotkey in what was pulled.")
]
Api = Annotated[str | None, typer.Option(help="The public API. Default: PUBLIC_API_URL.")]
Hub = Annotated[str | None, typer.Option(help="The hub. Default: HF_ENDPOINT.")]


@app.callback()
def field() -> None:
    """The field: what others' entries trained with."""


@app.command()
def pull(
    kinds: Kinds = None,
    tournament_id: TournamentId = None,
    ranks: Ranks = 3,
    past: Past = 0,
    to: To = None,
    api: Api = None,
    hub: Hub = None,
    as_json: AsJson = False,
) -> None:
    """Fetch what the best entries of the latest tournaments trained with.

    Asks the subnet's public API for tasks and places, and the hub for small files and the headers of the
    submitted weights: no weights, one request a second, nothing twice. HF_TOKEN is used if it is set, and
    goes to the hub alone. Exit code 1 when nothing was found.
    """
    from dataclasses import asdict

    from core.domain.wire import TournamentType
    from miner.tournament.field.pull import pull as pull_field
    from miner.tournament.field.pull import pull_past
    from miner.tournament.public_api import open_public_api

    settings = _settings(api, hub)
    directory = to or _directory(settings)
    wanted = [TournamentType(kind) for kind in kinds or (FieldKind.TEXT, FieldKind.IMAGE)]
    with open_public_api(settings, on_wait=_progress) as public:
        done = pull_field(
            public,
            directory,
            wanted,
            tournament_id=tournament_id,
            ranks=ranks,
            on_progress=_progress,
        )
        if past:
            pull_past(public, directory, wanted, past, done, _progress)
    if as_json:
        echo_json({**asdict(done), "directory": str(directory)})
    else:
        for problem in done.problems:
            echo(problem, err=True)
        echo(f"{done.tasks} tasks of {', '.join(done.tournaments) or 'no tournament'}: {directory}")
        echo(f"{done.entries} entries, {done.known} of them known before; {done.requests} requests")
        if done.entries:
            echo("Next: god-miner tournament field show" + (f" --from {directory}" if to else ""))
    raise typer.Exit(0 if done.tasks else 1)


@app.command()
def show(
    directory: From = None,
    family: Family = None,
    ranks: Ranks = 3,
    hotkey: Hotkey = None,
    as_json: AsJson = False,
) -> None:
    """Show what was pulled beside what we would plan for the same tasks.

    b×a: batch × accumulation. r/α: rank and alpha of the adapter. drop: caption dropout of pictures,
    the adapter's of texts. Σ LR: sum of the learning rates of all steps that were submitted. A dash: no
    file says.
    """
    from miner.cli.render.field import field_data, field_pages
    from miner.tournament.field.entries import NoField, own_results, read_field

    where = directory or _directory(load_settings())
    tasks = [task for task in read_field(where) if family in (None, task.family)]
    if not tasks:
        raise NoField(f"{where} has no task of {family}")
    own = own_results(where, hotkey) if hotkey else None
    if as_json:
        echo_json(field_data(tasks, ranks, own))
        return
    print_pages(field_pages(tasks, ranks))
    if own is not None:
        echo(f"{own.hotkey}: first in {own.first} of {own.tasks} tasks,")
        echo(f"won {own.won} of {own.tournaments} tournaments")


def _settings(api: str | None, hub: str | None) -> Settings:
    from miner.settings.load import load_settings as load

    given: dict[str, Any] = {"public_api_url": api, "hf_endpoint": hub}
    return load(**{name: value for name, value in given.items() if value is not None})


def _directory(settings: Settings) -> Path:
    return settings.data_dir / "tournament" / "field"


def _progress(text: str) -> None:
    echo(text, err=True)
