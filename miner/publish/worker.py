"""A process that carries out one publication, and says what a failure means and whether a retry can help.

`miner.publish.publisher` starts it, writes an order to its standard input and reads its events. It is a
process because it reads gigabytes and waits for a client without time limits, and because a process can be
ended at any instant. It exits when its standard input closes: then the daemon is gone.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from core.submission.check import BaseModelRef
from core.submission.digests import digest_file
from core.submission.faults import BadSubmission
from core.submission.folder import open_plain
from core.submission.swap import put_in_place, recover_swap
from miner.publish.messages import (
    PROTOCOL,
    HubAccount,
    HubTrouble,
    PublishedRepo,
    PublishEvent,
    PublishFailed,
    PublishNote,
    PublishOrder,
    PublishProgress,
    PublishTask,
    PublishTrouble,
)
from miner.publish.packing import PackedSubmission
from miner.support.child_main import EventWriter, serve
from miner.support.rate_limits import retry_after

if TYPE_CHECKING:
    from miner.publish.huggingface import HuggingFaceHub

#: The owner of the repositories if none is set.
DEFAULT_USER = "local"
#: A server cannot ask for a longer pause.
MAX_REQUESTED_SECONDS = 3600.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_TROUBLE_OF_STATUS = {
    401: PublishTrouble.TOKEN,
    402: PublishTrouble.FORBIDDEN,
    403: PublishTrouble.FORBIDDEN,
    # For what was created a moment ago: not every server of the hub knows it yet.
    404: PublishTrouble.SERVER,
    408: PublishTrouble.SERVER,
    409: PublishTrouble.CONFLICT,
    412: PublishTrouble.CONFLICT,
    425: PublishTrouble.SERVER,
    429: PublishTrouble.RATE_LIMITED,
}
_WAY_OUT = {
    PublishTrouble.TOKEN: "the hub does not know HF_TOKEN (any more): make a new one with write permission",
    PublishTrouble.FORBIDDEN: "HF_TOKEN may not write there, or the account's quota is used up: see "
    "its permissions and HF_USER",
}
#: Behind whatever answers validators.
NICENESS = 5
#: Log messages of the client while it waits, which would look like a standstill otherwise.
_FORWARDED_LOGGERS = ("huggingface_hub.utils._http",)


class LocalHub:
    """HUB=local: a directory instead of the hub, with the same checks and the same fingerprint."""

    def __init__(self, folder: Path, user: str | None) -> None:
        self.folder = folder
        self.user = user or DEFAULT_USER

    def publish(self, repo_name: str, packed: PackedSubmission) -> PublishedRepo:
        repo = f"{self.user}/{repo_name}"
        path = self.folder / repo
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.tmp")
        shutil.rmtree(partial, ignore_errors=True)
        for name, item in packed.items.items():
            target = partial / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(item, bytes):
                target.write_bytes(item)
            else:
                _copy_file(item, target)
            _verify_copy(target, packed.sha256(name))
        put_in_place(partial, path)
        report = packed.report
        return PublishedRepo(
            repo=repo,
            model_hash=report.model_hash,
            files=len(report.files),
            size=report.size,
            sent=report.size,
        )

    def move(self, earlier: str, repo_name: str) -> PublishedRepo:
        repo = f"{self.user}/{repo_name}"
        old, new = self.folder / earlier, self.folder / repo
        recover_swap(old)
        if not recover_swap(new):
            if not old.is_dir():
                raise HubTrouble(PublishTrouble.GONE, f"{earlier} is not in {self.folder} (any more)")
            new.parent.mkdir(parents=True, exist_ok=True)
            os.rename(old, new)
        return PublishedRepo(repo=repo, model_hash=None)


def _copy_file(source: Path, target: Path) -> None:
    """A copy and not a link: what is published must not change when its source does."""
    with open(open_plain(source), "rb") as reader, target.open("xb") as writer:
        shutil.copyfileobj(reader, writer, 4 << 20)


def _verify_copy(target: Path, sha256: str) -> None:
    written = digest_file(target, plain=True).sha256
    if written != sha256:
        text = f"{target} has the SHA-256 {written}, but {sha256} was checked: it was changed meanwhile"
        raise HubTrouble(PublishTrouble.MISMATCH, text)


def failure_of(error: BaseException) -> PublishFailed:
    """Name the innermost known cause: the client wraps what happened to a file."""
    if isinstance(error, HubTrouble):
        return PublishFailed(trouble=error.trouble, text=str(error), retry_after=error.retry_after)
    if isinstance(error, BadSubmission):
        return PublishFailed(trouble=PublishTrouble.BAD_SUBMISSION, text=str(error))
    for cause in reversed(list(_causes(error))):
        if (failure := _failure_of_cause(cause)) is not None:
            return failure
    return PublishFailed(trouble=PublishTrouble.CRASHED, text=_error_text(error))


def _failure_of_cause(error: BaseException) -> PublishFailed | None:
    import httpx2

    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if isinstance(status, int) and status >= 400:
        return _failure_of_status(error, status, response.headers if response is not None else {})
    if isinstance(error, httpx2.TransportError):
        return PublishFailed(
            trouble=PublishTrouble.NETWORK, text=f"the hub cannot be reached: {_error_text(error)}"
        )
    if isinstance(error, OSError) and error.errno in _FULL:
        return PublishFailed(trouble=PublishTrouble.DISK_FULL, text=f"the disk is full: {error}")
    if isinstance(error, (ConnectionError, TimeoutError)):
        return PublishFailed(
            trouble=PublishTrouble.NETWORK, text=f"the hub cannot be reached: {_error_text(error)}"
        )
    return _failure_of_xet(error)


def _failure_of_xet(error: BaseException) -> PublishFailed | None:
    """The deduplicating transfer has its own exceptions, some of which only their text explains."""
    if type(error).__name__ == "XetAuthenticationError":
        return PublishFailed(
            trouble=PublishTrouble.TOKEN, text=f"{_error_text(error)}; {_WAY_OUT[PublishTrouble.TOKEN]}"
        )
    if type(error).__module__ in ("builtins", "hf_xet") and isinstance(error, RuntimeError):
        text = str(error).lower()
        if "no space" in text or "os error 28" in text:
            return PublishFailed(trouble=PublishTrouble.DISK_FULL, text=_error_text(error))
        if any(
            word in text for word in ("cas", "xet", "request", "network", "connection", "timeout", "http")
        ):
            return PublishFailed(trouble=PublishTrouble.NETWORK, text=_error_text(error))
    return None


def _failure_of_status(error: BaseException, status: int, headers: Mapping[str, str]) -> PublishFailed:
    trouble = _TROUBLE_OF_STATUS.get(status) or (
        PublishTrouble.SERVER if status >= 500 else PublishTrouble.REFUSED
    )
    text = f"the hub answers {status}: {_error_text(error)}"
    if trouble in _WAY_OUT:
        text = f"{text}; {_WAY_OUT[trouble]}"
    seconds = retry_after(headers.get("retry-after"))
    pause = None if seconds is None else min(seconds, MAX_REQUESTED_SECONDS)
    return PublishFailed(trouble=trouble, text=text, retry_after=pause)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def _error_text(error: BaseException) -> str:
    text = getattr(error, "server_message", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())[:1000]


class _ClientLogHandler(logging.Handler):
    def __init__(self, on_note: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._on_note = on_note

    def emit(self, record: logging.LogRecord) -> None:
        self._on_note(record.getMessage().split("?")[0])


def carry_out(order: PublishOrder, write: EventWriter) -> PublishEvent:
    def on_note(text: str) -> None:
        write(PublishNote(text=text[:2000]))

    if order.task is PublishTask.PUBLISH:
        return _publish(order, write, on_note)
    if order.local is not None:
        from miner.publish.worker import LocalHub

        local = LocalHub(Path(order.local), order.user)
        if order.task is PublishTask.MOVE:
            return local.move(order.earlier or "", order.repo_name)
        return HubAccount(user=local.user, owner=local.user, may_write=True, detail=f"folder {order.local}")
    hub = _hub(order, on_note)
    if order.task is PublishTask.MOVE:
        return hub.move(order.earlier or "", f"{hub.owner(order.user)}/{order.repo_name}")
    return hub.account(order.user)


def _publish(order: PublishOrder, write: EventWriter, on_note: Callable[[str], None]) -> PublishEvent:
    from miner.publish.packing import pack_submission

    def on_progress(what: Literal["check", "upload"], done: int, total: int) -> None:
        if write.is_due(what, done, total):
            write(PublishProgress(what=what, done=done, total=total))

    packed = pack_submission(
        Path(order.folder),
        BaseModelRef(order.model, Path(order.base) if order.base else None, order.image_type),
        order.task_type,
        keep_card=order.keep_card,
        memory=Path(order.memory) if order.memory else None,
        on_progress=lambda done, total: on_progress("check", done, total),
    )
    for note in packed.notes:
        on_note(note)
    if order.local is not None:
        from miner.publish.worker import LocalHub

        return LocalHub(Path(order.local), order.user).publish(order.repo_name, packed)
    hub = _hub(order, on_note)
    repo = f"{hub.owner(order.user)}/{order.repo_name}"
    return hub.publish(
        repo, packed, order.model, order.earlier, lambda done, total: on_progress("upload", done, total)
    )


def _hub(order: PublishOrder, on_note: Callable[[str], None]) -> HuggingFaceHub:
    from miner.publish.huggingface import HuggingFaceHub

    for name in _FORWARDED_LOGGERS:
        logging.getLogger(name).addHandler(_ClientLogHandler(on_note))
    return HuggingFaceHub(order.endpoint, order.token, on_note)


def failure_event(error: Exception, order: PublishOrder) -> PublishFailed:
    traceback.print_exc()
    failure = failure_of(error)
    if failure.trouble is PublishTrouble.MISMATCH and order.memory:
        # Perhaps the remembered digests are wrong: the next try reads the files.
        Path(order.memory).unlink(missing_ok=True)
    return failure


if __name__ == "__main__":
    sys.exit(serve(PROTOCOL, carry_out, failure_event, niceness=NICENESS))
