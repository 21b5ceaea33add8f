"""`god-miner submission` and `publish`: check a model as a validator would, and publish it as the daemon
does."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from core.domain.errors import ConfigError, Problem
from miner.cli.options import AsJson, load_settings
from miner.cli.output import echo, echo_json, terminal

if TYPE_CHECKING:
    from core.domain.tasks import ImageModelType, TaskType
    from core.domain.wire import MinerSubmission
    from core.submission.prepare import CheckedSubmission
    from miner.publish import HubPublisher
    from miner.publish.publisher import PublishRequest


app = typer.Typer(no_args_is_help=True, help="Check a trained model before it is published.")

Folder = Annotated[Path, typer.Argument(help="Directory that a training left.")]
Model = Annotated[str | None, typer.Option(help="Name of the base model on the hub.")]
BaseFolder = Annotated[
    Path | None, typer.Option("--base", help="Directory of the base model, to compare its configuration.")
]
#: Repeated here, because importing them would slow every command down. A test compares.
TaskName = Literal["instruct", "chat", "dpo", "grpo", "image"]
Kind = Annotated[
    TaskName | None, typer.Option("--task-type", help="Task type. Default: inferred from the files.")
]
ImageKind = Annotated[
    str | None,
    typer.Option(
        "--image-type",
        help="Type of an image model: sdxl, flux, z-image, … Default: accept any family's names.",
    ),
]


@app.command()
def check(
    folder: Folder,
    base: BaseFolder = None,
    model: Model = None,
    task_type: Kind = None,
    image_type: ImageKind = None,
    as_is: Annotated[
        bool,
        typer.Option("--as-is", help="Judge every file, and correct nothing, as a tournament does."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a submission as evaluators do. Exit code 1 if anything is wrong."""
    from core.submission.check import BaseModelRef
    from core.submission.prepare import check_submission

    reference = BaseModelRef(model, base, image_type_of(image_type))
    judged = check_submission(folder, reference, task_type_of(task_type), as_is=as_is, keep_card=True)
    if as_json:
        echo_json(_verdict_as_dict(judged))
    else:
        _print_verdict(judged)
    raise typer.Exit(1 if judged.faults else 0)


@app.command("hash")
def hash_(folder: Folder, as_json: AsJson = False) -> None:
    """Print the model hash that a validator computes for these files."""
    from core.submission.prepare import folder_model_hash

    found = folder_model_hash(folder)
    if as_json:
        echo_json({"model_hash": found}, line=True)
    elif found is None:
        echo(f"{folder} holds nothing that counts: validators could not verify it", err=True)
    else:
        echo(found)
    raise typer.Exit(0 if found else 1)


def task_type_of(name: TaskName | None) -> TaskType | None:
    from core.domain.tasks import task_type_named

    return None if name is None else task_type_named(name)


def image_type_of(word: str | None) -> ImageModelType | None:
    from core.domain.tasks import ImageModelType

    if word is None:
        return None
    if word not in tuple(ImageModelType):
        rule = f"an image type is one of {', '.join(ImageModelType)}"
        raise ConfigError("submission", [Problem("--image-type", word, rule)])
    return ImageModelType(word)


def _verdict_as_dict(judged: CheckedSubmission) -> dict[str, object]:
    report = judged.report
    return {
        "good": not judged.faults,
        "kind": report.kind,
        "parameters": report.parameters,
        "model_hash": report.model_hash,
        "files": {name: {"size": fact.size, "sha256": fact.sha256} for name, fact in report.files.items()},
        "faults": [fault.as_dict() for fault in judged.faults],
        "remarks": [fault.as_dict() for fault in report.remarks],
        "mended": [fault.as_dict() for fault in judged.prepared.mended],
        "left_out": [fault.as_dict() for fault in judged.prepared.left_out],
    }


def _print_verdict(judged: CheckedSubmission) -> None:
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
    lines += [("remark", "yellow", fault) for fault in judged.report.remarks]
    lines += [("fault", "bold red", fault) for fault in judged.faults]
    for word, style, fault in lines:
        console.print(Text(f"{word:10}", style).append(str(fault), "default"), soft_wrap=True)
    report = judged.report
    console.print(f"kind       {report.kind}, {report.parameters:,} numbers", soft_wrap=True)
    console.print(f"model_hash {report.model_hash or 'none'}", soft_wrap=True)
    console.print(Text("not good" if judged.faults else "good", "bold red" if judged.faults else "green"))


def publish(
    folder: Folder,
    repo: Annotated[str, typer.Option(help="Name of the repository, without the owner.")],
    model: Model = None,
    base: BaseFolder = None,
    task_type: Kind = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Minutes after which to give up. Default: never.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a trained model and publish it to HUB as HF_USER, replacing what was there."""
    from miner.publish import HubPublisher, PublishTarget

    settings = load_settings()
    outgoing = _publish_request(folder, _checked_repo_name(repo), model, base, task_type, minutes)
    publisher = HubPublisher(PublishTarget.from_settings(settings), on_note=_print_note)
    try:
        made = asyncio.run(_publish_with_progress(publisher, outgoing))
    finally:
        publisher.forget(outgoing.job_id)
    if as_json:
        echo_json({"repo": made.repo, "model_hash": made.model_hash}, line=True)
    else:
        echo(f"{made.repo}\nmodel_hash {made.model_hash}")


def _print_note(_job_id: int, text: str) -> None:
    echo(text, err=True)


def _checked_repo_name(repo: str) -> str:
    from pydantic import TypeAdapter, ValidationError

    from core.domain.wire import RepoName

    try:
        return TypeAdapter(RepoName).validate_python(repo)
    except ValidationError:
        rule = "a repository's name has letters, digits, single dots, dashes and underscores, and no owner"
        raise ConfigError("publish", [Problem("--repo", repo, rule)]) from None


def _publish_request(
    folder: Path,
    repo: str,
    model: str | None,
    base: Path | None,
    name: TaskName | None,
    minutes: float | None,
) -> PublishRequest:
    import os
    import time

    from core.domain.tasks import TaskType
    from core.submission.folder import SubmissionKind, kind_of, list_folder
    from miner.publish.publisher import PublishRequest

    kind = task_type_of(name)
    if kind is None:
        image = kind_of(list_folder(folder).names()) is SubmissionKind.IMAGE
        kind = TaskType.IMAGE if image else TaskType.INSTRUCT
    return PublishRequest(
        # Not a job of the daemon: what is remembered between tries must not mix with theirs.
        job_id=-os.getpid(),
        task_type=kind,
        model=model or "",
        model_path=base or Path(),
        folder=folder.absolute(),
        repo_name=repo,
        finish_by=None if minutes is None else time.time() + 60 * minutes,
    )


async def _publish_with_progress(publisher: HubPublisher, outgoing: PublishRequest) -> MinerSubmission:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description:7}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = terminal(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bars:
        known = {what: bars.add_task(what, total=None, visible=False) for what in ("check", "upload")}

        def on_progress(what: str, done: int, total: int | None) -> None:
            bars.update(known[what], completed=done, total=total, visible=True)

        return await publisher.publish(outgoing, on_progress, keep_card=True)
