"""What writes to the hub stand-in: repositories, uploads plain and in parts, commits, renaming.

Importing this adds the routes. Faults are ordered as for reading: `hub.fail("PUT /upload", …)`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import yaml

from tests.doubles.flaky import Reply, Request
from tests.doubles.hub import Hub, problem, reply_json, route
from tests.doubles.hub_repos import LARGE, Blob, Repo

_ID = r"(?P<id>[^/]+/[^/]+)"
_REGULAR_LIMIT = 10_000_000
LICENCES = ("apache-2.0", "mit", "llama3.1", "other")


@dataclass(frozen=True)
class Unseen(Blob):
    """A large file that lies with the deduplicating store: only its name and size are known here."""

    told_sha256: str = ""
    told_size: int = 0

    @property
    def size(self) -> int:
        return self.told_size

    @property
    def sha256(self) -> str:
        return self.told_sha256


def writable(hub: Hub, request: Request, repo_id: str) -> Repo | Reply:
    user = hub.user(request)
    if user is None:
        return problem(401, "Invalid username or password.")
    if not may_write(hub, user, repo_id.split("/")[0]):
        return problem(403, f"You don't have the rights to write to {repo_id}")
    repo = hub.repos.get(repo_id)
    return repo or problem(404, "Repository not found", "RepoNotFound")


def may_write(hub: Hub, user: str, owner: str) -> bool:
    role = hub.roles.get(user, {}).get("role", "write")
    return role == "write" and (owner == user or owner in hub.orgs)


@route("POST", r"/api/repos/create")
def _create(hub: Hub, request: Request, _: re.Match[str]) -> Reply:
    asked = json.loads(request.body)
    user = hub.user(request)
    if user is None:
        return problem(401, "Invalid username or password.")
    repo_id = f"{asked.get('organization') or user}/{asked['name']}"
    if not may_write(hub, user, repo_id.split("/")[0]):
        return problem(403, "You don't have the rights to create a model under this namespace")
    if repo_id in hub.repos:
        return reply_json(
            {"error": "You already created this model repo", "url": f"{hub.url}/{repo_id}"}, 409
        )
    private = asked.get("visibility") == "private"
    hub.add(repo_id, {".gitattributes": b"*.safetensors filter=lfs\n"}, private=private)
    return reply_json({"url": f"{hub.url}/{repo_id}", "name": repo_id})


@route("PUT", rf"/api/models/{_ID}/settings")
def _settings(hub: Hub, request: Request, found: re.Match[str]) -> Reply:
    repo = writable(hub, request, found["id"])
    if isinstance(repo, Reply):
        return repo
    asked = json.loads(request.body)
    if "visibility" in asked:
        repo.private = asked["visibility"] == "private"
    return reply_json({})


@route("POST", r"/api/repos/move")
def _move(hub: Hub, request: Request, _: re.Match[str]) -> Reply:
    asked = json.loads(request.body)
    repo = writable(hub, request, asked["fromRepo"])
    if isinstance(repo, Reply):
        return repo
    if asked["toRepo"] in hub.repos:
        return problem(409, f"{asked['toRepo']} exists already")
    del hub.repos[repo.id]
    repo.id = asked["toRepo"]
    hub.repos[repo.id] = repo
    return reply_json({})


@route("POST", r"/api/validate-yaml")
def _validate(hub: Hub, request: Request, _: re.Match[str]) -> Reply:
    content = json.loads(request.body)["content"]
    front = re.match(r"---\n(.*?)\n---", content, re.DOTALL)
    about = yaml.safe_load(front[1]) if front else {}
    errors = []
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(about.get("base_model", "x"))):
        errors.append({"message": f'"base_model" with value "{about["base_model"]}" is not valid.'})
    if about.get("license", LICENCES[0]) not in LICENCES:
        errors.append({"message": '"license" must be one of the list'})
    return reply_json({"errors": errors, "warnings": []}, 400 if errors else 200)


@route("POST", rf"/api/models/{_ID}/preupload/(?P<revision>[^/]+)")
def _preupload(hub: Hub, request: Request, found: re.Match[str]) -> Reply:
    repo = writable(hub, request, found["id"])
    if isinstance(repo, Reply):
        return repo
    files = []
    for file in json.loads(request.body)["files"]:
        large = file["path"].endswith(LARGE) or file["size"] > _REGULAR_LIMIT
        there = repo.head.files.get(file["path"])
        files.append(
            {
                "path": file["path"],
                "uploadMode": "lfs" if large else "regular",
                "shouldIgnore": False,
                "oid": there.etag if there else None,
            }
        )
    return reply_json({"files": files})


@route("POST", rf"/{_ID}\.git/info/lfs/objects/batch")
def _batch(hub: Hub, request: Request, found: re.Match[str]) -> Reply:
    repo = writable(hub, request, found["id"])
    if isinstance(repo, Reply):
        return repo
    objects = []
    for wanted in json.loads(request.body)["objects"]:
        about: dict[str, Any] = {"oid": wanted["oid"], "size": wanted["size"], "authenticated": True}
        if wanted["oid"] not in hub.blobs:
            about["actions"] = {
                "upload": _upload_action(hub, wanted),
                "verify": {"href": f"{hub.url}/verify"},
            }
        objects.append(about)
    return reply_json({"transfer": "multipart", "objects": objects})


def _upload_action(hub: Hub, wanted: dict[str, Any]) -> dict[str, Any]:
    oid, size, signed = wanted["oid"], wanted["size"], f"X-Amz-Signature={'6' * 64}"
    if size <= hub.part_size:
        return {"href": f"{hub.url}/upload/{oid}?{signed}"}
    count = -(-size // hub.part_size)
    parts = {str(n): f"{hub.url}/upload/{oid}/{n}?{signed}" for n in range(1, count + 1)}
    return {"href": f"{hub.url}/complete/{oid}", "header": {"chunk_size": str(hub.part_size), **parts}}


@route("PUT", r"/upload/(?P<oid>[0-9a-f]{64})(?:/(?P<part>\d+))?")
def _put(hub: Hub, request: Request, found: re.Match[str]) -> Reply:
    if not request.query.get("X-Amz-Signature"):
        return Reply(403, body=b"<Error><Code>AccessDenied</Code></Error>")
    if found["part"]:
        hub.parts[found["oid"], int(found["part"])] = request.body
        etag = hashlib.md5(request.body, usedforsecurity=False).hexdigest()
        return Reply(200, {"ETag": f'"{etag}"'})
    return _stored(hub, found["oid"], request.body)


@route("POST", r"/complete/(?P<oid>[0-9a-f]{64})")
def _complete(hub: Hub, request: Request, found: re.Match[str]) -> Reply:
    numbers = [part["partNumber"] for part in json.loads(request.body)["parts"]]
    if any((found["oid"], number) not in hub.parts for number in numbers):
        return problem(400, "a part is missing")
    return _stored(hub, found["oid"], b"".join(hub.parts.pop((found["oid"], number)) for number in numbers))


def _stored(hub: Hub, oid: str, content: bytes) -> Reply:
    if hashlib.sha256(content).hexdigest() != oid:
        return problem(400, "the content does not have the SHA-256 that was announced")
    hub.blobs[oid] = Blob(content, large=True)
    return reply_json({})


@route("POST", r"/verify")
def _verify(hub: Hub, request: Request, _: re.Match[str]) -> Reply:
    asked = json.loads(request.body)
    blob = hub.blobs.get(asked["oid"])
    return reply_json({}) if blob and blob.size == asked["size"] else problem(404, "not there")


@route("GET", rf"/api/models/{_ID}/xet-write-token/(?P<revision>[^/]+)")
def _deduplicating(hub: Hub, request: Request, found: re.Match[str]) -> Reply:
    repo = writable(hub, request, found["id"])
    if isinstance(repo, Reply):
        return repo
    if hub.deduplicated is None:
        return problem(404, "no such route")
    exp = int(time.time()) + 3600
    return reply_json({"accessToken": "x" * 40, "exp": exp, "casUrl": f"local://{hub.deduplicated}"})


@route("POST", rf"/api/models/{_ID}/commit/(?P<revision>[^/]+)")
def _commit(hub: Hub, request: Request, found: re.Match[str]) -> Reply:
    repo = writable(hub, request, found["id"])
    if isinstance(repo, Reply):
        return repo
    files: dict[str, bytes | Path | Blob] = {}
    deleted, header = [], {}
    for line in request.body.splitlines():
        item = json.loads(line)
        key, value = item["key"], item["value"]
        if key == "header":
            header = value
        elif key == "file":
            files[value["path"]] = Blob(base64.b64decode(value["content"]), large=False)
        elif key == "lfsFile":
            blob = _large(hub, value)
            if blob is None:
                return problem(400, f"the content of {value['path']} was not uploaded")
            files[value["path"]] = blob
        elif value["path"] not in repo.head.files:
            return problem(404, f"A file with this name doesn't exist: {value['path']}", "EntryNotFound")
        else:
            deleted.append(value["path"])
    if header.get("parentCommit") not in (None, repo.head.sha):
        return problem(412, "A commit has happened since. Please refresh and try again.")
    made = repo.commit(files, deleted, header.get("summary", ""))
    url = f"{hub.url}/{unquote(repo.id)}/commit/{made.sha}"
    return reply_json({"success": True, "commitOid": made.sha, "commitUrl": url, "hookOutput": ""})


def _large(hub: Hub, value: dict[str, Any]) -> Blob | None:
    known = hub.blobs.get(value["oid"])
    if known is None and hub.deduplicated is not None and _is_deduplicated(hub.deduplicated, value["oid"]):
        return Unseen(b"", True, value["oid"], value["size"])
    return known


def _is_deduplicated(store: Path, sha256: str) -> bool:
    """Whether one of the store's indexes names this file. It keeps hashes as four little-endian words."""
    wanted = bytes.fromhex(sha256)
    turned = b"".join(wanted[at : at + 8][::-1] for at in range(0, 32, 8))
    indexes = [path.read_bytes() for path in store.rglob("*.mdb")]
    return any(wanted in index or turned in index for index in indexes)
