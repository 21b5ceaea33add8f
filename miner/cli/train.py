"""`god-miner train` and `eval`: the operator's own trainings with the native trainer, and models side by
side in the validator's metric. Both run in the training environment.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core.domain.errors import ConfigError, Problem
from miner.cli import options
from miner.cli.options import AsJsonObject, load_settings
from miner.cli.output import echo, echo_json

if TYPE_CHECKING:
    from core.runs.run_files import RunSpec


app = typer.Typer(help="Trainings of your own with the native trainer.", no_args_is_help=True)

Model = Annotated[
    Path | None, typer.Option(exists=True, file_okay=False, help="The folder of the model to train.")
]
Data = Annotated[
    Path | None,
    typer.Option(
        exists=True, help="Rows as JSON or JSON lines; pretraining: text, a table of it, or a token file."
    ),
]
ModeWord = Annotated[str, typer.Option("--mode", help="sft, dpo or pretrain.")]
Hours = Annotated[float, typer.Option(min=0.01, help="End everything after this long.")]
Profile = Annotated[
    str,
    typer.Option(
        help="A tuning profile's name, or the path of a file.", autocompletion=options.complete_profiles
    ),
]
Sets = Annotated[
    list[str] | None, typer.Option("--set", help="A target of the profile: learning_rate=2e-4. Repeatable.")
]
Natives = Annotated[
    list[str] | None,
    typer.Option("--native", help="A setting of configs/base/native.yaml: batch_ramp=0.1. Repeatable."),
]
Columns = Annotated[
    list[str] | None,
    typer.Option("--column", help="Name a column: output=reply, chosen=better. Repeatable."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Every event as a line of JSON, the result at the end.")]

DEFAULT_PROFILE = "steady"


@app.command()
def native(
    folder: Annotated[
        Path, typer.Argument(help="The run's directory. A run that is there already is resumed.")
    ],
    model: Model = None,
    data: Data = None,
    mode: ModeWord = "sft",
    hours: Hours = 1.0,
    profile: Profile = DEFAULT_PROFILE,
    sets: Sets = None,
    natives: Natives = None,
    columns: Columns = None,
    params: Annotated[
        str | None,
        typer.Option(help="Pretraining from nothing: a new Llama-style model of this size, like 125M."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="With --params: the model whose tokenizer it uses."),
    ] = None,
    length: Annotated[int, typer.Option(min=16, help="With --params: its longest sequence.")] = 2048,
    kl: Annotated[
        float | None, typer.Option(min=0, help="Cost of a nat of divergence from the base model.")
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="A few steps under torch's profiler instead of a training.")
    ] = False,
    write_only: Annotated[
        bool, typer.Option("--write-only", help="Write the run's folder and start nothing.")
    ] = False,
    sbatch: Annotated[
        int | None,
        typer.Option(min=0, help="Write RUN/job.sbatch, for a node with this many GPUs, and start nothing."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a model here with the native trainer: supervised, on preferences, or on plain text."""
    python = _training_python()
    folder = folder.resolve()
    if params is not None:
        model = _make_base_model(python, folder, params, tokenizer, length)
    run = _make_or_resume_run(folder, model, data, mode, hours, profile, sets, natives, columns, kl)
    if sbatch is not None:
        from miner.backends.slurm.backend import own_job

        (folder / "job.sbatch").write_text(own_job(load_settings(), folder, sbatch, hours), encoding="utf-8")
    if write_only or sbatch is not None:
        typer.echo(str(folder / ("run.json" if sbatch is None else "job.sbatch")))
        return
    raise typer.Exit(_trace(python, folder, as_json) if trace else _train(python, folder, run, as_json))


@app.command()
def tokens(
    source: Annotated[Path, typer.Argument(exists=True, help="A text file, a table of text, or a folder.")],
    folder: Annotated[Path, typer.Argument(help="Where to write the token file.")],
    tokenizer: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="The folder of the model it is for.")
    ],
) -> None:
    """Turn text into a token file for any number of trainings; print its contents as JSON."""
    from miner.cli import native_runs

    where = [str(source.resolve()), str(folder.resolve()), "--tokenizer", str(tokenizer.resolve())]
    for line in native_runs.program_lines(_training_python(), ["trainer.native.corpus", *where]):
        typer.echo(line, nl=False)


def _training_python() -> Path:
    from miner.backends.environment import training_interpreter

    return Path(training_interpreter(load_settings()).path)


