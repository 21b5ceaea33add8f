"""Check a run's specification, and prepare its files, before a backend starts it.

A bad specification is rejected with everything that is wrong with it. When the daemon runs as root, the
run directory is given to the user that training runs as.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from core.domain.keys import CPU_ID
from miner.backends.base import AttemptSpec, BackendRejected, Mount

_KEY = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9-]{0,99}")
_LABEL = re.compile(r"[a-z][a-z0-9-]{0,39}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: An index, a UUID, or a MIG slice, and of a cluster's GPU its node. Never `all`, and never several in one.
_GPU = re.compile(r"(?:\d{1,3}|(?:GPU|MIG)-[A-Za-z0-9/-]{4,80})(?:@[A-Za-z0-9_.-]{1,100})?")
_NODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_CPUS = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")


def check_spec(spec: AttemptSpec, redact: Callable[[str], str], trusted: Iterable[Path]) -> None:
    """`BackendRejected` with everything that is wrong. `trusted` are our own directories, in which no link
    may lead elsewhere; everything else that is mounted was named by the operator."""
    wrong = [*_bad_values(spec), *_secrets(spec, redact), *_paths(spec, tuple(trusted))]
    if wrong:
        raise BackendRejected(f"{spec.key[:100]!r} cannot be started: {'; '.join(wrong)}")


def gpus_of(spec: AttemptSpec) -> tuple[str, ...]:
    """The real GPUs, without the pretended ones of a CPU run."""
    return tuple(gpu for gpu in spec.gpus if re.split("[:@]", gpu)[0] != CPU_ID)


def mounts_of(spec: AttemptSpec) -> tuple[Mount, ...]:
    """The run directory and the others, outer before inner, each once. One below another of the same kind is
    left out: with a mount of its own, renaming into and out of it would fail."""
    wanted: dict[Path, bool] = {spec.run_dir: False}
    for mount in spec.mounts:
        wanted[mount.path] = wanted.get(mount.path, True) and mount.read_only
    mounts: list[Mount] = []
    for path in sorted(wanted, key=lambda path: path.parts):
        around = [mount for mount in mounts if path.is_relative_to(mount.path)]
        if not around or around[-1].read_only != wanted[path]:
            mounts.append(Mount(path, wanted[path]))
    return tuple(mounts)


def _bad_values(spec: AttemptSpec) -> Iterator[str]:
    if not _KEY.fullmatch(spec.key):
        yield "its key must be 1 to 100 letters, digits and dashes"
    if not spec.argv or not all(spec.argv[:1]):
        yield "there is no command"
    if any("\0" in word for word in (*spec.argv, *spec.env.values())):
        yield "a zero byte is in its command or environment"
    yield from (
        f"GPU {gpu!r} is neither an index nor a UUID" for gpu in gpus_of(spec) if not _GPU.fullmatch(gpu)
    )
    if len(set(spec.gpus)) != len(spec.gpus):
        yield f"a GPU is named twice: {', '.join(spec.gpus)}"
    yield from (f"{node!r} is not a node's name" for node in spec.nodes if not _NODE.fullmatch(node))
    yield from (f"{name!r} is not a variable name" for name in spec.env if not _VARIABLE.fullmatch(name))
    yield from (f"{name!r} is not a label name" for name in spec.labels if not _LABEL.fullmatch(name))
    if spec.cpus is not None and not _CPUS.fullmatch(spec.cpus):
        yield f"cpus {spec.cpus!r} is not written like 0-31,64"
    for name, value in (("memory", spec.memory_bytes), ("shm", spec.shm_bytes), ("limit", spec.timeout_s)):
        if value is not None and value <= 0:
            yield f"{name} must be above 0, not {value}"


def _secrets(spec: AttemptSpec, redact: Callable[[str], str]) -> Iterator[str]:
    """Refuse a secret in a command, a variable or a label: anyone who may ask a backend can read them."""
    shown = {
        "its command": "\n".join(spec.argv),
        **{f"the variable {name}": value for name, value in spec.env.items()},
        **{f"the label {name}": value for name, value in spec.labels.items()},
    }
    yield from (f"{where} holds a secret" for where, text in shown.items() if redact(text) != text)


def _paths(spec: AttemptSpec, trusted: tuple[Path, ...]) -> Iterator[str]:
    if not spec.run_dir.is_dir():
        yield f"the run directory {spec.run_dir} does not exist"
    for mount in (Mount(spec.run_dir, False), *spec.mounts):
        path = mount.path
        if not path.is_absolute() or ".." in path.parts or path == Path("/"):
            yield f"{path} cannot be mounted: it must be an absolute path, and not the root"
        elif not path.exists():
            yield f"{path} cannot be mounted: it does not exist"
        else:
            yield from (
                f"{path} cannot be mounted: {link} is a link" for link in _links_on_the_way(path, trusted)
            )


def _links_on_the_way(path: Path, trusted: tuple[Path, ...]) -> Iterator[Path]:
    """Links on the path within our own directories: an earlier attempt may have left one that leads out of
    them, and the backend would follow it with its own rights."""
    for root in trusted:
        if path.is_relative_to(root):
            way = [
                root.joinpath(*path.relative_to(root).parts[: count + 1])
                for count in range(len(path.parts) - len(root.parts))
            ]
            yield from (step for step in way if stat.S_ISLNK(os.lstat(step).st_mode))
            return


def hand_over_files(
    spec: AttemptSpec, mounts: Iterable[Mount], uid: int, trusted: Iterable[Path] = ()
) -> None:
    """Give away the run directory with all it holds, and other writable directories without what they hold.

    That is the training's own, from earlier attempts. Links are given away, never what they lead to.

    Inputs must be readable. Below `trusted`, our own directories, they are made so; otherwise
    `BackendRejected`.
    """
    chown_tree(spec.run_dir, uid)
    for mount in mounts:
        if not mount.read_only:
            os.chown(mount.path, uid, uid, follow_symlinks=False)
            continue
        for path in _unreadable(mount.path, uid):
            is_ours = any(mount.path.is_relative_to(place) for place in trusted)
            if not (is_ours and _make_readable(path, mount.path)):
                raise BackendRejected(
                    f"{path} is not readable for user {uid}, which training runs as: "
                    f"chmod -R a+rX {mount.path}"
                )


def chown_tree(folder: Path, uid: int) -> None:
    for _, folders, files, here in os.fwalk(folder, follow_symlinks=False):
        os.fchown(here, uid, uid)
        for name in (*folders, *files):
            os.chown(name, uid, uid, dir_fd=here, follow_symlinks=False)


def _unreadable(top: Path, uid: int) -> Iterator[Path]:
    """Yield what this user may not read below `top`, directories first. Dead links are skipped."""
    if not _readable(top, uid):
        yield top
    for folder, folders, files in os.walk(top):
        for name in (*folders, *files):
            path = Path(folder, name)
            if path.exists() and not _readable(path, uid):
                yield path


def _readable(path: Path, uid: int) -> bool:
    status = path.stat()
    shift = 6 if status.st_uid == uid else 3 if status.st_gid == uid else 0
    wanted = 0o5 if stat.S_ISDIR(status.st_mode) else 0o4
    return (status.st_mode >> shift) & wanted == wanted


def _make_readable(path: Path, top: Path) -> bool:
    """Let everybody read a file or directory below `top`; False where a link leads out of it."""
    real = path.resolve()
    if not real.is_relative_to(top.resolve()):
        return False
    descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        mode = os.fstat(descriptor).st_mode
        os.fchmod(descriptor, stat.S_IMODE(mode) | (0o555 if stat.S_ISDIR(mode) else 0o444))
    finally:
        os.close(descriptor)
    return True
