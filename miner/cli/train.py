"""`god-miner train` and `eval`: the operator's own trainings with the native trainer, and a comparison of
models by the validator's metric. Both run in the training environment."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from core.domain.errors import ConfigError, Problem
from miner.cli.options import (
    AsJson,
    complete_profiles,
    load_settings,
    read_json_object,
    read_record,
    with_options,
)
from miner.cli.output import echo, echo_json

if TYPE_CHECKING:
    from core.runs.run_files import RunSpec


app = typer.Typer(help="Train models of your own with the native trainer.", no_args_is_help=True)

#: Repeated here, because importing them would slow every command down. A test compares.
ModeName = Literal["sft", "dpo", "pretrain"]


@dataclass(frozen=True)
class TrainOptions:
    """The options of `native` that say what is trained, and how."""

    model: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Directory of the model to train.")
    ] = None
    data: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            help="Rows as JSON or JSON lines; for pretraining text, a table of text, or a token file.",
        ),
    ] = None
    mode: Annotated[ModeName, typer.Option(help="Objective of the training.")] = "sft"
    hours: Annotated[float, typer.Option(min=0.01, help="Hours after which everything ends.")] = 1.0
    profile: Annotated[
        str, typer.Option(help="Name or path of a tuning profile.", autocompletion=complete_profiles)
    ] = "steady"
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", help="Target of the profile, e.g. learning_rate=2e-4 (repeatable)."),
    ] = None
    natives: Annotated[
        list[str] | None,
        typer.Option(
            "--native", help="Setting of configs/base/native.yaml, e.g. batch_ramp=0.1 (repeatable)."
        ),
    ] = None
    columns: Annotated[
        list[str] | None,
        typer.Option("--column", help="Name of a column, e.g. output=reply or chosen=better (repeatable)."),
    ] = None
    params: Annotated[
        str | None, typer.Option(help="Pretrain a new Llama-style model of this size, e.g. 125M.")
    ] = None
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="Directory of the model whose tokenizer to use, with --params."
        ),
    ] = None
    length: Annotated[int, typer.Option(min=16, help="Longest sequence, with --params.")] = 2048
    kl: Annotated[
        float | None,
        typer.Option(min=0, help="Cost of a nat of divergence from the base model. Default: none."),
    ] = None

    def run_in(self, folder: Path, python: Path) -> RunSpec:
        """Make the run, or resume the one that is in the directory."""
        from miner.jobs import native_runs

        model = self.model
        if self.params is not None:
            model = _make_base_model(python, folder, self.params, self.tokenizer, self.length)
        if model is None and self.data is None:
            return native_runs.resume_run(folder)
        if model is None or self.data is None:
            missing = "--model" if model is None else "--data"
            raise ConfigError("train", [Problem(missing, "", "a new run needs both a model and data")])
        parse, plan = native_runs.parse_pairs, folder / "plan.json"
        options = native_runs.NativeRunOptions(
            mode=native_runs.NativeMode(self.mode),
            model=model,
            data=self.data,
            hours=self.hours,
            profile=self.profile,
            targets=parse(self.sets or [], "--set"),
            settings=parse(self.natives or [], "--native"),
            columns={key: str(value) for key, value in parse(self.columns or [], "--column").items()},
            plan=plan if plan.is_file() else None,
            kl=self.kl,
        )
        return native_runs.make_run(folder, options)


@app.command()
@with_options
def native(
    folder: Annotated[Path, typer.Argument(help="Directory of the run; an existing run is resumed.")],
    options: TrainOptions,
    trace: Annotated[
        bool, typer.Option("--trace", help="Run a few steps under torch's profiler instead of a training.")
    ] = False,
    write_only: Annotated[
        bool, typer.Option("--write-only", help="Write the run's directory and start nothing.")
    ] = False,
    sbatch: Annotated[
        int | None,
        typer.Option(min=0, help="Write RUN/job.sbatch, for a node with this many GPUs, and start nothing."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every event as a line of JSON, the result at the end.")
    ] = False,
) -> None:
    """Train a model here with the native trainer: supervised, on preferences, or on plain text.

    Without --model and --data the run in the directory is resumed. A plan.json there is followed."""
    python = _training_python()
    folder = folder.resolve()
    run = options.run_in(folder, python)
    if sbatch is not None:
        from miner.backends.slurm.plugin import own_job

        job = own_job(load_settings(), folder, sbatch, options.hours)
        (folder / "job.sbatch").write_text(job, encoding="utf-8")
    if write_only or sbatch is not None:
        typer.echo(str(folder / ("run.json" if sbatch is None else "job.sbatch")))
        return
    raise typer.Exit(_trace(python, folder, as_json) if trace else _train(python, folder, run, as_json))


@app.command()
def tokens(
    source: Annotated[
        Path, typer.Argument(exists=True, help="Text file, table of text, or a directory of them.")
    ],
    folder: Annotated[Path, typer.Argument(help="Directory for the token file.")],
    tokenizer: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="Directory of the model that will train on it.")
    ],
) -> None:
    """Turn text into a token file for any number of trainings; print its contents as JSON."""
    from miner.jobs import native_runs

    where = [str(source.resolve()), str(folder.resolve()), "--tokenizer", str(tokenizer.resolve())]
    for line in native_runs.program_lines(_training_python(), ["trainer.inputs.corpus", *where]):
        typer.echo(line, nl=False)


def _training_python() -> Path:
    from miner.backends.environment import training_interpreter

    return Path(training_interpreter(load_settings()).path)


def _make_base_model(python: Path, folder: Path, params: str, tokenizer: Path | None, length: int) -> Path:
    from miner.jobs import native_runs

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
    from miner.jobs import native_runs

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
    from miner.jobs import native_runs

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
        Path, typer.Option(exists=True, dir_okay=False, help="Task file to score on: see docs/evaluation.md.")
    ],
    base: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Directory of a text task's base model."),
    ] = None,
    model: Annotated[
        list[Path] | None,
        typer.Option(exists=True, help="Directory of a model or an adapter, or a file of one (repeatable)."),
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Number of rows to score on, from the first. Default: all.")
    ] = None,
    allow_rewards: Annotated[
        bool,
        typer.Option("--allow-rewards", help="Run a GRPO task's reward code here, with your permissions."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Score the base, ours and other models on a task's rows or pictures as validators do; say which wins."""
    from miner.jobs import native_runs

    if "pictures_dir" in read_json_object(task):
        rule = "is for text tasks; a picture task's file names its base, and all its pictures are scored"
        texts = {"--base": base, "--rows": rows, "--allow-rewards": allow_rewards}
        if given := [Problem(name, f"{value}", rule) for name, value in texts.items() if value]:
            raise ConfigError("eval", given)
        raise typer.Exit(_evaluate_pictures(task, model or [], as_json))
    if base is None:
        raise ConfigError("eval", [Problem("--base", "none", "is needed for a text task")])
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


def _evaluate_pictures(task: Path, models: Sequence[Path], as_json: bool) -> int:
    """Run the evaluator's measure where its stack is; the task file is a `PictureEvaluation`."""
    from core.runs.picture_run import PictureEvaluation, PictureScores
    from miner.cli.render.terminal import Terminal, plain_table
    from miner.jobs import native_runs

    job = read_record(task, PictureEvaluation)
    files = [str(one / "last.safetensors" if one.is_dir() else one) for one in models]
    python = os.environ.get("GOD_MINER_PICTURES_PYTHON", "python")
    with tempfile.TemporaryDirectory() as name:
        report, asked = Path(name) / "report.json", Path(name) / "job.json"
        update = {"report_path": str(report), "adapters": ("", *files) if files else job.adapters}
        asked.write_text(job.model_copy(update=update).model_dump_json(), encoding="utf-8")
        command = [python, "-m", "trainer.pictures.evaluate", str(asked)]
        code = subprocess.run(
            command, env=native_runs.child_environment(), stdin=subprocess.DEVNULL, check=False
        ).returncode
        if not report.exists():
            return code or 1
        found = PictureScores.model_validate_json(report.read_bytes())
    if as_json:
        echo(found.model_dump_json(indent=1))
        return code
    base = next((row.score for row in found.adapters if not row.path), None)
    rows = []
    for row in found.adapters:
        score = f"{row.score:.6f}" if row.score is not None else row.error
        means = [f"{fmean(one):.6f}" if one else "" for one in (row.text_losses, row.no_text_losses)]
        gain = f"{row.score / base - 1:+.2%}" if row.score is not None and base else ""
        rows.append((row.path or "the base", score, *means, gain))
    columns = ("adapter", "score", "with caption", "without", "to the base")
    Terminal().print(plain_table(*columns, rows=rows, right=columns[1:], header_style="dim"))
    return code
