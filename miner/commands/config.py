"""`god-miner config`: which settings are in force, and which there are."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core.errors import ConfigError
from miner.commands.output import say, say_error, say_json, terminal

if TYPE_CHECKING:
    from miner.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Which settings are in force, and which there are.")

AsJson = Annotated[bool, typer.Option("--json", help="For machines: one JSON object.")]


@app.command()
def show(as_json: AsJson = False) -> None:
    """Print every setting in force, where it came from and what it means. Secrets are hidden."""
    from miner.settings import load_settings

    try:
        settings = load_settings()
    except ConfigError as error:
        say_error(error, as_json=as_json)
        raise typer.Exit(os.EX_CONFIG) from None
    if as_json:
        say_json(_as_json(settings))
    else:
        _print(settings)


@app.command()
def env() -> None:
    """Print .env.example: every setting with its meaning and default."""
    from miner.settings.reference import env_example

    say(env_example(), nl=False)


@app.command()
def docs() -> None:
    """Print docs/settings.md."""
    from miner.settings.reference import settings_page

    say(settings_page(), nl=False)


def _as_json(settings: Settings) -> dict[str, Any]:
    from miner.settings.reference import entries

    found = {
        entry.variable: {
            "value": _for_machines(settings.shown(entry.name)),
            "source": settings.source_of(entry.name),
            "description": entry.meaning,
        }
        for entry in entries()
    }
    return {"settings": found, "warnings": list(settings.warnings)}


def _for_machines(value: Any) -> Any:
    if isinstance(value, tuple):
        return [str(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _print(settings: Settings) -> None:
    """A list and not a table: in a terminal of 80 columns a table leaves ten for the meaning."""
    from rich.padding import Padding
    from rich.text import Text

    from miner.settings.reference import entries, plain

    console = terminal()
    section = ""
    for entry in entries():
        if entry.section != section:
            section = entry.section
            console.print(Text(f"\n{section}", "bold underline"))
        value, source = settings.shown(entry.name), settings.source_of(entry.name)
        shown = "not set" if value in (None, ()) else plain(value)
        style = "" if source == "default" else "bold green"
        line = Text(f"  {entry.variable} = ").append(shown, style).append(f"  ({source})", "dim")
        console.print(line, soft_wrap=True)
        console.print(Padding(Text(entry.meaning, "dim"), (0, 0, 0, 6)))
    for warning in settings.warnings:
        console.print(Text(f"warning: {warning}", "yellow"), soft_wrap=True)
