"""Write the files of requirements/, or check them: python scripts/lock.py write|upgrade|check

`write` keeps the versions that still fit and adds what pyproject.toml newly asks for; `upgrade` takes the
newest that are at least seven days old. `check` compares the files with what plain PyPI serves. All resolve
for Linux on x86-64, install nothing, and ignore pip's and uv's settings.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:
    raise SystemExit(
        f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: set PYTHON="
    ) from None

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from anywhere
from scripts import pins
from scripts.install import PYTHONS
from scripts.pins import FOLDER, ROOT, Pin, normalized
from scripts.tools import program

#: The platform to resolve for. uv repeats it after every line; the files leave it out.
PLATFORM = (
    "python_full_version < '3.14'",
    "implementation_name == 'cpython'",
    "platform_python_implementation == 'CPython'",
    "platform_machine == 'x86_64'",
    "sys_platform == 'linux'",
)
UNREACHABLE = re.compile(r"Failed to fetch|Request failed after|error sending request|Could not connect")
UNDATED = re.compile(r"missing an upload date|no upload (?:date|time)", re.IGNORECASE)

#: A release is trusted when it is this old: the attacks of 2026 were found within hours or days.
COOLDOWN = timedelta(days=7)
#: Packages that may be younger, such as security fixes: name -> (uploaded before, reason).
YOUNG: dict[str, tuple[str, str]] = {}
#: Packages without wheels, with the first Python that has none; they are built from a hashed source.
SOURCES = {
    "axolotl-contribs-lgpl": "3.11",
    "axolotl-contribs-mit": "3.11",
    "langdetect": "3.11",
    "rouge-score": "3.11",
    "sqlitedict": "3.11",
    "word2number": "3.11",
    "zstandard": "3.13",
}
#: The evaluator's stack (dockerfiles/standalone-image*): its versions, and what its ComfyUI's own
#: requirements ask for, less the browser's files; in a Python of its own.
PICTURES = (
    *("torch==2.9.1", "transformers==5.10.2", "diffusers==0.39.0"),
    *("comfy-aimdo==0.4.10", "comfy-kitchen==0.2.16", "accelerate", "aiohttp", "alembic", "av", "blake3"),
    *("einops", "filelock", "kornia", "numpy", "pillow", "protobuf", "psutil", "pydantic"),
    *("pydantic-settings", "pyyaml", "requests", "safetensors", "scipy", "sentencepiece", "simpleeval"),
    *("spandrel", "sqlalchemy", "tokenizers", "torchaudio", "torchsde", "torchvision", "tqdm", "yarl"),
)
PICTURES_PYTHON = "3.12"
#: Files split off from the others of their set.
DERIVED = ("sources", "torch-cuda")
#: Packages that only torch's CUDA build needs.
CUDA = re.compile(r"nvidia-|cuda-|triton$")


def sets() -> list[dict[str, tuple[str, ...]]]:
    """Return the sets that are resolved together: the files in order, with the packages that each adds."""
    text = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    extras = {name: tuple(needed) for name, needed in text["project"]["optional-dependencies"].items()}
    daemon = {
        # hatchling needs `editables` to install a checkout.
        "build": (*text["build-system"]["requires"], "editables"),
        # Needed to start the engines in the image trainers' containers.
        "image": ("nvidia-ml-py", "pydantic", "pyyaml"),
        "daemon": tuple(text["project"]["dependencies"]),
        "dev": extras["dev"],
        "bench": extras["bench"],
    }
    games = tuple(name for name in extras["training"] if re.match(r"open-spiel|numba", name))
    trainer = {
        "demo": extras["demo"],
        # Needed by torch's build for CUDA, and by Axolotl with any.
        "triton": ("triton",),
        "games": games,
        # setuptools builds the packages without wheels.
        "training": (*extras["training"], "setuptools"),
        # Imported by validators' reward functions.
        **{f"reward-{name}": (name,) for name in ("textstat", "langcheck", "detoxify")},
    }
    # Needed by the trainer's tests beside a training environment.
    test = tuple(name for name in extras["dev"] if re.match(r"pytest|hypothesis", name))
    alone = [{"test": test}, {"uv": ("uv",)}, {"audit": ("pip-audit",)}, {"pictures": PICTURES}]
    return [daemon, trainer, *alone]


def pythons_of(files: Iterable[str]) -> tuple[str, ...]:
    """Return the Pythons that these files are for."""
    return (PICTURES_PYTHON,) if "pictures" in files else PYTHONS


def compiled(
    uv: str, requirements: Iterable[str], output: Path, *options: str, pythons: Sequence[str] = PYTHONS
) -> str:
    """Run `uv pip compile` on a project of its own, without the user's settings; return its output."""
    needed = ", ".join(f"'''{requirement}'''" for requirement in requirements)
    platform = (f"python_full_version < '3.{_number(pythons[-1]) + 1}'", *PLATFORM[1:])
    (output.parent / "pyproject.toml").write_text(
        f'[project]\nname = "god-miner-lock"\nversion = "0"\nrequires-python = ">={pythons[0]}"\n'
        f'dependencies = [{needed}]\n[tool.uv]\nenvironments = ["{" and ".join(platform)}"]\n'
    )
    command = [uv, "pip", "compile", "-q", "--no-header", "--universal", "--python-version", pythons[0]]
    done = subprocess.run(
        [*command, "pyproject.toml", "-o", output.name, *options],
        cwd=output.parent,
        env=_environment(output.parent),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Failed(done.stderr.strip())
    return output.read_text("utf-8")


class Failed(Exception):
    """The error of uv."""

    @property
    def code(self) -> int:
        return 2 if UNREACHABLE.search(str(self)) or UNDATED.search(str(self)) else 1

    def explained(self) -> str:
        if UNREACHABLE.search(str(self)):
            return f"PyPI cannot be reached, nothing was done:\n{self}"
        if UNDATED.search(str(self)):
            return (
                "the index does not say when its files were uploaded, so the cooldown of "
                f"{COOLDOWN.days} days cannot be kept, and nothing was done:\n{self}"
            )
        return str(self)


def _environment(home: Path) -> dict[str, str]:
    """Our PATH, proxies and certificates; no index and no configuration file."""
    kept = re.compile(r"PATH|SSL_CERT_FILE|SSL_CERT_DIR|TMPDIR|\w+_proxy", re.IGNORECASE)
    return {
        **{name: value for name, value in os.environ.items() if kept.fullmatch(name)},
        "HOME": str(home),
        "UV_CACHE_DIR": os.environ.get("UV_CACHE_DIR") or str(Path.home() / ".cache" / "uv"),
        "UV_NO_SYSTEM_CONFIG": "1",
        "UV_SYSTEM_CERTS": "1",
    }


@dataclass(frozen=True)
class Resolved:
    """One resolved set."""

    files: dict[str, list[Pin]]
    #: By name and version: upload time of the newest file, None if the index does not say.
    uploaded: dict[tuple[str, str], datetime | None]


def resolved(uv: str, files: dict[str, tuple[str, ...]], *options: str) -> Resolved:
    """Resolve a set of files together, starting from their current versions."""
    requirements = [name for needed in files.values() for name in needed]
    pythons = pythons_of(files)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chosen = folder / "chosen.txt"
        chosen.write_text("".join(f"{pin}\n" for pin in current(files)))
        annotated = compiled(uv, requirements, chosen, *options, pythons=pythons)
        more = ("-c", "chosen.txt", "--format", "pylock.toml")
        locked = compiled(uv, requirements, folder / "pylock.toml", *more, pythons=pythons)
    packages = tomllib.loads(locked)["packages"]
    uploaded = {(package["name"], package["version"]): _uploaded(package) for package in packages}
    if "pictures" in files:
        pins = [pin for package in packages for pin, _ in pins_of(package, pythons)]
        return Resolved({"pictures": pins}, uploaded)
    return Resolved(divided(files, needs(annotated), packages), uploaded)


def current(files: Iterable[str]) -> list[Pin]:
    """Return the versions in these files, as PyPI names them."""
    names = [*files, *(DERIVED if "training" in files else ())]
    found = [pin for name in names for pin in pins.read(FOLDER / f"{name}.txt")]
    return [replace(pin, operator="==", hashes=()) for pin in found]


def needs(annotated: str) -> dict[str, set[str]]:
    """Return the packages that each one needs, from uv's `# via` notes."""
    graph: dict[str, set[str]] = {}
    child = ""
    for line in annotated.splitlines():
        if match := re.match(r"([\w.-]+)==", line):
            child = match[1]
        elif match := re.match(r"    #(?: via)? +([\w.-]+)", line):
            graph.setdefault(match[1], set()).add(child)
    return graph


def divided(
    files: dict[str, tuple[str, ...]], graph: dict[str, set[str]], packages: list[dict[str, Any]]
) -> dict[str, list[Pin]]:
    """Put each package into the first file that needs it."""
    divided: dict[str, list[Pin]] = {name: [] for name in files}
    home = {package["name"]: "torch-cuda" for package in packages}
    for file, requirements in reversed(files.items()):
        home.update(dict.fromkeys(_closure(graph, requirements), file))
    for package in packages:
        name = package["name"]
        for pin, is_source in pins_of(package):
            if name == "torch":
                divided.setdefault("torch-cuda", []).append(replace(pin, operator="==="))
            else:
                divided.setdefault("sources" if is_source else home[name], []).append(pin)
    return divided


def _closure(graph: dict[str, set[str]], requirements: Iterable[str]) -> set[str]:
    """Return all that these need, except what only torch's CUDA build needs."""
    waiting = [normalized(re.split(r"[^\w.-]", requirement)[0]) for requirement in requirements]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            needed = graph.get(name, set())
            waiting += [other for other in needed if not (name == "torch" and CUDA.match(other))]
    return found


def pins_of(package: dict[str, Any], pythons: Sequence[str] = PYTHONS) -> Iterator[tuple[Pin, bool]]:
    """Yield the installable pins of a package: its wheels, and its source if it lacks some. True marks a
    source."""
    name, version = package["name"], package["version"]
    marker = shortened(package.get("marker", "")) if len(pythons) > 1 else ""
    wheels = [wheel for wheel in package.get("wheels", []) if any(fits(_file(wheel), one) for one in pythons)]
    without = [one for one in pythons if not any(fits(_file(wheel), one) for wheel in wheels)]
    without = [one for one in without if applies(marker, one)]
    first = SOURCES.get(name, "")
    if without != [one for one in pythons if first and _number(one) >= _number(first)]:
        raise Failed(
            f"{name} {version} has no wheel for Python {', '.join(without) or 'some (SOURCES says)'}: take "
            "another version, or name it correctly in SOURCES of scripts/lock.py"
        )
    # The source and the wheels share Pythons between them.
    older, newer = f"python_full_version < '{first}'", f"python_full_version >= '{first}'"
    if wheels:
        hashes = sorted(wheel["hashes"]["sha256"] for wheel in wheels)
        yield Pin(name, version, older if first else marker, tuple(hashes)), False
    if first:
        yield Pin(name, version, newer if wheels else marker, (package["sdist"]["hashes"]["sha256"],)), True


def shortened(marker: str) -> str:
    """Return a marker without the conditions that hold for all of PYTHONS on our platform."""
    marker = re.sub(
        r"== '3\.(\d+)\.\*'",
        lambda match: f">= '3.{match[1]}' and python_full_version < '3.{int(match[1]) + 1}'",
        marker,
    )
    parts = [part for part in marker.split(" and ") if part not in ("", *PLATFORM)]
    bounds = {part: re.fullmatch(r"python_full_version >= '3\.(\d+)'", part) for part in parts}
    return " and ".join(
        part for part, bound in bounds.items() if not (bound and int(bound[1]) <= _number(PYTHONS[0]))
    )


def _file(wheel: dict[str, Any]) -> str:
    return str(wheel.get("name") or wheel["url"].rpartition("/")[2])


def fits(wheel: str, python: str) -> bool:
    """Return True if a wheel's name says that it is for this Python on Linux, x86-64."""
    tags, abi, platforms = wheel.removesuffix(".whl").split("-")[-3:]
    if not re.search(r"^any$|(^|\.)(manylinux|linux)\w*_x86_64(\.|$)", platforms):
        return False
    for tag in tags.split("."):
        if tag == "cp" + python.replace(".", "") and abi in ("abi3", "none", tag):
            return True
        match = re.fullmatch(r"(cp|py)3(\d*)", tag)
        if match and (match[1] == "py" or abi == "abi3") and int(match[2] or 0) <= _number(python):
            return True
    return False


def _number(python: str) -> int:
    return int(python.partition(".")[2])


def applies(marker: str, python: str) -> bool:
    """Return True if a marker of ours admits this Python."""
    for sign, other in re.findall(r"python_full_version (<|>=) '3\.(\d+)'", marker):
        if (_number(python) >= int(other)) != (sign == ">="):
            return False
    return True


def _uploaded(package: dict[str, Any]) -> datetime | None:
    """Return the upload time of its newest file, None if the index does not say."""
    files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
    times = [file.get("upload-time") for file in files]
    return max(times) if times and None not in times else None


def torch_for_cpu(version: str) -> list[Pin]:
    """Return PyTorch's own CPU builds, which PyPI does not have: found with pip's configuration.

    Builds that are not found there keep their hashes as long as the version stays.
    """
    kept = [pin for pin in pins.read(FOLDER / "torch-cpu.txt") if pin.version == f"{version}+cpu"]
    found: dict[str, str] = {}
    for python in PYTHONS:
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                "-m",
                "pip",
                "--disable-pip-version-check",
                "install",
                "-q",
                "--no-deps",
            ]
            command += ["--dry-run", "--report", "-", "--ignore-installed", "--target", folder]
            command += ["--only-binary", ":all:", "--platform", "manylinux_2_28_x86_64"]
            command += ["--python-version", python, f"torch=={version}+cpu"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            archive = json.loads(done.stdout)["install"][0]["download_info"]["archive_info"]
            found[python] = archive["hashes"]["sha256"]
    missing = [python for python in PYTHONS if python not in found]
    if missing and not kept:
        print(
            f"torch {version}+cpu for Python {', '.join(missing)} was not found, so its hash is not known: "
            "run this again with PIP_EXTRA_INDEX_URL=<PyTorch's index of CPU builds>",
            file=sys.stderr,
        )
    hashes = {*found.values(), *(value for pin in kept if missing for value in pin.hashes)}
    return [Pin("torch", f"{version}+cpu", "", tuple(sorted(hashes)))] if hashes else []


def write(uv: str, upgrade: bool) -> int:
    options = ["--upgrade"] if upgrade else []
    options += ["--exclude-newer", (datetime.now(UTC) - COOLDOWN).isoformat()]
    for name, (before, _reason) in YOUNG.items():
        options += ["--exclude-newer-package", f"{name}={before}"]
    for files in sets():
        done = resolved(uv, files, *options).files
        for pin in done.get("torch-cuda", []):
            if pin.name == "torch":
                done["torch-cpu"] = torch_for_cpu(pin.version)
        for name, found in done.items():
            pins.write(FOLDER / f"{name}.txt", found)
            print(f"requirements/{name}.txt: {len(found)} packages", flush=True)
    return 0


def check(uv: str) -> int:
    """Return 0 if PyPI serves exactly what the files say and nothing is too young, else 1."""
    problems: list[str] = []
    now = datetime.now(UTC)
    count = 0
    for files in sets():
        served = resolved(uv, files)
        for name, found in served.files.items():
            count += len(found)
            problems += differences(name, pins.read(FOLDER / f"{name}.txt"), found)
        problems += too_young(served.uploaded, now)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{count} packages of requirements/ compared with PyPI: {len(problems) or 'no'} problems")
    return int(bool(problems))


def differences(file: str, ours: list[Pin], served: list[Pin]) -> Iterator[str]:
    """Yield differences between a file and the index, except wheels that were added to a release later."""
    hashes = {str(pin): set(pin.hashes) for pin in served}
    for pin in ours:
        if str(pin) not in hashes:
            yield f"requirements/{file}.txt: {pin} is not what PyPI and pyproject.toml give, run make lock"
        elif not pin.hashes or not set(pin.hashes) <= hashes[str(pin)]:
            yield f"requirements/{file}.txt: {pin} has hashes that PyPI does not serve: find out why"
    for missing in sorted(hashes.keys() - {str(pin) for pin in ours}):
        yield f"requirements/{file}.txt: {missing} is missing, run make lock"


def too_young(uploaded: dict[tuple[str, str], datetime | None], now: datetime) -> Iterator[str]:
    for (name, version), time in sorted(uploaded.items()):
        if time is None:
            yield f"{name} {version}: the index does not say when it was uploaded"
        elif now - time < COOLDOWN and not (name in YOUNG and time < datetime.fromisoformat(YOUNG[name][0])):
            yield (
                f"{name} {version} was uploaded {time:%Y-%m-%d}, less than {COOLDOWN.days} days ago: take an "
                "older version, or name it with a reason in YOUNG of scripts/lock.py"
            )


def main(arguments: list[str]) -> int:
    if arguments not in (["write"], ["upgrade"], ["check"]):
        raise SystemExit(__doc__)
    try:
        path = str(program("uv", "uv"))
        return check(path) if arguments == ["check"] else write(path, arguments == ["upgrade"])
    except Failed as failed:
        print(failed.explained(), file=sys.stderr)
        return failed.code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
