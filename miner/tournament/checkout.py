"""A fresh full clone, as validators make one: every branch with its history, none of the operator's settings.

Git runs in a process of its own with a time limit. A private token is handed over in the environment, and
only to the host of the repository: it is in no argument list, no file and no message.

Git runs programs that a repository's configuration names: filters, hooks, a file monitor. A directory may
come from a stranger's archive, so git never works in it, but in a repository of ours with the same objects
and copies of its branches and tags (`_without_configuration`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from core.domain.errors import GodMinerError
from core.domain.tournament_rules import CLONE_LIMIT_S
from core.system.files import temporary_tree
from miner.support.subprocess import PASSED_VARIABLES
from miner.support.untrusted_files import read_untrusted

#: Checking out a commit of a clone: local work, however slow the disk.
LOCAL_LIMIT_S = 120.0
#: Protocols that git may use; `ext::` would run a command of the address's choice.
PROTOCOLS = "file:git:http:https:ssh"
#: No file that is worth reading is larger.
MOST_READ_BYTES = 64 * 1024**2
_TOKEN_VARIABLE = "GOD_MINER_GIT_TOKEN"  # noqa: S105 - its name
#: A shell function that git calls for the repository's host alone; echo is a part of the shell, no process.
_HELPER = f'!f() {{ echo username=x-access-token; echo "password=${_TOKEN_VARIABLE}"; }}; f'
#: Git works only in repositories of ours, whichever user owns them.
_OUR_SETTINGS = (("core.fsmonitor", "false"), ("core.hooksPath", os.devnull), ("safe.directory", "*"))
_END_S = 5.0
#: Most bytes of a branch's file, and of larger files of a repository.
_MOST_REF_BYTES, _MOST_REFS_BYTES = 1024, 64 * 1024**2
_REF = re.compile(rb"(?:ref: refs/\S+|[0-9a-f]{40})\s*")


class CloneFailed(GodMinerError):
    """A repository that cannot be cloned, or does not hold the commit."""

    code = "clone_failed"


class CloneTooSlow(CloneFailed):
    """A clone that is not done within its limit."""

    code = "clone_too_slow"


@dataclass(frozen=True)
class Clone:
    directory: Path
    #: What is checked out, 40 hexadecimal digits.
    commit: str
    #: The head of the default branch; of a local checkout: its HEAD.
    default_head: str
    #: How long `git clone` took.
    seconds: float
    #: What the whole history takes on disk.
    size_bytes: int


def clone_repository(
    source: str,
    commit: str | None,
    directory: Path,
    *,
    limit_s: float = CLONE_LIMIT_S,
    token: str | None = None,
) -> Clone:
    """Clone a URL or a local path into a new or empty directory and check out a commit (default: HEAD)."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CloneFailed(f"{directory} is not an empty directory: name one that is not there yet")
    if _has_credentials(source):
        raise CloneFailed(
            "the address holds a user name or a password, which every list of processes would show: "
            "leave it out and set TRAINING_REPO_*_TOKEN"
        )
    began = time.monotonic()
    try:
        _clone(source, directory, limit_s, token)
    except CloneTooSlow:
        raise
    except CloneFailed as error:
        raise CloneFailed(f"{error}\n→ {_way_to_clone(source, str(error))}") from None
    seconds = time.monotonic() - began
    try:
        head = git_output(directory, "rev-parse", "--verify", "HEAD^{commit}")
    except CloneFailed:
        raise CloneFailed(
            f"{source} has no commit on its default branch\n→ commit something first, and push it"
        ) from None
    if commit is not None and commit != head:
        _check_out(directory, commit, source)
    chosen = git_output(directory, "rev-parse", "--verify", "HEAD^{commit}")
    return Clone(directory, chosen, head, seconds, sum(_sizes(directory / ".git")))


def is_local(source: str) -> bool:
    """Return True for a path; `host:path` without a slash before the colon is an address."""
    return "://" not in source and (Path(source).is_dir() or not re.match(r"[^/]+:", source))


def git_output(directory: Path, *arguments: str, operators: bool = False) -> str:
    """Return git's output about a repository of ours, without the last line's end; `operators`: with the
    operator's git settings."""
    environment = _passed_environment() if operators else _environment()
    return _git(["-C", str(directory), *arguments], environment, LOCAL_LIMIT_S).rstrip("\n")


def tracked_files(directory: Path) -> list[str]:
    return [name for name in git_output(directory, "ls-files", "-z").split("\0") if name]


