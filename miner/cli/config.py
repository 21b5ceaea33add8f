"""`god-miner config`: the settings in force, and all that exist."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from miner.cli.options import AsJson, load_settings
from miner.cli.output import echo, echo_json, terminal

if TYPE_CHECKING:
    from miner.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Show the settings in force, and all that exist.")


@app.command()
def show(as_json: AsJson = False) -> None:
    """Print every setting in force, where it came from and what it means. Secrets are hidden."""
    settings = load_settings()
    if as_json:
        echo_json(_settings_as_json(settings))
    else:
        _print(settings)


@app.command()
def env() -> None:
    """Print .env.example: every setting with its meaning and default."""
    from miner.settings.reference import env_example

    echo(env_example(), nl=False)


def _settings_as_json(settings: Settings) -> dict[str, object]:
    from miner.settings.reference import setting_docs

    found = {
        entry.variable: {
            "value": _json_value(settings.printable(entry.name)),
            "source": settings.source_of(entry.name),
            "description": entry.meaning,
        }
        for entry in setting_docs()
    }
    return {"settings": found, "warnings": list(settings.warnings)}


def _json_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return [str(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _print(settings: Settings) -> None:
    """Print a list, not a table: at 80 columns a table would leave ten for the meaning."""
    from rich.padding import Padding
    from rich.text import Text

    from miner.settings.reference import env_text, setting_docs

    console = terminal()
    section = ""
    for entry in setting_docs():
        if entry.section != section:
            section = entry.section
            console.print(Text(f"\n{section}", "bold underline"))
        value, source = settings.printable(entry.name), settings.source_of(entry.name)
        shown = "not set" if value in (None, ()) else env_text(value)
        style = "" if source == "default" else "bold green"
        line = Text(f"  {entry.variable} = ").append(shown, style).append(f"  ({source})", "dim")
        console.print(line, soft_wrap=True)
        console.print(Padding(Text(entry.meaning, "dim"), (0, 0, 0, 6)))
    for warning in settings.warnings:
        console.print(Text(f"warning: {warning}", "yellow"), soft_wrap=True)
