"""The Hugging Face Hub through its own client, with progress and without reading any file twice.

Imported by publishing processes only: the client has no time limits of its own, sleeps through rate limits
and takes 60 MB.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, set_client_factory
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import _xet_progress_reporting
from huggingface_hub.utils._http import default_client_factory, get_session

from core.submission.folder import CARD, SubmissionItem, open_plain
from core.submission.metadata import model_card
from miner import __version__
from miner.publish.messages import HubAccount, HubTrouble, PublishedRepo, PublishTrouble
from miner.publish.packing import PackedSubmission

UploadCallback = Callable[[int, int], None]


class UploadCounter:
    """Bytes of all files that have been sent, by either transfer."""

    def __init__(self, total: int, on_progress: UploadCallback) -> None:
        self.total = total
        #: Bytes sent over the network, including those that were sent again.
        self.sent = 0
        self._on_progress = on_progress
        self._position: dict[str, int] = {}
        self._lock = threading.Lock()

    def file_read_to(self, name: str, position: int, read: int) -> None:
        """A file was read up to `position`, in order to send it."""
        with self._lock:
            self._position[name] = position
            self.sent += read
            self._report(sum(self._position.values()))

    def deduplicated(self, done: int, sent: int) -> None:
        """The deduplicating transfer has reported these sums of all its files."""
        with self._lock:
            self.sent = sent
            self._position[""] = done
            self._report(sum(self._position.values()))

    def finish(self) -> None:
        """The commit is complete, including files that are part of the commit itself."""
        with self._lock:
            self._report(self.total)

    def _report(self, done: int) -> None:
        self._on_progress(min(done, self.total), self.total)


class _CountedFile(io.FileIO):
    """A file that reports how far it was read."""

    def __init__(self, path: Path, name: str, counter: UploadCounter) -> None:
        super().__init__(open_plain(path), "r", closefd=True)
        self._name, self._counter = name, counter

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer) or 0
        self._counter.file_read_to(self._name, self.tell(), count)
        return count


@dataclass
class HashedAddition(CommitOperationAdd):
    """A file to add, whose SHA-256 is known already."""

    counter: UploadCounter | None = field(default=None, repr=False)
    source: Path | None = None

    @contextlib.contextmanager
    def as_file(self, with_tqdm: bool = False) -> Iterator[BinaryIO]:
        if self.source is None or self.counter is None or not with_tqdm:
            with super().as_file() as file:
                yield file
            return
        # The client asks `with_tqdm` when it sends the file, not when it only inspects it.
        with io.BufferedReader(_CountedFile(self.source, self.path_in_repo, self.counter), 1 << 20) as file:
            yield file


def hashed_addition(name: str, item: SubmissionItem, sha256: str, counter: UploadCounter) -> HashedAddition:
    if isinstance(item, bytes):
        return HashedAddition(name, item)
    addition = HashedAddition(name, os.fspath(item), counter=counter, source=item)
    addition.upload_info.sha256 = bytes.fromhex(sha256)
    return addition


def watch_deduplicated(counter: UploadCounter) -> None:
    """Have the deduplicating transfer report to `counter` instead of drawing bars."""

    class Reporter:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def update_progress(self, group: Any, *_: Any) -> None:
            counter.deduplicated(group.total_bytes_completed, group.total_transfer_bytes_completed)

        def close(self, *_: Any) -> None:
            pass

    # The client offers no other hook; without it there would be no progress, but no harm.
    _xet_progress_reporting.XetUploadProgressReporter = Reporter  # type: ignore[assignment,misc]


log = logging.getLogger(__name__)

#: A commit of many files takes the hub a minute; no other request takes half of that.
TIMEOUT = httpx2.Timeout(connect=15, read=120, write=60, pool=60)
#: Created by the hub: it describes how files are stored there.
ATTRIBUTES = ".gitattributes"
UPLOADS_AT_ONCE = 4
_MESSAGE = "Submission"


@dataclass(frozen=True, slots=True)
class RepoState:
    """The contents of a repository at a commit."""

    commit: str
    files: Mapping[str, RepoFile]


class HuggingFaceHub:
    def __init__(self, endpoint: str, token: str | None, on_note: Callable[[str], None]) -> None:
        if not token:
            text = "HF_TOKEN is not set: publishing needs one with write permission"
            raise HubTrouble(PublishTrouble.TOKEN, text)
        set_client_factory(_http_client)
        self._api = HfApi(
            endpoint=endpoint, token=token, library_name="god-miner", library_version=__version__
        )
        self._on_note = on_note

    def account(self, owner: str | None) -> HubAccount:
        about = self._api.whoami()
        user = str(about["name"])
        owner = owner or user
        may_write, detail = _may_write(about, owner)
        return HubAccount(user=user, owner=owner, may_write=may_write, detail=detail)

    def owner(self, wanted: str | None) -> str:
        return wanted or str(self._api.whoami()["name"])

    def publish(
        self,
        repo: str,
        packed: PackedSubmission,
        model: str | None,
        earlier: str | None,
        on_progress: UploadCallback,
    ) -> PublishedRepo:
        if earlier and earlier != repo:
            self._rename_earlier(earlier, repo)
        self._create_public(repo)
        self._choose_transfer(repo)
        counter = UploadCounter(packed.report.size, on_progress)
        watch_deduplicated(counter)
        try:
            commit = self._upload(repo, packed, counter)
        except ValueError as error:
            if "README.md" not in str(error) or model is None:
                raise
            # The hub checks the card by its own lists, which change; a card is not worth a submission.
            self._on_note(f"the hub rejects the README, a plain one takes its place: {error}")
            items = {**packed.items, CARD: model_card(packed.report.kind, model)}
            packed = packed.with_items(items)
            commit = self._upload(repo, packed, counter)
        self._verify(repo, commit, packed)
        counter.finish()
        report = packed.report
        return PublishedRepo(
            repo=repo,
            model_hash=report.model_hash,
            commit=commit,
            files=len(report.files),
            size=report.size,
            sent=counter.sent,
        )

    def move(self, earlier: str, repo: str) -> PublishedRepo:
        """Rename the repository; nothing is sent."""
        if not self._exists(repo):
            self._api.move_repo(from_id=earlier, to_id=repo)
        elif self._exists(earlier) and not self._same(earlier, repo):
            text = f"{repo} exists already, with other content: publish the folder again"
            raise HubTrouble(PublishTrouble.REFUSED, text)
        self._verify_public(repo, self._state(repo).commit)
        return PublishedRepo(repo=repo, model_hash=None)

    def _rename_earlier(self, earlier: str, repo: str) -> None:
        """Rename the earlier repository, so that unchanged files are not sent again. Never fatal."""
        try:
            if self._exists(earlier) and not self._exists(repo):
                self._api.move_repo(from_id=earlier, to_id=repo)
        except HfHubHTTPError as error:
            self._on_note(f"{earlier} cannot be renamed to {repo}, which is created instead: {error}")

    def _create_public(self, repo: str) -> None:
        """Create the repository. A validator chose its name: an existing private one is not published."""
        self._api.create_repo(repo, private=False, exist_ok=True)
        if self._api.model_info(repo).private:
            if self._state(repo).files.keys() - {ATTRIBUTES}:
                text = f"{repo} exists, private and not empty: rename it, delete it or make it public"
                raise HubTrouble(PublishTrouble.REFUSED, text)
            self._api.update_repo_settings(repo, private=False)

    def _choose_transfer(self, repo: str) -> None:
        """Use the deduplicating transfer if the hub has it: it resumes an upload in the middle of a file.

        The client assumes it, but a server that only implements the hub's API may not have it.
        """
        url = f"{self._api.endpoint}/api/models/{repo}/xet-write-token/main"
        response = get_session().get(url, headers={"authorization": f"Bearer {self._api.token}"})
        if response.status_code in (404, 405, 501):
            constants.HF_HUB_DISABLE_XET = True

    def _upload(self, repo: str, packed: PackedSubmission, counter: UploadCounter) -> str:
        """Upload everything in one commit on top of the present one, so that a mixture is never visible."""
        before = self._state(repo)
        changed = [name for name in packed.items if not _is_same_file(before.files.get(name), name, packed)]
        gone = [path for path in before.files if path not in packed.items and path != ATTRIBUTES]
        for name in packed.items.keys() - set(changed):
            counter.file_read_to(name, packed.size(name), 0)
        if not changed and not gone:
            return before.commit
        operations: list[Any] = [CommitOperationDelete(path) for path in gone]
        operations += [
            hashed_addition(name, packed.items[name], packed.sha256(name), counter)
            for name in sorted(changed)
        ]
        commit = self._api.create_commit(
            repo,
            operations,
            commit_message=_MESSAGE,
            parent_commit=before.commit,
            num_threads=UPLOADS_AT_ONCE,
        )
        return str(commit.oid)

    def _verify(self, repo: str, commit: str, packed: PackedSubmission) -> None:
        """Check that the repository has exactly what was checked before, and that it is public."""
        there = self._state(repo, commit).files
        wrong = [name for name in packed.items if not _is_same_file(there.get(name), name, packed)]
        wrong += [path for path in there if path not in packed.items and path != ATTRIBUTES]
        if wrong:
            text = f"{repo} differs from what was sent: {', '.join(sorted(wrong)[:5])}"
            raise HubTrouble(PublishTrouble.MISMATCH, text)
        self._verify_public(repo, commit)

    def _verify_public(self, repo: str, commit: str) -> None:
        """Check the repository as a validator sees it, without a token."""
        try:
            seen = self._api.model_info(repo, token=False)
        except HfHubHTTPError as error:
            if error.response.status_code not in (401, 403, 404):
                raise
            text = f"{repo} is not visible without a token: make it public, and see the account's settings"
            raise HubTrouble(PublishTrouble.SERVER, text) from error
        if seen.gated:
            raise HubTrouble(
                PublishTrouble.REFUSED, f"{repo} is gated: validators cannot have it; open it in its settings"
            )
        if seen.sha != commit:
            text = f"{repo} is at {seen.sha} and not at {commit}: somebody else writes there"
            raise HubTrouble(PublishTrouble.CONFLICT, text)

    def _same(self, earlier: str, repo: str) -> bool:
        return _file_hashes(self._state(earlier).files.values()) == _file_hashes(
            self._state(repo).files.values()
        )

    def _state(self, repo: str, revision: str | None = None) -> RepoState:
        commit = revision or self._api.model_info(repo).sha
        assert commit is not None
        found = self._api.list_repo_tree(repo, recursive=True, revision=commit)
        return RepoState(commit, {entry.path: entry for entry in found if isinstance(entry, RepoFile)})

    def _exists(self, repo: str) -> bool:
        """Return True if it exists under this very name: the hub redirects from names of the past."""
        try:
            return self._api.model_info(repo).id == repo
        except HfHubHTTPError as error:
            if error.response.status_code == 404:
                return False
            raise


def _http_client() -> httpx2.Client:
    client = default_client_factory()
    client.timeout = TIMEOUT
    return client


def _is_same_file(there: RepoFile | None, name: str, packed: PackedSubmission) -> bool:
    """Return True if the hub's file is the same as ours, by the hash that the hub stores."""
    if there is None or there.size != packed.size(name):
        return False
    if there.lfs is not None:
        return bool(there.lfs.sha256 == packed.sha256(name))
    return bool(there.blob_id == packed.git_blob_hash(name))


