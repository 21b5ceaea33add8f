"""Write the constraint files, or check that they can be installed: python scripts/lock.py write|check

`write` resolves both files again: `constraints.txt` for the daemon and its tools, `constraints-training.txt`
for the training environment. `check` resolves what the Makefile and the Dockerfiles install against the
current files. Both use plain PyPI for Linux on x86-64, install nothing, and ignore pip's and uv's settings.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:
    raise SystemExit(
        f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: set PYTHON="
    ) from None

ROOT = Path(__file__).resolve().parents[1]
DAEMON, TRAINING = "constraints.txt", "constraints-training.txt"
PYTHONS = ("3.11", "3.12", "3.13")
#: The platform to resolve for. uv repeats it after every line; the files leave it out.
PLATFORM = ("implementation_name == 'cpython'", "platform_machine == 'x86_64'", "sys_platform == 'linux'")
IMPLIED = {*PLATFORM, "platform_python_implementation != 'PyPy'"}
HEADER = "# Exact versions for reproducible installs (pip install -c {name}). Rewritten by: make lock\n"
UNREACHABLE = re.compile(r"Failed to fetch|Request failed after|error sending request|Could not connect")


@dataclass(frozen=True)
class Install:
    """One install command: its requirements and its constraint file."""

    name: str
    requirements: tuple[str, ...]
    constraints: str | None
    #: Whether the build goes on if it fails.
    optional: bool = False


@dataclass(frozen=True)
class Outcome:
    install: Install
    python: str
    #: Why it cannot be installed, None if it can.
    error: str | None = None
    unreachable: bool = False


def project() -> tuple[list[str], dict[str, list[str]]]:
    """The daemon's requirements, and the extras."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return table["dependencies"], table["optional-dependencies"]


def installs() -> list[Install]:
    """Everything that the Makefile and the Dockerfiles install."""
    daemon, extras = project()
    dockerfiles = sorted((ROOT / "dockerfiles").glob("*.dockerfile"))
    return [
        Install("the daemon", tuple(daemon), DAEMON),
        Install("dev", (*daemon, *extras["dev"]), DAEMON),
        Install("bench", (*daemon, *extras["dev"], *extras["bench"]), DAEMON),
        Install("demo", tuple(extras["demo"]), TRAINING),
        Install("training", tuple(extras["training"]), TRAINING),
        *(install for path in dockerfiles for install in of_dockerfile(path)),
    ]


def of_dockerfile(path: Path) -> Iterator[Install]:
    """The packages of its `pip install` commands, read from its text."""
    text = re.sub(r"\\\n(\s*#[^\n]*\n)*", " ", path.read_text("utf-8"))
    values = {name: value.strip('"') for name, value in re.findall(r"^ARG (\w+)=(.*)$", text, re.MULTILINE)}
    for line in re.findall(r"^RUN (.*)$", text, re.MULTILINE):
        loops = {name: values[items] for name, items in re.findall(r"for (\w+) in \$\{(\w+)\}", line)}
        for command in re.findall(r"\bpip install\s+([^&|;]*)", line):
            requirements, constraints = _arguments(shlex.split(command))
            if not requirements:  # our own code, without its dependencies
                continue
            variable = next((f"${name}" for name in loops if f"${name}" in requirements), "")
            for value in loops[variable[1:]].split() if variable else [""]:
                replaced = tuple(value if word == variable else word for word in requirements)
                yield Install(path.name, replaced, constraints, optional=bool(variable))


#: Options of pip and uv that are followed by a value.
_VALUED = {"-c", "-r", "--constraint", "--requirement", "--python", "--retries", "--target", "--index-url"}


def _arguments(words: list[str]) -> tuple[list[str], str | None]:
    """The requirements of a `pip install`, and which of our constraint files it names."""
    requirements, constraints, rest = [], None, iter(words)
    for word in rest:
        value = next(rest) if word in _VALUED else ""
        if word in ("-c", "--constraint"):
            constraints = Path(value).name if (ROOT / Path(value).name).exists() else None
        elif word in ("-r", "--requirement"):  # written by the build, from pyproject.toml
            requirements += project()[0]
        elif not word.startswith("-") and word != ".":
            requirements.append(word)
    return requirements, constraints


def uv() -> str:
    """The path of a working uv, installed in .cache if there is none."""
    installed = ROOT / ".cache" / "uv"
    for name in ("uv", str(installed / "bin" / "uv")):
        path = shutil.which(name)
        if path and subprocess.run([path, "--version"], capture_output=True, check=False).returncode == 0:
            return path
    pip = [installed / "bin" / "pip", "--disable-pip-version-check", "install", "-q", "uv"]
    for command in ([sys.executable, "-m", "venv", installed], pip):
        if subprocess.run(command, check=False).returncode:
            print("uv is not here and cannot be installed, nothing was checked: see above", file=sys.stderr)
            raise SystemExit(2)
    return str(installed / "bin" / "uv")


