"""`god-miner submission`: what a folder would be worth if it were published."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from miner.commands.output import say, say_json, terminal

if TYPE_CHECKING:
    from core.submission.judge import Judged
    from core.tasks import TaskType

app = typer.Typer(no_args_is_help=True, help="Check a trained model before it is published.")

Folder = Annotated[Path, typer.Argument(help="The folder that a training left.")]
Model = Annotated[str | None, typer.Option(help="The base model's name on the hub.")]
BaseFolder = Annotated[
    Path | None, typer.Option("--base", help="The base model's folder, to hold its configuration against.")
]
Kind = Annotated[
    str | None, typer.Option("--task-type", help="instruct, chat, dpo, grpo, image; else found out.")
]
AsJson = Annotated[bool, typer.Option("--json", help="For machines: one JSON object.")]


@app.command()
def check(
    folder: Folder,
    base: BaseFolder = None,
    model: Model = None,
    task_type: Kind = None,
    as_is: Annotated[
        bool, typer.Option("--as-is", help="As a tournament takes it: everything, and nothing mended.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Look for what evaluators would hold against a submission. Exit code 1 if anything."""
    from core.submission.check import Base
    from core.submission.judge import judge

    judged = judge(folder, Base(model, base), task_type_of(task_type), as_is=as_is, keep_card=True)
    if as_json:
        say_json(_as_dict(judged))
    else:
        _show(judged)
    raise typer.Exit(1 if judged.faults else 0)


@app.command("hash")
def hash_(folder: Folder, as_json: AsJson = False) -> None:
    """The model hash that a validator takes of these files."""
    from core.submission.judge import hash_of

    found = hash_of(folder)
    if as_json:
        say_json({"model_hash": found}, line=True)
    elif found is None:
        say(f"{folder} holds nothing that counts: validators could not verify it", err=True)
    else:
        say(found)
    raise typer.Exit(0 if found else 1)


def task_type_of(word: str | None) -> TaskType | None:
    from core.errors import ConfigError, Problem
    from core.profile.words import TASK_WORDS
    from core.tasks import TaskType

    if word is None:
        return None
    known = {**TASK_WORDS, **{kind.value.lower(): kind for kind in TaskType}}
    if word.lower() not in known:
        rule = f"a task type is one of {', '.join(TASK_WORDS)}"
        raise ConfigError("submission", [Problem("--task-type", word, rule)])
    return known[word.lower()]


def _as_dict(judged: Judged) -> dict[str, object]:
    report = judged.report
    return {
        "good": not judged.faults,
        "kind": report.kind,
        "parameters": report.parameters,
        "model_hash": report.model_hash,
        "files": {name: {"size": fact.size, "sha256": fact.sha256} for name, fact in report.files.items()},
        "faults": [fault.as_dict() for fault in judged.faults],
        "mended": [fault.as_dict() for fault in judged.prepared.mended],
        "left_out": [fault.as_dict() for fault in judged.prepared.left_out],
    }


def _show(judged: Judged) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console = terminal()
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("Published", overflow="fold")
    table.add_column("Bytes", justify="right")
    table.add_column("SHA-256", no_wrap=True)
    for name, fact in judged.report.files.items():
        table.add_row(name, f"{fact.size:,}", f"{fact.sha256[:16]}…")
    console.print(table)
    lines = [("mended", "yellow", fault) for fault in judged.prepared.mended]
    lines += [("left out", "dim", fault) for fault in judged.prepared.left_out if fault not in judged.faults]
    lines += [("fault", "bold red", fault) for fault in judged.faults]
    for word, style, fault in lines:
        console.print(Text(f"{word:10}", style).append(str(fault), "default"), soft_wrap=True)
    report = judged.report
    console.print(f"kind       {report.kind}, {report.parameters:,} numbers", soft_wrap=True)
    console.print(f"model_hash {report.model_hash or 'none'}", soft_wrap=True)
    console.print(Text("not good" if judged.faults else "good", "bold red" if judged.faults else "green"))
