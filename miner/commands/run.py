"""`god-miner run`: the daemon."""

from __future__ import annotations

import sys

import typer

from core.errors import ConfigError


def run() -> None:
    """Answer validators until a signal ends it. Settings come from the environment and .env."""
    from miner import logs
    from miner.server import ExitCode
    from miner.server import run as serve
    from miner.settings import load_settings

    try:
        settings = load_settings()
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        raise typer.Exit(ExitCode.CONFIG) from None
    logs.configure(settings)
    raise typer.Exit(serve(settings))
