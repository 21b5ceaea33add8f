"""`god-miner publish`: a submission of one's own, the same way as the daemon's."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from miner.commands.output import say, say_json, terminal
from miner.commands.submission import AsJson, BaseFolder, Folder, Kind, Model, task_type_of

if TYPE_CHECKING:
    from core.wire import MinerSubmission
    from miner.jobs.ports import Outgoing
    from miner.publish import HubPublisher


def publish(
    folder: Folder,
    repo: Annotated[str, typer.Option(help="The repository's name, without the owner.")],
    model: Model = None,
    base: BaseFolder = None,
    task_type: Kind = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="Give up after this long.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check a trained model and publish it as HF_USER, where HUB says; what was there is replaced."""
    from miner.publish import HubPublisher, PublishTo
    from miner.settings import load_settings

    settings = load_settings()
    outgoing = _outgoing(folder, _checked_name(repo), model, base, task_type, minutes)
    publisher = HubPublisher(PublishTo.of(settings), noted=lambda _, text: say(text, err=True))
    try:
        made = asyncio.run(_published(publisher, outgoing))
    finally:
        publisher.forget(outgoing.job_id)
    if as_json:
        say_json({"repo": made.repo, "model_hash": made.model_hash}, line=True)
    else:
        say(f"{made.repo}\nmodel_hash {made.model_hash}")


def _checked_name(repo: str) -> str:
    from pydantic import TypeAdapter, ValidationError

    from core.errors import ConfigError, Problem
    from core.wire import RepoName

    try:
        return TypeAdapter(RepoName).validate_python(repo)
    except ValidationError:
        rule = "a repository's name has letters, digits, single dots, dashes and underscores, and no owner"
        raise ConfigError("publish", [Problem("--repo", repo, rule)]) from None


def _outgoing(
    folder: Path, repo: str, model: str | None, base: Path | None, word: str | None, minutes: float | None
) -> Outgoing:
    import os
    import time

    from core.submission.folder import listing
    from core.submission.selection import SubmissionKind, kind_of
    from core.tasks import TaskType
    from miner.jobs.ports import Outgoing

    kind = task_type_of(word)
    if kind is None:
        image = kind_of(listing(folder).names()) is SubmissionKind.IMAGE
        kind = TaskType.IMAGE if image else TaskType.INSTRUCT
    return Outgoing(
        # No job of the books: what is remembered between tries must not mix with theirs.
        job_id=-os.getpid(),
        task_id=repo,
        task_type=kind,
        model=model or "",
        model_path=base or Path(),
        folder=folder.absolute(),
        repo_name=repo,
        finish_by=None if minutes is None else time.time() + 60 * minutes,
    )


async def _published(publisher: HubPublisher, outgoing: Outgoing) -> MinerSubmission:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description:7}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = terminal(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bars:
        known = {what: bars.add_task(what, total=None, visible=False) for what in ("check", "upload")}

        def told(what: str, done: int, total: int | None) -> None:
            bars.update(known[what], completed=done, total=total, visible=True)

        return await publisher.publish(outgoing, told, keep_card=True)
