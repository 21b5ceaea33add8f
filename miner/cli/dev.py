"""`god-miner dev …`: a tour of all requests, and the demo, with throwaway keys."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from miner.cli.options import AsJson

if TYPE_CHECKING:
    from miner.dev.stack import DevStack

app = typer.Typer(
    help="A development validator with throwaway keys: a tour of all requests, and the demo.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Seed = Annotated[int, typer.Option(help="Seed of the example tasks.")]


@app.command()
def tour(
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Directory to keep keys, log and database in. Default: keep nothing."),
    ] = None,
    seed: Seed = 0,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the submissions of started tasks.")
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Start a miner on loopback, send it one of every request, show the replies. Nothing is trained."""
    from miner.cli.render import dev
    from miner.dev.tour import run_tour, work_folder

    with work_folder(folder) as place:
        on_step = dev.print_step if patience else None
        result = run_tour(place, seed=seed, patience_s=patience, on_step=on_step)
    dev.print_tour(result, as_json)
    if not result.held:
        raise typer.Exit(1)


@app.command()
def demo(
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Directory to keep the model, keys and logs in. Default: keep nothing."),
    ] = None,
    page: Annotated[
        bool | None,
        typer.Option(
            "--page/--no-page",
            help="Show the job on the operator's page at the end, until Ctrl-C. Default: only in a terminal.",
        ),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            help="Backend to train on. A cluster needs --dir on its shared file system. Default: process.",
        ),
    ] = "process",
    as_json: AsJson = False,
) -> None:
    """Train and publish a small model, from the offer to the published repository."""
    from miner.cli.render import dev
    from miner.dev.demo import running_demo
    from miner.dev.tour import work_folder
    from miner.settings import BackendKind

    known = [kind for kind in BackendKind if kind.is_backend]
    if backend not in known:
        raise typer.BadParameter(f"must be one of {', '.join(known)}", param_hint="--backend")

    shown = False
    with work_folder(folder) as place, ExitStack() as running:
        with dev.DemoProgress() as progress:
            done = running.enter_context(running_demo(place, progress, BackendKind(backend)))
        if done.ground is not None and done.result.held and _shows_page(page, as_json):
            dev.print_demo(done.result, as_json)
            shown = True
            _show_page(done.ground)
    if not shown:
        # Only now, so that it does not name a directory that is gone.
        dev.print_demo(done.result, as_json)
    if not done.result.held:
        raise typer.Exit(1)


def _shows_page(wanted: bool | None, as_json: bool) -> bool:
    """Return True if somebody can look at the page and end it."""
    if wanted is not None:
        return wanted
    return not as_json and sys.stdin.isatty() and sys.stdout.isatty() and "CI" not in os.environ


def _show_page(ground: DevStack) -> None:
    from miner.cli.output import echo
    from miner.dev.stack import LOOPBACK, dashboard_process

    with contextlib.suppress(KeyboardInterrupt), dashboard_process(ground) as process:
        echo(f"  open this page http://{LOOPBACK}:{process.port}/jobs/1 (Ctrl-C ends miner and page)")
        signal.pause()