def uncommitted_files(directory: Path) -> list[str]:
    """Return the uncommitted files of a checkout, changed or new; none for a bare repository."""
    if not (directory / ".git").exists():
        return []
    with temporary_tree("god-miner-git-") as folder:
        try:
            repository = _without_configuration(directory, folder)
            environment = _environment() | {"GIT_DIR": str(repository), "GIT_WORK_TREE": str(directory)}
            if "HOME" in os.environ:
                environment["HOME"] = os.environ["HOME"]  # the operator's own ignored files
            _git(["read-tree", "HEAD"], environment, LOCAL_LIMIT_S)
            # Git would enter submodules, which have a configuration too.
            status = ["status", "--porcelain", "-z", "--no-renames", "--ignore-submodules=all"]
            lines = _git(status, environment, LOCAL_LIMIT_S).split("\0")
        except CloneFailed:
            return []
    return [line[3:] for line in lines if line]


def remote_url(directory: Path) -> str | None:
    """The address of a checkout's own remote, `origin` before others."""
    try:
        found = _git_directories(directory)
    except (OSError, ValueError):
        return None
    content = read_untrusted(found[1] / "config", 1 << 20) if found else None
    if content is None:
        return None
    with temporary_tree("god-miner-git-") as folder:
        (folder / "config").write_bytes(content)
        # With --file, git does not follow the file's includes.
        asked = ["config", "--file", str(folder / "config"), "--null", "--get-regexp", r"^remote\..*\.url$"]
        try:
            lines = _git(asked, _environment(), LOCAL_LIMIT_S).split("\0")
        except CloneFailed:
            return None
    urls = dict(line.split("\n", 1) for line in reversed(lines) if "\n" in line)
    return urls.get("remote.origin.url", next(reversed(urls.values()), None))


