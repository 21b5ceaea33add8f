"""`god-miner`, and `python -m miner`: the one command, made of the modules of `miner.cli`."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from typer._click import Command, Context, HelpFormatter
from typer._click.exceptions import ClickException
from typer.core import TyperGroup

from core.domain.errors import ConfigError, GodMinerError
from miner import __version__
from miner.cli import (
    alerts,
    backtest,
    chain,
    config,
    dev,
    doctor,
    environments,
    events,
    fleet,
    gpu_check,
    images,
    jobs,
    models,
    offers,
    plan,
    policy,
    profile,
    report,
    run,
    status,
    submission,
    tournament,
    tournament_field,
    train,
)
from miner.cli.options import AsJson
from miner.cli.output import echo, echo_error, echo_json

#: Headings of `--help`, in their order.
PANELS = EVERY_DAY, TOURNAMENTS, TUNE, BY_HAND, SET_UP = (
    "Every day",
    "Tournaments",
    "Tune",
    "Train by hand",
    "Set up",
)
_EXAMPLES = """\b
Examples:
  god-miner                            how things stand, and what to do next
  god-miner doctor                     what is missing, and how to mend it
  god-miner tournament check           would validators admit this checkout?
  god-miner run --task task.json       train a task of your own
  god-miner jobs compare 12 15         which of two trainings was better
"""


def panel_of(command: Command) -> str:
    return str(getattr(command, "rich_help_panel", None))


class CommandPanels(TyperGroup):
    """Commands under the headings that they are declared with."""

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        room = formatter.width - 6 - max(map(len, self.commands))
        for name, command in self.commands.items():
            panels.setdefault(panel_of(command), []).append((name, command.get_short_help_str(room)))
        for panel in PANELS:
            with formatter.section(panel):
                formatter.write_dl(panels[panel])


app = typer.Typer(
    name="god-miner",
    cls=CommandPanels,
    help="A miner for Bittensor subnet 56, G.O.D.",
    epilog=_EXAMPLES,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _add(panel: str, **groups: typer.Typer) -> None:
    for name, group in groups.items():
        app.add_typer(group, name=name, rich_help_panel=panel)


app.command(rich_help_panel=EVERY_DAY)(run.run)
app.command(rich_help_panel=EVERY_DAY)(run.dashboard)
app.command(rich_help_panel=EVERY_DAY)(events.events)
_add(EVERY_DAY, jobs=jobs.app, offers=offers.app, fleet=fleet.app, alerts=alerts.app, report=report.app)
_add(TOURNAMENTS, tournament=tournament.app, environments=environments.app, submission=submission.app)
app.command(rich_help_panel=TUNE)(plan.plan)
_add(TUNE, profile=profile.app, policy=policy.app)
_add(BY_HAND, train=train.app)
app.command(name="eval", rich_help_panel=BY_HAND)(train.evaluate)
app.command(rich_help_panel=BY_HAND)(submission.publish)
_add(BY_HAND, models=models.app)
app.command(name="gpu-check", rich_help_panel=SET_UP)(gpu_check.gpu_check)
_add(SET_UP, doctor=doctor.app, config=config.app, chain=chain.app, images=images.app, dev=dev.app)
policy.app.command()(backtest.backtest)
policy.app.command()(backtest.generate)
tournament.app.add_typer(tournament_field.app, name="field")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"god-miner {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    as_json: AsJson = False,
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """A miner for Bittensor subnet 56, G.O.D. Without a command: how things stand, and what to do next."""
    if context.invoked_subcommand is None:
        status.show_status(as_json=as_json)


def main() -> None:
    """The console script: an error on purpose is one line, not a traceback, and JSON where that was asked."""
    as_json = "--json" in sys.argv[1:]
    try:
        code = app(prog_name="god-miner", standalone_mode=False)
    except GodMinerError as error:
        echo_error(error, as_json=as_json)
        code = os.EX_CONFIG if isinstance(error, ConfigError) else 1
    except ClickException as error:
        if as_json:
            echo_json({"error": {"code": "usage", "message": error.format_message()}}, line=True)
        else:
            error.show()
        code = error.exit_code
    except typer.Abort:
        echo("Aborted!", err=True)
        code = 1
    raise SystemExit(code)


if __name__ == "__main__":
    main()