def _make_or_resume_run(
    folder: Path,
    model: Path | None,
    data: Path | None,
    mode: str,
    hours: float,
    profile: str,
    sets: list[str] | None,
    natives: list[str] | None,
    columns: list[str] | None,
    kl: float | None,
) -> RunSpec:
    """Resume the run in this directory if neither model nor data are named; follow a plan.json beside it."""
    from miner.cli.native_runs import NativeMode, NativeRunOptions, make_run, parse_pairs, resume_run

    if model is None and data is None:
        return resume_run(folder)
    if model is None or data is None:
        missing = "--model" if model is None else "--data"
        raise ConfigError("train", [Problem(missing, "", "a new run needs both a model and data")])
    if mode not in list(NativeMode):
        raise ConfigError("train", [Problem("--mode", mode, f"is one of {', '.join(NativeMode)}")])
    plan = folder / "plan.json"
    wishes = NativeRunOptions(
        mode=NativeMode(mode),
        model=model,
        data=data,
        hours=hours,
        profile=profile,
        targets=parse_pairs(sets or [], "--set"),
        settings=parse_pairs(natives or [], "--native"),
        columns={key: str(value) for key, value in parse_pairs(columns or [], "--column").items()},
        plan=plan if plan.is_file() else None,
        kl=kl,
    )
    return make_run(folder, wishes)


def _make_base_model(python: Path, folder: Path, params: str, tokenizer: Path | None, length: int) -> Path:
    from miner.cli import native_runs

    if tokenizer is None:
        raise ConfigError(
            "train native", [Problem("--tokenizer", "", "a new model needs one: a model's folder")]
        )
    made = folder / "base"
    if not (made / "config.json").is_file():
        arguments = [str(made), "--params", params, "--tokenizer", str(tokenizer.resolve())]
        for line in native_runs.program_lines(
            python, ["trainer.native.new_model", *arguments, "--length", str(length)]
        ):
            typer.echo(line, nl=False, err=True)
    return made


def _train(python: Path, folder: Path, run: RunSpec, as_json: bool) -> int:
    from core.runs.progress import EventPrinter, ProgressEvent
    from miner.cli import native_runs

    def as_line(event: ProgressEvent) -> None:
        echo_json(event.model_dump(mode="json", exclude_none=True), line=True)

    code = native_runs.run_training(python, folder, run, as_line if as_json else EventPrinter(echo))
    result = native_runs.load_result(run)
    if result is None:
        echo(f"the training left no result; see the end of {folder / 'log'}", err=True)
        return code or 1
    if as_json:
        echo_json({"event": "result", **result.model_dump(mode="json")}, line=True)
        return code
    echo(f"{result.end}: {result.detail or 'done'}")
    if result.base is not None and result.best is not None:
        change = f"{result.base.value:.4f} → {result.best.value:.4f} at step {result.best.step:,}"
        echo(f"held-out {result.best.metric}: {change}")
    echo(f"the model: {run.submission_dir}" if result.submission else f"no model; see {folder / 'log'}")
    return code


def _trace(python: Path, folder: Path, as_json: bool) -> int:
    """Trace a few steps; programs get each event as it comes, people a table of kernels."""
    from miner.cli import native_runs

    events = []
    command = ["trainer.native.trace", str(folder / "run.json"), str(folder / "trace")]
    for line in native_runs.program_lines(python, command, folder / native_runs.PROFILE_FILE):
        events.append(json.loads(line))
        if as_json:
            typer.echo(line, nl=False)
    if not as_json:
        _print_kernels(events)
    return 0


def _print_kernels(events: Sequence[dict[str, Any]]) -> None:
    from miner.cli.render.terminal import Terminal, plain_table

    rows = [
        (event["name"][:70], f"{event['calls']:,}", f"{event['ms_per_step']:.2f}", f"{event['share']:.1%}")
        for event in events
        if event["event"] == "kernel"
    ]
    columns = ("kernel", "calls", "ms per step", "share")
    Terminal().print(plain_table(*columns, rows=rows, right=columns[1:], header_style="dim"))
    for event in events:
        if event["event"] == "traced":
            echo(f"trace: {event['trace']}\ntable: {event['table']}")


def evaluate(
    task: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="What to score on: see docs/evaluation.md.")
    ],
    base: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="The folder of the model trained from.")
    ],
    model: Annotated[
        list[Path] | None,
        typer.Option(exists=True, file_okay=False, help="A model or an adapter; give it again for more."),
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Score on the first N rows only.")] = None,
    allow_rewards: Annotated[
        bool, typer.Option("--allow-rewards", help="Run a GRPO task's reward code here, with your rights.")
    ] = False,
    as_json: AsJsonObject = False,
) -> None:
    """Score the base, ours and other models on a task's rows as validators do, and say which would win."""
    from miner.cli import native_runs

    arguments = ["--task", str(task.resolve()), "--base", str(base.resolve())]
    for one in model or []:
        arguments += ["--model", str(one.resolve())]
    arguments += ["--rows", str(rows)] if rows is not None else []
    arguments += ["--allow-rewards"] if allow_rewards else []
    arguments += ["--json"] if as_json else []
    command = [str(_training_python()), "-m", "trainer.scoring.eval", *arguments]
    environment = native_runs.child_environment()
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False)
    raise typer.Exit(done.returncode)
