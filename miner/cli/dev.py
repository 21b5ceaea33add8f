"""`god-miner dev …`: a validator to develop against, with keys that are worth nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from core.domain.wire import TournamentType
    from miner.dev.stack import DevStack
    from miner.dev.validator import Exchange

app = typer.Typer(
    help="A development validator: throwaway keys, signed requests, a tour of all of them, and the demo.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

#: Repeated here, because importing them would slow every command down. A test compares.
TaskName = Literal["instruct", "chat", "dpo", "grpo", "image"]
RepoType = Literal["text", "image", "environment"]

Folder = Annotated[Path, typer.Option("--dir", help="Where the throwaway keys and the nodes file are kept.")]
Url = Annotated[str, typer.Option(help="The miner's public address.")]
Key = Annotated[Path | None, typer.Option(help="A hotkey file to sign with. Default: the throwaway one.")]
MinerHotkey = Annotated[
    str | None, typer.Option(help="The hotkey the miner answers as. Default: the throwaway one.")
]
TaskTypeOption = Annotated[TaskName, typer.Option("--type", help="The kind of task.")]
Seed = Annotated[int, typer.Option(help="Which example. The same seed names the same task each time.")]
TaskId = Annotated[str | None, typer.Option(help="The task's id. Default: the example's own.")]
Model = Annotated[str | None, typer.Option(help="The base model. Default: the example's own.")]
Hours = Annotated[float | None, typer.Option(help="Hours to complete. Default: the example's own.")]
RepoName = Annotated[str | None, typer.Option(help="The repository's name. Default: the example's own.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Compact = Annotated[bool, typer.Option("--compact", help="Send JSON without blanks, as newer clients do.")]
Forged = Annotated[bool, typer.Option("--forged", help="Sign with another key than the one claimed.")]

DEFAULT_FOLDER = Path(".god-miner/dev")
DEFAULT_URL = "http://127.0.0.1:7999"


@app.command()
def wallet(folder: Folder = DEFAULT_FOLDER, json: AsJson = False) -> None:
    """Make throwaway hotkeys for a miner and a validator, or show existing ones."""
    from miner.cli.render import dev
    from miner.dev import stack

    keys = stack.throwaway_keys(folder)
    dev.print_pairs(
        {
            "miner": keys.miner.ss58_address,
            "validator": keys.validator.ss58_address,
            "wallets": str(keys.wallet_path),
        },
        json,
    )


@app.command()
def nodes(
    folder: Folder = DEFAULT_FOLDER,
    stake: Annotated[float, typer.Option(min=0, help="The validator's stake.")] = 10_000.0,
    json: AsJson = False,
) -> None:
    """Write a nodes file with both throwaway hotkeys; print the settings to use it."""
    from miner.cli.render import dev
    from miner.dev import stack

    keys = stack.throwaway_keys(folder)
    stack.write_nodes(keys, stake)
    dev.print_settings(keys.settings(), json)


@app.command()
def offer(
    task_type: TaskTypeOption = "instruct",
    url: Url = DEFAULT_URL,
    folder: Folder = DEFAULT_FOLDER,
    key: Key = None,
    miner_hotkey: MinerHotkey = None,
    seed: Seed = 0,
    task_id: TaskId = None,
    model: Model = None,
    hours: Hours = None,
    compact: Compact = False,
    forged: Forged = False,
    json: AsJson = False,
) -> None:
    """Offer an example task."""
    from miner.dev import validator

    target = validator.miner_target(url, folder, key, miner_hotkey, compact=compact, forged=forged)
    task = validator.example_task(task_type, seed, task_id=task_id, model=model, hours=hours)
    _report_exchange(validator.run_call(target, lambda client: client.offer(task)), json)


@app.command()
def start(
    task_type: TaskTypeOption = "instruct",
    url: Url = DEFAULT_URL,
    folder: Folder = DEFAULT_FOLDER,
    key: Key = None,
    miner_hotkey: MinerHotkey = None,
    seed: Seed = 0,
    task_id: TaskId = None,
    model: Model = None,
    hours: Hours = None,
    repo_name: RepoName = None,
    dataset: Annotated[str | None, typer.Option(help="URL of the rows, or of an image task's zip.")] = None,
    compact: Compact = False,
    forged: Forged = False,
    json: AsJson = False,
) -> None:
    """Ask the miner to start an example task."""
    from miner.dev import validator

    target = validator.miner_target(url, folder, key, miner_hotkey, compact=compact, forged=forged)
    wanted = {"task_id": task_id, "model": model, "hours": hours}
    task = validator.example_task(task_type, seed, **wanted, expected_repo_name=repo_name, data_url=dataset)
    _report_exchange(validator.run_call(target, lambda client: client.start(task)), json)


@app.command()
def submission(
    task_type: TaskTypeOption = "instruct",
    url: Url = DEFAULT_URL,
    folder: Folder = DEFAULT_FOLDER,
    key: Key = None,
    miner_hotkey: MinerHotkey = None,
    seed: Seed = 0,
    task_id: TaskId = None,
    repo_name: RepoName = None,
    forged: Forged = False,
    json: AsJson = False,
) -> None:
    """Ask for a task's submission, by its id or by the example's type and seed."""
    from miner.dev import validator

    target = validator.miner_target(url, folder, key, miner_hotkey, forged=forged)
    task = validator.example_task(task_type, seed, task_id=task_id)
    # A task named by its id is not the example, so the example's repository name does not apply.
    expected = repo_name or (None if task_id else task.expected_repo_name)
    _report_exchange(
        validator.run_call(target, lambda client: client.submission(task.task_id, expected)), json
    )


@app.command()
def repo(
    repo_type: Annotated[RepoType, typer.Option("--type", help="The kind of tournament.")] = "text",
    url: Url = DEFAULT_URL,
    folder: Folder = DEFAULT_FOLDER,
    key: Key = None,
    miner_hotkey: MinerHotkey = None,
    forged: Forged = False,
    json: AsJson = False,
) -> None:
    """Ask which repository the miner enters in a tournament. Exit code 1 if none is entered.

    Its token is shown as ***."""
    from core.domain.wire import TournamentType
    from miner.cli.output import echo
    from miner.dev import validator

    target = validator.miner_target(url, folder, key, miner_hotkey, forged=forged)
    kind = TournamentType(repo_type)
    exchange = validator.run_call(target, lambda client: client.training_repo(kind))
    _report_exchange(exchange, json)
    if exchange.conclusion.outcome is not validator.ValidatorOutcome.ENTERED:
        echo(f"→ {_way_to_enter(kind, exchange)}", err=True)
        raise typer.Exit(1)


def _way_to_enter(kind: TournamentType, exchange: Exchange) -> str:
    if exchange.reply is not None and exchange.reply.status in (401, 403):
        return "the miner refuses this key: --key with one that its nodes file has, or `god-miner dev nodes`"
    return f"set TRAINING_REPO_{kind.name}_URL and TRAINING_REPO_{kind.name}_COMMIT, then restart the miner"


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
    slurm: Annotated[
        bool,
        typer.Option(
            "--slurm",
            help="Train as a job of the Slurm that SLURM_CONF or SLURM_BIN_DIR name; --dir must then be on "
            "its shared file system.",
        ),
    ] = False,
    json: AsJson = False,
) -> None:
    """Train and publish a small model, from the offer to the published repository."""
    from miner.cli.render import dev
    from miner.dev.demo import running_demo
    from miner.dev.tour import work_folder
    from miner.settings import EngineKind

    engine = EngineKind.SLURM if slurm else EngineKind.PROCESS

    shown = False
    with work_folder(folder) as place, ExitStack() as running:
        with dev.DemoProgress() as progress:
            done = running.enter_context(running_demo(place, progress, engine))
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


def _report_exchange(exchange: Exchange, json: bool) -> None:
    """Print the exchange; exit with 1 if there was no reply, no JSON in it, or the miner failed."""
    from miner.cli.render import dev

    dev.print_exchange(exchange, json)
    if not exchange.usable:
        raise typer.Exit(1)
