"""`god-miner`, and `python -m miner`: the one command, made of the modules of `miner.cli`."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from typer._click.exceptions import ClickException

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
    images,
    jobs,
    models,
    offers,
    plan,
    policy,
    profile,
    report,
    run,
    submission,
    tournament,
    tournament_field,
    train,
)
from miner.cli.output import echo, echo_error, echo_json

app = typer.Typer(
    name="god-miner",
    help="A miner for Bittensor subnet 56, G.O.D.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(run.run)
app.command()(run.dashboard)
app.command()(plan.plan)
app.command()(submission.publish)
app.command(name="eval")(train.evaluate)
app.add_typer(config.app, name="config")
app.add_typer(doctor.app, name="doctor")
app.add_typer(chain.app, name="chain")
app.add_typer(fleet.app, name="fleet")
app.add_typer(jobs.app, name="jobs")
app.add_typer(profile.app, name="profile")
app.add_typer(train.app, name="train")
app.add_typer(models.app, name="models")
app.add_typer(policy.app, name="policy")
policy.app.command()(backtest.backtest)
policy.app.command()(backtest.generate)
app.command()(events.events)
app.add_typer(offers.app, name="offers")
app.add_typer(alerts.app, name="alerts")
app.add_typer(report.app, name="report")
app.add_typer(submission.app, name="submission")
app.add_typer(images.app, name="images")
app.add_typer(environments.app, name="environments")
app.add_typer(tournament.app, name="tournament")
tournament.app.add_typer(tournament_field.app, name="field")
app.add_typer(dev.app, name="dev")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"god-miner {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """A miner for Bittensor subnet 56, G.O.D."""


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
