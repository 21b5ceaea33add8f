"""The environment that trains without an image: its Python, our code for it, and what confines it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import core
from core.config.files import config_dir
from core.domain.errors import GodMinerError
from miner.backends import sandbox_init
from miner.backends.registry import BackendContext, NoBackend
from miner.backends.sandbox import Interpreter, Sandbox, detect_sandbox
from miner.settings import SandboxKind, Settings

SOURCE_ROOT = Path(core.__file__).resolve().parents[1]
#: What the images for pictures have beside the trainer, at the paths where it expects it.
TOOLS = {"image": Path("/app/sd-scripts"), "toolkit": Path("/app/ai-toolkit")}

_PATHS_SCRIPT = (
    "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path]))"
)
ANSWER_S = 30.0
#: Always visible, as a whole.
_ALWAYS_VISIBLE = Path("/usr")


class NoTrainingPython(GodMinerError):
    """There is no interpreter to train with."""

    code = "no_training_python"


def examine_interpreter(path: Path) -> Interpreter:
    """Run it once to learn where its parts are, virtual environments and links included."""
    try:
        done = subprocess.run(
            [path, "-c", _PATHS_SCRIPT],
            env={"PATH": "/usr/bin:/bin"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ANSWER_S,
            check=True,
            cwd="/",
        )
        paths = [Path(path) for path in json.loads(done.stdout) if path]
    except (OSError, ValueError, TypeError, subprocess.SubprocessError) as error:
        raise NoTrainingPython(f"TRAINER_PYTHON={path} does not work: {error}") from None
    return Interpreter(path, _outermost([*paths, *_link_targets(path)]))


def _link_targets(path: Path) -> list[Path]:
    """A virtual environment's python is a link, often to another one: each must be there to follow it."""
    targets: list[Path] = []
    while path.is_symlink() and len(targets) < 10:
        path = path.parent / os.readlink(path)
        targets.append(path.parent.parent if path.parent.name == "bin" else path)
    return targets


def _outermost(paths: list[Path]) -> tuple[Path, ...]:
    wanted = {Path(os.path.normpath(path)) for path in paths if path.exists()}
    wanted = {path for path in wanted if not path.is_relative_to(_ALWAYS_VISIBLE) and len(path.parts) > 1}
    return tuple(sorted(path for path in wanted if not any(other in path.parents for other in wanted)))


@dataclass(frozen=True, slots=True)
class TrainingEnvironment:
    """Everything that trains on a machine without an image."""

    interpreter: Interpreter
    #: A directory with our packages.
    code: Path
    sandbox: Sandbox | None = None
    why_no_sandbox: str = ""


def local_environment(settings: Settings, context: BackendContext) -> TrainingEnvironment:
    """The environment of this machine; `NoBackend` if it has none."""
    init = Path(sandbox_init.__file__)
    return _environment(settings, context, code_folder(context.folder), init)


def shared_environment(settings: Settings, context: BackendContext, folder: Path) -> TrainingEnvironment:
    """The environment for other machines, with a copy of our code in `folder`; `NoBackend` if it has none."""
    code = copied_code(folder)
    init = code / Path(sandbox_init.__file__).relative_to(SOURCE_ROOT)
    environment = _environment(settings, context, code, init)
    if environment.sandbox is not None:
        return replace(environment, sandbox=replace(environment.sandbox, elsewhere=True))
    return environment


def _environment(settings: Settings, context: BackendContext, code: Path, init: Path) -> TrainingEnvironment:
    """Add the interpreter, and a sandbox that was tried out on this machine, if one works."""
    interpreter = training_interpreter(settings)
    if settings.trainer_sandbox is SandboxKind.OFF:
        return TrainingEnvironment(interpreter, code, None, "TRAINER_SANDBOX=off")
    visible = (code, *(path.resolve() for path in code.iterdir()), config_dir())
    wanted = Sandbox(
        Path("bwrap"),
        interpreter,
        context.folder / "hosts",
        visible,
        context.training_uid,
        context.processes,
        init=init,
    )
    sandbox = detect_sandbox(wanted)
    if isinstance(sandbox, str):
        return TrainingEnvironment(interpreter, code, None, sandbox)
    return TrainingEnvironment(interpreter, code, sandbox)


def training_python(settings: Settings) -> Path | None:
    """TRAINER_PYTHON, else the Python of the environment of `make training`, if there is one."""
    made = SOURCE_ROOT / ".venv-training" / "bin" / "python"
    return settings.trainer_python or (made if made.exists() else None)


def training_interpreter(settings: Settings) -> Interpreter:
    """The training environment's Python; our own if there is none and we have torch."""
    path = training_python(settings)
    if path is None and importlib.util.find_spec("torch") is not None:
        path = Path(sys.executable)
    if path is None:
        raise NoBackend(
            "local processes need a python with the training stack: "
            "run `make training` (4 GB, 7 GB with CUDA), or set TRAINER_PYTHON"
        )
    try:
        return examine_interpreter(path)
    except NoTrainingPython as error:
        raise NoBackend(str(error)) from None


def copied_code(parent: Path) -> Path:
    """A copy of our packages for other machines, named by its content: what runs there stays the same when
    this installation changes."""
    files = sorted(
        (Path(name) / path.relative_to(root), path)
        for name, root in _copied_parts()
        for path in ([root] if root.is_file() else root.rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    )
    digest = sha256()
    for name, path in files:
        text = path.read_bytes()
        digest.update(f"{name} {len(text)} ".encode() + text)
    folder = parent / f"code-{digest.hexdigest()[:12]}"
    if not folder.exists():
        part = Path(tempfile.mkdtemp(prefix=".code-", dir=parent))
        for name, path in files:
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, part / name)
        for copied in (part, *part.rglob("*")):
            copied.chmod(0o755 if copied.is_dir() else 0o644)
        try:
            part.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(part)
    return folder


def _copied_parts() -> Iterator[tuple[str, Path]]:
    yield from ((name, SOURCE_ROOT / name) for name in ("core", "trainer"))
    yield "configs", config_dir()
    init = Path(sandbox_init.__file__)
    yield str(init.relative_to(SOURCE_ROOT)), init


def code_folder(parent: Path) -> Path:
    """A directory with our packages for the training's interpreter, without the daemon's environment."""
    folder = parent / "code"
    folder.mkdir(exist_ok=True)
    for name in ("core", "trainer"):
        link, target = folder / name, SOURCE_ROOT / name
        if not link.is_symlink() or link.resolve() != target:
            link.unlink(missing_ok=True)
            link.symlink_to(target)
    return folder