def few(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def read_inside(tree: Path, path: Path, most: int = MOST_READ_BYTES) -> bytes:
    """The beginning of a file of a checked tree; `OSError` if a link leads out of it, or to no file.

    A link to a device has no end, and a link to the operator's own files is no part of an entry."""
    found = os.path.realpath(path)
    if not Path(found).is_relative_to(os.path.realpath(tree)) or not os.path.isfile(found):
        raise OSError(errno.ENOENT, "not a file of the repository")
    with open(found, "rb") as file:
        return file.read(most)


def _way_to_clone(source: str, complaint: str) -> str:
    if is_local(source):
        return f"{source} must be a git repository: git init, git add, git commit; or name another"
    if re.search(r"Authentication failed|could not read Username|error: 40[134]", complaint):
        return (
            "it is private or not there: make it public, or set TRAINING_REPO_*_URL to this address and "
            "TRAINING_REPO_*_TOKEN to a token that may read it"
        )
    return "look at the address and at the connection; validators must reach it too"


def _check_out(directory: Path, commit: str, source: str) -> None:
    try:
        # A name as git has it: a branch of the origin is none of the clone's own yet.
        found = git_output(directory, "rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}")
    except CloneFailed:
        raise CloneFailed(
            f"{commit} is not in a clone of {source}: no branch or tag there reaches a commit of this name\n"
            "→ push a branch that does: validators clone, and then check the commit out"
        ) from None
    git_output(directory, "checkout", "--quiet", "--detach", found)


def _clone(source: str, directory: Path, limit_s: float, token: str | None) -> None:
    path = _path_of(source)
    # --no-local: objects travel as they do over a network, only those that a branch or a tag reaches.
    clone = ["clone", "--quiet", "--no-local", "--"]
    if path is None:
        _git([*clone, source, str(directory)], _environment(source, token), limit_s, secret=token)
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with temporary_tree("god-miner-git-") as folder:
        repository = _without_configuration(path, folder)
        _git([*clone, str(repository), str(directory)], _environment(), limit_s)


def _path_of(source: str) -> Path | None:
    """Return the path of a repository on this machine; None for an address elsewhere."""
    if source.startswith("file://"):
        return Path(unquote(urlsplit(source).path))
    return Path(source).resolve() if is_local(source) else None


def _git_directories(directory: Path) -> tuple[Path, Path] | None:
    """Return the directories of a repository's HEAD and of the rest, which differ only for a worktree. Raise
    `ValueError` for a path that is not a repository."""
    place = directory / ".git"
    if pointer := read_untrusted(place, _MOST_REF_BYTES):
        place = directory / os.fsdecode(pointer.removeprefix(b"gitdir:").strip())
    elif not place.is_dir():
        place = directory
    own = Path(os.path.realpath(place))
    rest = read_untrusted(own / "commondir", _MOST_REF_BYTES)
    shared = Path(os.path.realpath(own / os.fsdecode(rest.strip()))) if rest else own
    return (own, shared) if (shared / "objects").is_dir() else None


def _without_configuration(directory: Path, folder: Path) -> Path:
    """A repository in `folder` with the objects, branches and tags of another and nothing else of it."""
    try:
        return _copied(directory, folder)
    except (OSError, ValueError, RecursionError) as error:  # symlink loops, or names with zero bytes
        raise CloneFailed(f"git clone: {directory} cannot be read: {error}") from None


def _copied(directory: Path, folder: Path) -> Path:
    found = _git_directories(directory)
    head = read_untrusted(found[0] / "HEAD", _MOST_REF_BYTES) if found else None
    if found is None or head is None or not _REF.fullmatch(head):
        raise CloneFailed(f"git clone: {directory} is not a git repository that can be read")
    _, shared = found
    ours = folder / "repository.git"
    (ours / "refs").mkdir(parents=True)
    (ours / "info").mkdir()
    (ours / "HEAD").write_bytes(head)
    (ours / "config").write_text("[core]\n\trepositoryformatversion = 0\n")
    (ours / "objects").symlink_to(shared / "objects")
    for name in ("packed-refs", "shallow", "info/exclude"):
        content = read_untrusted(shared / name, _MOST_REFS_BYTES)
        if content is not None:
            (ours / name).write_bytes(content)
    for kind in ("refs/heads", "refs/tags"):
        for place, _, names in os.walk(shared / kind):
            target = ours / os.path.relpath(place, shared)
            target.mkdir(parents=True, exist_ok=True)
            for name in names:
                content = read_untrusted(Path(place, name), _MOST_REF_BYTES)
                if content is not None and _REF.fullmatch(content):
                    (target / name).write_bytes(content)
    return ours


def _environment(source: str = "", token: str | None = None) -> dict[str, str]:
    """Return an environment without the operator's settings and credentials, which validators lack."""
    settings = list(_OUR_SETTINGS)
    # No .netrc either: with its password a private repository would be cloned here, but not by validators.
    found = {
        "HOME": os.devnull,
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_NO_LAZY_FETCH": "1",
    }
    if token:
        parts = urlsplit(source)
        settings.append((f"credential.{parts.scheme}://{parts.netloc}.helper", _HELPER))
        found[_TOKEN_VARIABLE] = token
    return _passed_environment(settings) | found


def _passed_environment(settings: Sequence[tuple[str, str]] = _OUR_SETTINGS) -> dict[str, str]:
    """Return an environment with the operator's settings, and these before them."""
    found = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ} | {
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "true",
        "SSH_ASKPASS": "true",
        "GIT_SSH_COMMAND": "ssh -oBatchMode=yes",
        "GIT_ALLOW_PROTOCOL": PROTOCOLS,
        "GIT_LFS_SKIP_SMUDGE": "1",
        "LC_ALL": "C.UTF-8",
        "GIT_CONFIG_COUNT": str(len(settings)),
    }
    for number, (key, value) in enumerate(settings):
        found |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return found


def _has_credentials(source: str) -> bool:
    if not source.startswith(("http://", "https://")):
        return False
    return "@" in urlsplit(source).netloc


def _git(
    arguments: Sequence[str], environment: Mapping[str, str], limit_s: float, *, secret: str | None = None
) -> str:
    try:
        process = subprocess.Popen(
            ["git", *arguments],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="surrogateescape",  # names of files are bytes
            start_new_session=True,
            umask=0o022,  # other users read it: that of a sandbox, and of a container
        )
    except FileNotFoundError:
        raise CloneFailed("git is not installed: install it, for example by `apt-get install git`") from None
    try:
        said, complaint = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise CloneTooSlow(
            f"git {_verb(arguments)} is not done after {limit_s:g} s (validators wait {CLONE_LIMIT_S:g} s): "
            "make the repository smaller, or look at the connection"
        ) from None
    finally:
        _end(process)
    if process.returncode != 0:
        text = (complaint.strip() or f"exit code {process.returncode}")[-1000:]
        raise CloneFailed(f"git {_verb(arguments)}: {text.replace(secret, '***') if secret else text}")
    return said


def _verb(arguments: Sequence[str]) -> str:
    return arguments[2] if arguments[0] == "-C" else arguments[0]


def _end(process: subprocess.Popen[str]) -> None:
    """End git and the helpers that it started; asked first, it removes what it has written."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_END_S)


def _sizes(directory: Path) -> Iterator[int]:
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            yield path.stat().st_size
