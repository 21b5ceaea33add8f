"""The hub itself, through its own client. Imported by publishing processes only: the client has no time
limits of its own, sleeps through rate limits, and takes 60 MB."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2
from huggingface_hub import CommitOperationDelete, HfApi, constants, set_client_factory
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils._http import default_client_factory, get_session

from core.submission.card import card
from core.submission.selection import CARD
from miner import __version__
from miner.publish.packing import Parcel
from miner.publish.upload import Tally, Told, addition, watch_deduplicated
from miner.publish.words import Account, HubTrouble, Published, Trouble

log = logging.getLogger(__name__)

#: A commit of many files takes the hub a minute; nothing else is silent for half of that.
TIMEOUT = httpx2.Timeout(connect=15, read=120, write=60, pool=60)
#: The hub makes it, and it belongs to how files are stored there.
ATTRIBUTES = ".gitattributes"
UPLOADS_AT_ONCE = 4
_MESSAGE = "Submission"


@dataclass(frozen=True, slots=True)
class State:
    """What lies in a repository."""

    commit: str
    files: Mapping[str, RepoFile]


class HuggingFace:
    def __init__(self, endpoint: str, token: str | None, note: Callable[[str], None]) -> None:
        if not token:
            text = "HF_TOKEN is not set: publishing needs one with write permission"
            raise HubTrouble(Trouble.TOKEN, text)
        set_client_factory(_client)
        self._api = HfApi(
            endpoint=endpoint, token=token, library_name="god-miner", library_version=__version__
        )
        self._note = note

    def account(self, owner: str | None) -> Account:
        about = self._api.whoami()
        user = str(about["name"])
        owner = owner or user
        may_write, detail = _may_write(about, owner)
        return Account(user=user, owner=owner, may_write=may_write, detail=detail)

    def owner(self, wanted: str | None) -> str:
        return wanted or str(self._api.whoami()["name"])

    def publish(
        self, repo: str, parcel: Parcel, model: str | None, earlier: str | None, told: Told
    ) -> Published:
        if earlier and earlier != repo:
            self._take_over(earlier, repo)
        self._make(repo)
        self._choose_transfer(repo)
        tally = Tally(parcel.report.size, told)
        watch_deduplicated(tally)
        try:
            commit = self._bring(repo, parcel, tally)
        except ValueError as error:
            if "README.md" not in str(error) or model is None:
                raise
            # The list of licences and the like is the hub's and grows; a card is not worth a submission.
            self._note(f"the hub does not like the README, a plain one takes its place: {error}")
            items = {**parcel.items, CARD: card(parcel.report.kind, model)}
            parcel = parcel.with_items(items)
            commit = self._bring(repo, parcel, tally)
        self._verify(repo, commit, parcel)
        tally.finish()
        report = parcel.report
        return Published(
            repo=repo,
            model_hash=report.model_hash,
            commit=commit,
            files=len(report.files),
            size=report.size,
            sent=tally.sent,
        )

    def move(self, earlier: str, repo: str) -> Published:
        """The same files at `repo`; nothing is sent."""
        if not self._exists(repo):
            self._api.move_repo(from_id=earlier, to_id=repo)
        elif self._exists(earlier) and not self._same(earlier, repo):
            text = f"{repo} is there already, with something else in it: publish the folder again"
            raise HubTrouble(Trouble.REFUSED, text)
        self._publicly(repo, self._state(repo).commit)
        return Published(repo=repo, model_hash=None)

    def _take_over(self, earlier: str, repo: str) -> None:
        """Rename what is there, so that what did not change is not sent again. Not needed, so never fatal."""
        try:
            if self._exists(earlier) and not self._exists(repo):
                self._api.move_repo(from_id=earlier, to_id=repo)
        except HfHubHTTPError as error:
            self._note(f"{earlier} can't be renamed to {repo}, which is made anew: {error}")

    def _make(self, repo: str) -> None:
        """The name is a validator's word: what an account keeps to itself under it is not thrown open."""
        self._api.create_repo(repo, private=False, exist_ok=True)
        if self._api.model_info(repo).private:
            if self._state(repo).files.keys() - {ATTRIBUTES}:
                text = f"{repo} is there, private and not empty: rename it, delete it or make it public"
                raise HubTrouble(Trouble.REFUSED, text)
            self._api.update_repo_settings(repo, private=False)

    def _choose_transfer(self, repo: str) -> None:
        """Deduplicating where the hub can: then a cut upload goes on in the middle of a file. The client
        takes it for granted, but what merely speaks like the hub may not have it."""
        url = f"{self._api.endpoint}/api/models/{repo}/xet-write-token/main"
        asked = get_session().get(url, headers={"authorization": f"Bearer {self._api.token}"})
        if asked.status_code in (404, 405, 501):
            constants.HF_HUB_DISABLE_XET = True

    def _bring(self, repo: str, parcel: Parcel, tally: Tally) -> str:
        """Everything in one commit, on top of what was just looked at: nobody ever sees a mixture."""
        before = self._state(repo)
        changed = [name for name in parcel.items if not _is(before.files.get(name), name, parcel)]
        gone = [path for path in before.files if path not in parcel.items and path != ATTRIBUTES]
        for name in parcel.items.keys() - set(changed):
            tally.at(name, parcel.size(name), 0)
        if not changed and not gone:
            return before.commit
        operations: list[Any] = [CommitOperationDelete(path) for path in gone]
        operations += [
            addition(name, parcel.items[name], parcel.sha256(name), tally) for name in sorted(changed)
        ]
        made = self._api.create_commit(
            repo,
            operations,
            commit_message=_MESSAGE,
            parent_commit=before.commit,
            num_threads=UPLOADS_AT_ONCE,
        )
        return str(made.oid)

    def _verify(self, repo: str, commit: str, parcel: Parcel) -> None:
        """What lies there is what was checked, and everybody may have it."""
        there = self._state(repo, commit).files
        wrong = [name for name in parcel.items if not _is(there.get(name), name, parcel)]
        wrong += [path for path in there if path not in parcel.items and path != ATTRIBUTES]
        if wrong:
            text = f"{repo} holds something else than was sent: {', '.join(sorted(wrong)[:5])}"
            raise HubTrouble(Trouble.MISMATCH, text)
        self._publicly(repo, commit)

    def _publicly(self, repo: str, commit: str) -> None:
        """As a validator sees it: without a token."""
        try:
            seen = self._api.model_info(repo, token=False)
        except HfHubHTTPError as error:
            if error.response.status_code not in (401, 403, 404):
                raise
            text = f"{repo} can't be seen without a token: make it public, and see the account's settings"
            raise HubTrouble(Trouble.SERVER, text) from error
        if seen.gated:
            raise HubTrouble(
                Trouble.REFUSED, f"{repo} is gated: validators can't have it; open it in its settings"
            )
        if seen.sha != commit:
            text = f"{repo} is at {seen.sha} and not at {commit}: somebody else writes there"
            raise HubTrouble(Trouble.CONFLICT, text)

    def _same(self, earlier: str, repo: str) -> bool:
        return _names(self._state(earlier).files.values()) == _names(self._state(repo).files.values())

    def _state(self, repo: str, revision: str | None = None) -> State:
        commit = revision or self._api.model_info(repo).sha
        assert commit is not None
        found = self._api.list_repo_tree(repo, recursive=True, revision=commit)
        return State(commit, {entry.path: entry for entry in found if isinstance(entry, RepoFile)})

    def _exists(self, repo: str) -> bool:
        """Under this very name: the hub redirects from names that were given up."""
        try:
            return self._api.model_info(repo).id == repo
        except HfHubHTTPError as error:
            if error.response.status_code == 404:
                return False
            raise


def _client() -> httpx2.Client:
    made = default_client_factory()
    made.timeout = TIMEOUT
    return made


def _is(there: RepoFile | None, name: str, parcel: Parcel) -> bool:
    """Whether a file of the hub is this one of ours, by what the hub keeps it under."""
    if there is None or there.size != parcel.size(name):
        return False
    if there.lfs is not None:
        return bool(there.lfs.sha256 == parcel.sha256(name))
    return bool(there.blob_id == parcel.git_name(name))


def _names(files: Iterable[RepoFile]) -> set[tuple[str, str]]:
    return {
        (file.path, file.lfs.sha256 if file.lfs else file.blob_id)
        for file in files
        if file.path != ATTRIBUTES
    }


def _may_write(about: Mapping[str, Any], owner: str) -> tuple[bool, str]:
    """What a token's own description says; finer rights of organisations show only when one tries."""
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
