"""`god-miner train`: the operator's own trainings with the native trainer, in the training environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from miner.commands import completion
from miner.commands.output import say, say_json

if TYPE_CHECKING:
    from core.run_files import RunSpec

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
Hours = Annotated[float, typer.Option(min=0.01, help="All of it is over after so long.")]
Profile = Annotated[
    str,
    typer.Option(help="A tuning profile's name, or the path of a file.", autocompletion=completion.profiles),
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
    typer.Option("--column", help="What a column is: output=reply, chosen=better. Repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Every event as a line of JSON, the result at the end.")]

DEFAULT_PROFILE = "steady"


@app.command()
def native(
    folder: Annotated[Path, typer.Argument(help="Of the run. One that holds a run already is continued.")],
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
        Path | None, typer.Option(exists=True, file_okay=False, help="With --params: whose tokens it uses.")
    ] = None,
    length: Annotated[int, typer.Option(min=16, help="With --params: its longest sequence.")] = 2048,
    kl: Annotated[
        float | None, typer.Option(min=0, help="What a nat of divergence from the base model costs.")
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="A few steps under torch's profiler instead of a training.")
    ] = False,
    write_only: Annotated[
        bool, typer.Option("--write-only", help="Write the run's folder and start nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a model here with the native trainer: supervised, on preferences, or on plain text."""
    from miner.engines.choose import training_interpreter
    from miner.settings import load_settings

    python = Path(training_interpreter(load_settings()).path)
    folder = folder.resolve()
    if params is not None:
        model = _from_nothing(python, folder, params, tokenizer, length)
    run = _run(folder, model, data, mode, hours, profile, sets, natives, columns, kl)
    if write_only:
        typer.echo(str(folder / "run.json"))
        return
    raise typer.Exit(_traced(python, folder, as_json) if trace else _trained(python, folder, run, as_json))


@app.command()
def sweep(
    folder: Annotated[Path, typer.Argument(help="Of the run, which is made if it is not there.")],
    model: Model = None,
    data: Data = None,
    mode: ModeWord = "sft",
    profile: Profile = DEFAULT_PROFILE,
    sets: Sets = None,
    natives: Natives = None,
    columns: Columns = None,
    levers: Annotated[
        str | None,
        typer.Option(help="Of packing,numbers,attention,checkpointing,micro,compile,optimizer; unset: all."),
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Measured per setting, after three to warm up.")] = 12,
    as_json: Json = False,
) -> None:
    """Measure a few steps with each of several speed settings, and say which to keep."""
    from miner.engines.choose import training_interpreter
    from miner.settings import load_settings
    from miner.train import follow, view
    from miner.train.runs import PROFILE_FILE

    python = Path(training_interpreter(load_settings()).path)
    folder = folder.resolve()
    _run(folder, model, data, mode, 1.0, profile, sets, natives, columns, None)
    arguments = ["trainer.native.measure", "sweep", str(folder / "run.json"), "--steps", str(steps)]
    arguments += ["--levers", levers] if levers else []
    events = []
    for line in follow.lines(python, arguments, folder / PROFILE_FILE):
        events.append(json.loads(line))
        if as_json:
            typer.echo(line, nl=False)
        elif events[-1]["event"] == "setting":
            say(view.setting_line(events[-1]), err=True)
    if not as_json:
        view.show_sweep(events)
    raise typer.Exit(0 if any(event["event"] == "keep" for event in events) else 1)


@app.command()
def tokens(
    source: Annotated[Path, typer.Argument(exists=True, help="A text file, a table of text, or a folder.")],
    folder: Annotated[Path, typer.Argument(help="Where the token file is to lie.")],
    tokenizer: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="The folder of the model it is for.")
    ],
) -> None:
    """Turn text into a token file once, for any number of trainings; prints what it holds as JSON."""
    from miner.engines.choose import training_interpreter
    from miner.settings import load_settings
    from miner.train import follow

    python = Path(training_interpreter(load_settings()).path)
    where = [str(source.resolve()), str(folder.resolve()), "--tokenizer", str(tokenizer.resolve())]
    for line in follow.lines(python, ["trainer.native.corpus", *where]):
        typer.echo(line, nl=False)


def _run(
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
    """The one that lies there where no model and no data are named; beside a plan.json it follows that."""
    from core.errors import ConfigError, Problem
    from miner.train.runs import Mode, Wishes, again, make_run, parsed

    if model is None and data is None:
        return again(folder)
    if model is None or data is None:
        missing = "--model" if model is None else "--data"
        raise ConfigError("train", [Problem(missing, "", "a new run needs both a model and data")])
    if mode not in list(Mode):
        raise ConfigError("train", [Problem("--mode", mode, f"is one of {', '.join(Mode)}")])
    plan = folder / "plan.json"
    wishes = Wishes(
        mode=Mode(mode),
        model=model,
        data=data,
        hours=hours,
        profile=profile,
        targets=parsed(sets or [], "--set"),
        settings=parsed(natives or [], "--native"),
        columns={key: str(value) for key, value in parsed(columns or [], "--column").items()},
        plan=plan if plan.is_file() else None,
        kl=kl,
    )
    return make_run(folder, wishes)


def _from_nothing(python: Path, folder: Path, params: str, tokenizer: Path | None, length: int) -> Path:
    from core.errors import ConfigError, Problem
    from miner.train import follow

    if tokenizer is None:
        raise ConfigError(
            "train native", [Problem("--tokenizer", "", "a new model needs one: a model's folder")]
        )
    made = folder / "base"
    if not (made / "config.json").is_file():
        arguments = [str(made), "--params", params, "--tokenizer", str(tokenizer.resolve())]
        for line in follow.lines(python, ["trainer.native.compact", *arguments, "--length", str(length)]):
            typer.echo(line, nl=False, err=True)
    return made


def _trained(python: Path, folder: Path, run: RunSpec, as_json: bool) -> int:
    from core.progress import Event
    from miner.train import follow

    def as_line(event: Event) -> None:
        say_json(event.model_dump(mode="json", exclude_none=True), line=True)

    code = follow.train(python, folder, run, as_line if as_json else follow.Teller(say))
    result = follow.result_of(run)
    if result is None:
        say(f"the training left no result; its last words are in {folder / 'log'}", err=True)
        return code or 1
    if as_json:
        say_json({"event": "result", **result.model_dump(mode="json")}, line=True)
        return code
    say(f"{result.end}: {result.detail or 'done'}")
    if result.base is not None and result.best is not None:
        change = f"{result.base.value:.4f} → {result.best.value:.4f} at step {result.best.step:,}"
        say(f"held-out {result.best.metric}: {change}")
    say(f"the model: {run.submission_dir}" if result.submission else f"no model; see {folder / 'log'}")
    return code


def _traced(python: Path, folder: Path, as_json: bool) -> int:
    from miner.train import follow, view
    from miner.train.runs import PROFILE_FILE

    arguments = ["trainer.native.measure", "trace", str(folder / "run.json"), str(folder / "trace")]
    events = []
    for line in follow.lines(python, arguments, folder / PROFILE_FILE):
        events.append(json.loads(line))
        if as_json:
            typer.echo(line, nl=False)
    if not as_json:
        view.show_kernels(events)
    return 0
