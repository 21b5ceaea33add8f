"""A stand-in for the Hugging Face hub on loopback: as much of its HTTP API as the real client needs.

Here is what reads: whoami, model info, tree, HEAD and GET of files with ETag, LFS redirects, Range. What
writes lives in `hub_upload`, with routes in the same table. Use it with `endpoint=hub.url`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from tests.doubles.flaky import FlakyServer, Reply, Request
from tests.doubles.hub_repos import Blob, Commit, Repo

Route = Callable[["Hub", Request, re.Match[str]], Reply]
ROUTES: list[tuple[str, re.Pattern[str], Route]] = []

_ID = r"(?P<id>[^/]+(?:/[^/]+)?)"


def route(method: str, pattern: str) -> Callable[[Route], Route]:
    """Adds a route: a method (HEAD goes with GET) and what its whole path looks like."""

    def add(function: Route) -> Route:
        ROUTES.append((method, re.compile(pattern), function))
        return function

    return add


class Hub(FlakyServer):
    def __init__(self) -> None:
        # The store of large files is another site: signed addresses, and a token must never get there.
        super().__init__(doors=2)
        #: By "owner/name".
        self.repos: dict[str, Repo] = {}
        #: sha256 → a large file that was uploaded, whether or not a commit names it yet.
        self.blobs: dict[str, Blob] = {}
        #: Token → user.
        self.tokens: dict[str, str] = {"hf_" + "t" * 34: "tester"}
        #: User → what whoami says of the token, where it may not simply write.
        self.roles: dict[str, dict[str, Any]] = {}
        #: Organisations of every user.
        self.orgs: dict[str, dict[str, Any]] = {}
        #: Above this many bytes a large file is taken in parts of that size.
        self.part_size = 1_000_000
        #: A folder in which the deduplicating client stores; None where only plain transfers are offered.
        self.deduplicated: Path | None = None
        #: Of uploads in parts: (sha256, number) → bytes.
        self.parts: dict[tuple[str, int], bytes] = {}

    @property
    def store_url(self) -> str:
        return self.urls[1]

    @property
    def token(self) -> str:
        return next(iter(self.tokens))

    def add(self, repo_id: str, files: Mapping[str, bytes | Path], **about: Any) -> Repo:
        """A repository with one commit."""
        repo = self.repos[repo_id] = Repo(repo_id, **about)
        repo.commit(files)
        return repo

    def repo(self, repo_id: str) -> Repo:
        return self.repos[repo_id]

    def answer(self, request: Request) -> Reply:
        method = "GET" if request.method == "HEAD" else request.method
        with self.lock:
            for wanted, pattern, function in ROUTES:
                found = pattern.fullmatch(request.path) if wanted == method else None
                if found:
                    return function(self, request, found)
        return problem(404, f"no such route: {request.line}")

    def user(self, request: Request) -> str | None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        return self.tokens.get(given)

    def readable(self, request: Request, repo_id: str) -> Repo | Reply:
        """The repository, if whoever asks may know of it; what the hub says otherwise."""
        user, repo = self.user(request), self.repos.get(unquote(repo_id))
        if "authorization" in request.headers and user is None:
            return problem(401, "Invalid credentials in Authorization header")
        if repo is None or (repo.private and user not in (repo.members | {repo.id.split("/")[0]})):
            # To strangers the hub does not even say that there is nothing.
            return problem(404 if user else 401, "Repository not found", "RepoNotFound")
        if repo.disabled:
            return problem(403, "Access to this resource is disabled.")
        return repo

    def openable(self, request: Request, repo: Repo) -> Reply | None:
        """None when its files may be read: of a gated repository everybody may see the list."""
        user = self.user(request)
        if not repo.gated or user in (repo.members | {repo.id.split("/")[0]}):
            return None
        text = f"Access to model {repo.id} is restricted."
        return problem(403 if user else 401, text, "GatedRepo")


def reply_json(value: Any, status: int = 200, **headers: str) -> Reply:
    head = {name.replace("_", "-"): text for name, text in headers.items()}
    return Reply(status, {"Content-Type": "application/json", **head}, json.dumps(value).encode())


def problem(status: int, text: str, code: str | None = None) -> Reply:
    reply = reply_json({"error": text}, status)
    reply.headers["X-Error-Message"] = text
    if code:
        reply.headers["X-Error-Code"] = code
    return reply


@route("GET", r"/api/whoami-v2")
def _whoami(hub: Hub, request: Request, _: re.Match[str]) -> Reply:
    user = hub.user(request)
    if user is None:
        return problem(401, "Invalid credentials in Authorization header")
    role = hub.roles.get(user, {"role": "write"})
    access = {"accessToken": {"displayName": "tests", **role}}
    orgs = [{"type": "org", "name": name, **about} for name, about in hub.orgs.items()]
    return reply_json({"type": "user", "name": user, "fullname": user, "orgs": orgs, "auth": access})


@route("GET", rf"/api/models/{_ID}/tree/(?P<revision>[^/]+)")
def _tree(hub: Hub, request: Request, found: re.Match[str]) -> Reply:
    """All files, as one page."""
    _, commit = _commit_of(hub, request, found)
    if isinstance(commit, Reply):
        return commit
    return reply_json([_file(path, blob) for path, blob in commit.files.items()])


@route("GET", rf"/api/models/{_ID}/revision/(?P<revision>[^/]+)")
@route("GET", rf"/api/models/{_ID}")
def _info(hub: Hub, request: Request, found: re.Match[str]) -> Reply:
    repo, commit = _commit_of(hub, request, found)
    if isinstance(commit, Reply):
        return commit
    blobs = request.query.get("blobs", ["false"])[0].lower() == "true"
    return reply_json(
        {
            "_id": "0" * 24,
            "id": repo.id,
            "modelId": repo.id,
            "author": repo.id.split("/")[0],
            "sha": commit.sha,
            "private": repo.private,
            "gated": repo.gated,
            "disabled": repo.disabled,
            "lastModified": commit.at,
            "createdAt": repo.commits[0].at,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": [_sibling(path, blob, blobs) for path, blob in commit.files.items()],
            "usedStorage": sum(blob.size for blob in commit.files.values()),
        }
    )


@route("GET", rf"/{_ID}/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
def _resolve(hub: Hub, request: Request, found: re.Match[str]) -> Reply:
    """Small files come at once; large ones by a redirect to a signed address of the store beside."""
    repo, commit = _commit_of(hub, request, found)
    if isinstance(commit, Reply):
        return commit
    refused = hub.openable(request, repo)
    if refused:
        return refused
    blob = commit.files.get(unquote(found["path"]))
    if blob is None:
        reply = problem(404, "Entry not found", "EntryNotFound")
        reply.headers["X-Repo-Commit"] = commit.sha
        return reply
    headers = {"X-Repo-Commit": commit.sha, "ETag": f'"{blob.etag}"'}
    if not blob.large:
        return Reply(200, {**headers, "Content-Type": "text/plain"}, blob.content, ranged=True)
    hub.blobs[blob.sha256] = blob
    signed = f"X-Amz-Signature={'5' * 64}&name={quote(found['path'])}"
    headers |= {
        "X-Linked-ETag": f'"{blob.sha256}"',
        "X-Linked-Size": str(blob.size),
        "Location": f"{hub.store_url}/store/{blob.sha256}?{signed}",
    }
    return Reply(302, headers)


@route("GET", r"/store/(?P<sha256>[0-9a-f]{64})")
def _store(hub: Hub, request: Request, found: re.Match[str]) -> Reply:
    blob = hub.blobs.get(found["sha256"])
    if blob is None or not request.query.get("X-Amz-Signature") or "authorization" in request.headers:
        return Reply(403, body=b"<Error><Code>AccessDenied</Code></Error>")
    return Reply(200, {"ETag": f'"{blob.sha256}"'}, blob.content, ranged=True)


def _commit_of(hub: Hub, request: Request, found: re.Match[str]) -> tuple[Repo, Commit | Reply]:
    parts = found.groupdict()
    repo = hub.readable(request, found["id"])
    if isinstance(repo, Reply):
        return Repo(""), repo
    revision = unquote(parts.get("revision") or "main")
    commit = repo.at(revision) if repo.commits else None
    return repo, commit or problem(404, f"Invalid rev id: {revision}", "RevisionNotFound")


def _file(path: str, blob: Blob) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "oid": blob.oid, "size": blob.size, "path": path}
    if blob.large:
        entry["lfs"] = {"oid": blob.sha256, "size": blob.size, "pointerSize": len(blob.pointer())}
    return entry


def _sibling(path: str, blob: Blob, blobs: bool) -> dict[str, Any]:
    if not blobs:
        return {"rfilename": path}
    entry = _file(path, blob)
    sibling = {"rfilename": path, "blobId": entry["oid"], "size": entry["size"]}
    if blob.large:
        sibling["lfs"] = {"sha256": blob.sha256, "size": blob.size, "pointerSize": len(blob.pointer())}
    return sibling
