"""What every engine looks at before it starts anything: a bad specification is rejected before it costs."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from miner.engines.base import EngineSpec, Mount, Rejected
from miner.fleet.base import CPU_ID

_KEY = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9-]{0,99}")
_LABEL = re.compile(r"[a-z][a-z0-9-]{0,39}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: An index, a UUID, or a MIG slice. Never `all`, and never several in one.
_GPU = re.compile(r"\d{1,3}|(?:GPU|MIG)-[A-Za-z0-9/-]{4,80}")
_CPUS = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")


def check(spec: EngineSpec, redact: Callable[[str], str], trusted: Iterable[Path]) -> None:
    """`Rejected` with everything that is wrong. `trusted` are our own folders, in which no link may lead
    elsewhere; what else is mounted was named by the operator."""
    wrong = [*_words(spec), *_secrets(spec, redact), *_paths(spec, tuple(trusted))]
    if wrong:
        raise Rejected(f"{spec.key[:100]!r} can not be started: {'; '.join(wrong)}")


def gpus_of(spec: EngineSpec) -> tuple[str, ...]:
    """The cards to ask for: the pretend one is none."""
    return tuple(gpu for gpu in spec.gpus if gpu != CPU_ID)


def mounts_of(spec: EngineSpec) -> tuple[Mount, ...]:
    """The run folder and the others, outer before inner, each once. What lies below another of the same kind
    is left out: a mount of its own would make renaming across its edge impossible."""
    wanted: dict[Path, bool] = {spec.run_dir: False}
    for mount in spec.mounts:
        wanted[mount.path] = wanted.get(mount.path, True) and mount.read_only
    kept: list[Mount] = []
    for path in sorted(wanted, key=lambda path: path.parts):
        around = [mount for mount in kept if path.is_relative_to(mount.path)]
        if not around or around[-1].read_only != wanted[path]:
            kept.append(Mount(path, wanted[path]))
    return tuple(kept)


def _words(spec: EngineSpec) -> Iterator[str]:
    if not _KEY.fullmatch(spec.key):
        yield "its key must be 1 to 100 letters, digits and dashes"
    if not spec.argv or not all(spec.argv[:1]):
        yield "there is no command"
    if any("\0" in word for word in (*spec.argv, *spec.env.values())):
        yield "a zero byte is in its command or environment"
    yield from (f"GPU {gpu!r} is no index or UUID" for gpu in gpus_of(spec) if not _GPU.fullmatch(gpu))
    if len(set(spec.gpus)) != len(spec.gpus):
        yield f"a GPU is named twice: {', '.join(spec.gpus)}"
    yield from (f"{name!r} is no name of a variable" for name in spec.env if not _VARIABLE.fullmatch(name))
    yield from (f"{name!r} is no name of a label" for name in spec.labels if not _LABEL.fullmatch(name))
    if spec.cpus is not None and not _CPUS.fullmatch(spec.cpus):
        yield f"cpus {spec.cpus!r} is not written like 0-31,64"
    for name, value in (("memory", spec.memory_bytes), ("shm", spec.shm_bytes), ("limit", spec.limit_s)):
        if value is not None and value <= 0:
            yield f"{name} must be more than nothing, not {value}"


def _secrets(spec: EngineSpec, redact: Callable[[str], str]) -> Iterator[str]:
    """Engines show commands, variables and labels to whoever asks, so a secret in one is our mistake."""
    shown = {
        "its command": "\n".join(spec.argv),
        **{f"the variable {name}": value for name, value in spec.env.items()},
        **{f"the label {name}": value for name, value in spec.labels.items()},
    }
    yield from (f"{where} holds a secret" for where, text in shown.items() if redact(text) != text)


def _paths(spec: EngineSpec, trusted: tuple[Path, ...]) -> Iterator[str]:
    if not spec.run_dir.is_dir():
        yield f"the run folder {spec.run_dir} is not there"
    for mount in (Mount(spec.run_dir, False), *spec.mounts):
        path = mount.path
        if not path.is_absolute() or ".." in path.parts or path == Path("/"):
            yield f"{path} can not be mounted: it must be a full path, and not the root"
        elif not path.exists():
            yield f"{path} is to be mounted and is not there"
        else:
            yield from (f"{path} can not be mounted: {link} is a link" for link in _links(path, trusted))


def _links(path: Path, trusted: tuple[Path, ...]) -> Iterator[Path]:
    """Links on the way inside our own folders: an earlier attempt may have left one that leads out of them,
    and the engine would follow it with its own rights."""
    for root in trusted:
        if path.is_relative_to(root):
            way = [
                root.joinpath(*path.relative_to(root).parts[: count + 1])
                for count in range(len(path.parts) - len(root.parts))
            ]
            yield from (step for step in way if stat.S_ISLNK(os.lstat(step).st_mode))
            return