def resolve(program: str, requirements: tuple[str, ...], *options: str) -> subprocess.CompletedProcess[str]:
    """Run `uv pip compile` on a project of its own, without anybody's settings."""
    needed = ", ".join(f"'''{requirement}'''" for requirement in requirements)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pyproject.toml").write_text(
            f'[project]\nname = "god-miner-lock"\nversion = "0"\nrequires-python = ">={PYTHONS[0]}"\n'
            f'dependencies = [{needed}]\n[tool.uv]\nenvironments = ["{" and ".join(PLATFORM)}"]\n'
        )
        return subprocess.run(
            [program, "pip", "compile", "-q", "--no-annotate", "--no-header", "pyproject.toml", *options],
            cwd=folder,
            env=_environment(folder),
            capture_output=True,
            text=True,
            check=False,
        )


def _environment(home: str) -> dict[str, str]:
    """Our PATH, proxies and certificates; no index and no configuration file."""
    kept = re.compile(r"PATH|SSL_CERT_FILE|SSL_CERT_DIR|TMPDIR|\w+_proxy", re.IGNORECASE)
    cache = os.environ.get("UV_CACHE_DIR") or str(Path.home() / ".cache" / "uv")
    return {
        **{name: value for name, value in os.environ.items() if kept.fullmatch(name)},
        "HOME": home,
        "UV_CACHE_DIR": cache,
        "UV_NO_SYSTEM_CONFIG": "1",
        # The certificates that the system trusts: its name in this uv, and in older ones.
        "UV_SYSTEM_CERTS": "1",
        "UV_NATIVE_TLS": "1",
    }


def write(program: str) -> int:
    daemon, extras = project()
    for name, requirements in (
        (DAEMON, (*daemon, *extras["dev"], *extras["bench"])),
        (TRAINING, (*extras["demo"], *extras["training"])),
    ):
        done = resolve(program, requirements, "--universal", "--python-version", PYTHONS[0])
        if done.returncode:
            print(f"{name} is left as it is:\n{done.stderr.strip()}", file=sys.stderr)
            return 2 if UNREACHABLE.search(done.stderr) else 1
        lines = [_short(line) for line in done.stdout.splitlines()]
        (ROOT / name).write_text(HEADER.format(name=name) + "\n".join(lines) + "\n")
        print(f"{name}: {len(lines)} packages")
    return 0


def _short(line: str) -> str:
    name, _, marker = line.partition(" ; ")
    kept = [part for part in marker.split(" and ") if part and part not in IMPLIED]
    return f"{name} ; {' and '.join(kept)}" if kept else name


def check(program: str) -> int:
    """0 when all can be installed, 1 on a conflict, 2 when the index cannot be reached."""
    by_file: dict[tuple[str | None, bool], list[Install]] = {}
    for install in installs():
        by_file.setdefault((install.constraints, install.optional), []).append(install)
    groups = [(together, python) for together in by_file.values() for python in PYTHONS]
    with ThreadPoolExecutor(9) as pool:
        results = pool.map(lambda group: _group(program, *group), groups)
        outcomes = [outcome for group in results for outcome in group]
    unreachable = [outcome for outcome in outcomes if outcome.unreachable]
    if unreachable:
        print(f"PyPI cannot be reached, nothing was checked:\n{unreachable[0].error}", file=sys.stderr)
        return 2
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    for outcome in failed:
        install = outcome.install
        kind = "note, its build goes on without it" if install.optional else "CONFLICT"
        where = f"{install.name} on Python {outcome.python}"
        command = f"pip install {' '.join(install.requirements)}"
        print(f"{kind}: {where}: {command}\n{outcome.error}", file=sys.stderr)
    resolved = len(outcomes) - len(failed)
    print(f"{resolved} of {len(outcomes)} installs resolve on plain PyPI (Python {', '.join(PYTHONS)})")
    return int(any(not outcome.install.optional for outcome in failed))


def _group(program: str, installs: list[Install], python: str) -> list[Outcome]:
    """Resolve all together first: with every version pinned by one file, what can be installed together can
    be installed alone. Only if that fails is each resolved alone."""
    requirements = tuple(dict.fromkeys(name for install in installs for name in install.requirements))
    first = installs[0]
    together = _checked(program, Install(first.name, requirements, first.constraints, first.optional), python)
    if together.error is None or together.unreachable or len(installs) == 1:
        return [Outcome(install, python, together.error, together.unreachable) for install in installs]
    return [_checked(program, install, python) for install in installs]


def _checked(program: str, install: Install, python: str) -> Outcome:
    options = ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
    if install.constraints:
        options += ["-c", str(ROOT / install.constraints)]
    done = resolve(program, install.requirements, *options)
    if done.returncode:
        return Outcome(install, python, done.stderr.strip(), bool(UNREACHABLE.search(done.stderr)))
    return Outcome(install, python, _unpinned(done.stdout, install.constraints))


def _unpinned(resolved: str, constraints: str | None) -> str | None:
    if constraints is None:
        return None
    pinned = _names((ROOT / constraints).read_text("utf-8"))
    missing = sorted(_names(resolved) - pinned)
    return f"not in {constraints}, run make lock: {', '.join(missing)}" if missing else None


def _names(text: str) -> set[str]:
    return {re.sub(r"[-_.]+", "-", name).lower() for name in re.findall(r"^([\w.-]+)==", text, re.MULTILINE)}


if __name__ == "__main__":
    if sys.argv[1:] not in (["write"], ["check"]):
        raise SystemExit(__doc__)
    raise SystemExit((write if sys.argv[1] == "write" else check)(uv()))