def _file_hashes(files: Iterable[RepoFile]) -> set[tuple[str, str]]:
    return {
        (file.path, file.lfs.sha256 if file.lfs else file.blob_id)
        for file in files
        if file.path != ATTRIBUTES
    }


def _may_write(about: Mapping[str, Any], owner: str) -> tuple[bool, str]:
    """Read the token's description; finer rights in organisations only show in a try."""
    access = about.get("auth", {}).get("accessToken", {}) or {}
    role = str(access.get("role", "unknown"))
    user = str(about["name"])
    orgs = {str(org.get("name")): org for org in about.get("orgs", []) or []}
    if owner != user and owner not in orgs:
        return False, f"HF_USER={owner} is neither {user} nor one of that user's organisations"
    if owner != user and orgs[owner].get("roleInOrg") == "read":
        return False, f"{user} may only read in {owner}"
    if role == "read":
        return False, f"the token of {user} may only read; make one that may write"
    if role == "fineGrained" and not _granted(access, owner):
        return False, f"the fine-grained token of {user} lacks the permission repo.write for {owner}"
    return True, f"{user}, token of role {role}, publishing as {owner}"


def _granted(access: Mapping[str, Any], owner: str) -> bool:
    for scope in (access.get("fineGrained") or {}).get("scoped", []) or []:
        entity = scope.get("entity") or {}
        if entity.get("name") == owner and "repo.write" in (scope.get("permissions") or []):
            return True
    return False
