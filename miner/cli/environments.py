"""`god-miner environments`: games between models, as the evaluator of environment tournaments plays them, run
in the training environment."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from miner.cli.options import AsJson, load_settings, with_options

app = typer.Typer(help="Play the games of environment tournaments locally.", no_args_is_help=True)


@app.callback()
def _environments() -> None:
    """Games of environment tournaments, played locally."""


@dataclass(frozen=True)
class PlayOptions:
    """Options that `trainer.environments.play` has by the same names."""

    game: Annotated[
        list[str] | None,
        typer.Option(help="Game, or intercode (repeatable). Default: the six games."),
    ] = None
    against: Annotated[
        list[str] | None,
        typer.Option(help="Opponent, written like MODEL (repeatable). Default: mcts (nobody for intercode)."),
    ] = None
    games: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Games per match, or shell tasks. Default: as many games as time allows; 20 shell tasks.",
        ),
    ] = None
    seconds: Annotated[
        float,
        typer.Option(min=1, help="Time after which no pair of games of a match begins, nor a shell task."),
    ] = 900.0
    seed: Annotated[int, typer.Option(help="Seed that the games' seeds are drawn from.")] = 42
    at_once: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Games played at once; 1 reproduces the evaluator's match exactly. Default: 8 with a model.",
        ),
    ] = None
    turn_seconds: Annotated[
        float, typer.Option(min=0.1, help="Time per turn; a longer turn is forfeited.")
    ] = 30.0
    base: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Directory of the adapters' base model.")
    ] = None
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Directory of a served model, to count the tokens of its notes.",
        ),
    ] = None
    parser: Annotated[
        str | None,
        typer.Option(help="SGLang's tool-call parser for a local model: qwen25, hermes, llama3, mistral."),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(help="Directory for transcripts and results.json. Default: one in DATA_DIR."),
    ] = None

    def arguments(self) -> Iterator[str]:
        """Yield them as they are written on a command line."""
        for name, value in vars(self).items():
            for one in value if isinstance(value, list) else [] if value is None else [value]:
                yield from (f"--{name.replace('_', '-')}", str(one))


@app.command()
@with_options
def play(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Directory of a model or adapter, http://HOST:PORT/v1[#NAME], or random, expert, mcts:N.",
        ),
    ],
    options: PlayOptions,
    as_json: AsJson = False,
) -> None:
    """Play a model against others by the evaluator's rules, and show scores and forfeits.

    Pairs of games have one seed and swapped seats. A turn is one answer of at most 512 tokens; without a
    legal move the game is lost. A match ends after 10 forfeits, or 10 losses in a row (later 20). Shell tasks
    of intercode are played by each model alone. Exit code 1 if a model cannot be loaded or reached, 130 after
    Ctrl-C: what ended before is shown."""
    from miner.backends.environment import training_interpreter
    from miner.jobs.native_runs import child_environment

    settings = load_settings()
    folder = options.output or settings.data_dir / "environments" / time.strftime("%Y%m%d-%H%M%S")
    arguments = [model, *replace(options, output=folder.absolute()).arguments(), *["--json"] * as_json]
    command = [str(training_interpreter(settings).path), "-m", "trainer.environments.play", *arguments]
    environment = child_environment()
    if key := os.environ.get("OPENAI_API_KEY"):  # for a server that is played
        environment["OPENAI_API_KEY"] = key
    with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL) as process:
        raise typer.Exit(_ended(process))


def _ended(process: subprocess.Popen[bytes]) -> int:
    """Wait for the games and return their exit code. Ctrl-C reaches them too: they then report what they
    have."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue
