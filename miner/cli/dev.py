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

if TYPE_CHECKING:
    from miner.dev.stack import DevStack

app = typer.Typer(
    help="A development validator with throwaway keys: a tour of all requests, and the demo.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Seed = Annotated[int, typer.Option(help="Which example. The same seed names the same task each time.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def tour(
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Keep keys, log and database here. Default: nothing is kept.")
    ] = None,
    seed: Seed = 0,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for submissions of what was started.")
    ] = 0.0,
    json: AsJson = False,
) -> None:
    """Start a miner on loopback, send it one of every request, show the replies. Nothing is trained."""
    from miner.cli.render import dev
    from miner.dev.tour import run_tour, work_folder

    with work_folder(folder) as place:
        on_step = dev.print_step if patience else None
        result = run_tour(place, seed=seed, patience_s=patience, on_step=on_step)
    dev.print_tour(result, json)
    if not result.held:
        raise typer.Exit(1)


@app.command()
def demo(
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Keep the model, keys and logs here. Default: nothing is kept."),
    ] = None,
    page: Annotated[
        bool | None,
        typer.Option(
            "--page/--no-page",
            help="In the end, show the job on the operator's page until Ctrl-C. Default: in a terminal.",
        ),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            help="Backend to train on. A cluster needs --dir on its shared file system. Default: process.",
        ),
    ] = "process",
    json: AsJson = False,
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
        if done.ground is not None and done.result.held and _shows_page(page, json):
            dev.print_demo(done.result, json)
            shown = True
            _show_page(done.ground)
    if not shown:
        # Only now, so that it does not name a directory that is gone.
        dev.print_demo(done.result, json)
    if not done.result.held:
        raise typer.Exit(1)


def _shows_page(wanted: bool | None, json: bool) -> bool:
    """Whether somebody is there who could look at it and end it."""
    if wanted is not None:
        return wanted
    return not json and sys.stdin.isatty() and sys.stdout.isatty() and "CI" not in os.environ


def _show_page(ground: DevStack) -> None:
    from miner.cli.output import echo
    from miner.dev.stack import LOOPBACK, dashboard_process

    with contextlib.suppress(KeyboardInterrupt), dashboard_process(ground) as process:
        echo(f"  open this page http://{LOOPBACK}:{process.port}/jobs/1 (Ctrl-C ends miner and page)")
        signal.pause()
