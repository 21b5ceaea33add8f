"""Install what one part needs: python scripts/install.py daemon|dev|bench|demo|training FOLDER

Creates the environment in FOLDER if needed and brings it up to date. One line shows the progress; pip's own
output is shown only if it fails.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: What requirements/ has the hashes for, on Linux with x86-64. Of any other pip would say that files do not
#: match their hashes, as if somebody had changed them.
PYTHONS = ("3.11", "3.12", "3.13")
#: The files of requirements/ by part: all that it needs, with the hashes of what may be installed.
DAEMON = {
    "daemon": ("build", "image", "daemon"),
    "dev": ("build", "image", "daemon", "dev"),
    "bench": ("build", "image", "daemon", "dev", "bench"),
}
TRAINING = {"demo": ("demo",), "training": ("demo", "games", "training", "triton")}
TORCH = {"CPU": ("torch-cpu",), "CUDA": ("torch-cuda", "triton")}
#: Download and disk sizes by part and build of torch, measured with Python 3.11, November 2026.
SIZES = {
    ("demo", "CPU"): "0.3 GB to fetch, 1.5 GB on disk",
    ("demo", "CUDA"): "2.9 GB to fetch, 5.2 GB on disk",
    ("training", "CPU"): "0.7 GB to fetch, 4 GB on disk",
    ("training", "CUDA"): "3.2 GB to fetch, 7.1 GB on disk",
}
#: Files of this size are printed one by one when there is no terminal.
LARGE_MB = 100.0
FETCHED = re.compile(r"^\s*(Downloading|Using cached|Processing) (\S+)(?: \(([\d.]+) (\wB)\))?")
UNITS = {"kB": 0.001, "MB": 1.0, "GB": 1000.0}


def main() -> int:
    if len(sys.argv) != 3 or sys.argv[1] not in (*DAEMON, *TRAINING):
        raise SystemExit(__doc__)
    what, folder = sys.argv[1], Path(sys.argv[2]).absolute()
    check_platform(platform.python_version(), f"{platform.system()} {platform.machine()}")
    note = make_environment(folder)
    if what in DAEMON:
        code = install(folder, what, locked(*DAEMON[what])) or install(
            folder, "god-miner", [*BUILT_HERE, "-e", "."]
        )
    else:
        code = install_training(folder, what)
    if note:
        print(note, flush=True)
    return code


def check_platform(version: str, machine: str) -> None:
    if version.rpartition(".")[0] not in PYTHONS:
        known = f"Python {PYTHONS[0]} to {PYTHONS[-1]}"
        raise SystemExit(f"god-miner is installed with {known}, {sys.executable} is {version}: set PYTHON=")
    if machine != "Linux x86_64":
        raise SystemExit(
            f"requirements/ has the hashes for Linux x86_64, and this is {machine}: without hashes "
            "`pip install -e .` installs god-miner into an environment of yours"
        )


def make_environment(folder: Path) -> str:
    """Create the environment unless it exists; return a note for the end if it has another Python."""
    # pip is installed last; python is a dangling link once its Python was removed.
    if (folder / "bin" / "pip").exists() and (folder / "bin" / "python").exists():
        wanted = f"python{sys.version_info.major}.{sys.version_info.minor}"
        existing = [path.name for path in (folder / "lib").glob("python3.*")]
        if not existing or wanted in existing:
            return ""
        note = f"{folder.name} is kept as it is, with {existing[0]}"
        note += f"; for {wanted} ({sys.executable}): rm -rf {folder.name}, and run this again"
        print(note, flush=True)
        return note
    try:
        import ensurepip  # noqa: F401 - Debian has it in another package
        import venv  # noqa: F401
    except ImportError:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise SystemExit(
            f"{sys.executable} cannot make environments: apt-get install python{version}-venv"
        ) from None
    if subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=False).returncode:
        raise SystemExit(f"{folder} could not be created: see above")
    return ""


def locked(*files: str) -> list[str]:
    """Return pip's arguments to install these files of requirements/: only wheels with the named hashes."""
    names = [name for file in dict.fromkeys(files) for name in ("-r", f"requirements/{file}.txt")]
    return ["--require-hashes", "--no-deps", "--only-binary", ":all:", *names]


#: Packages without wheels are built with installed packages; the build fetches no others.
BUILT_HERE = ["--no-deps", "--no-build-isolation", "--use-pep517"]


def install_training(folder: Path, what: str) -> int:
    """Install a training environment, with the build of torch that fits this machine."""
    if shutil.which("nvidia-smi"):
        build = "CUDA"
    else:
        [cpu] = re.findall(
            r"^torch==\S+", (ROOT / "requirements/torch-cpu.txt").read_text("utf-8"), re.MULTILINE
        )
        build = "CPU" if is_available(folder, cpu) else "CUDA"
    print(f"torch for {'the CPU' if build == 'CPU' else 'CUDA'}: {SIZES[what, build]}", flush=True)
    if build == "CUDA" and not shutil.which("nvidia-smi"):
        print(
            "  There is no GPU here. The build for the CPU is much smaller:\n"
            f"  PIP_EXTRA_INDEX_URL=<PyTorch's index of CPU builds> make {what}",
            flush=True,
        )
    code = install(folder, what, locked(*TRAINING[what], *TORCH[build]))
    if code or what == "demo":
        return code
    sources = ["--require-hashes", "--no-binary", ":all:", "-r", "requirements/sources.txt"]
    return install(folder, "sources", [*BUILT_HERE, *sources])


def is_available(folder: Path, requirement: str) -> bool:
    """Return True if pip finds it with this machine's configuration."""
    arguments = ["install", "-q", "--dry-run", "--no-deps", "--ignore-installed", requirement]
    return subprocess.run(pip(folder, arguments), capture_output=True, check=False, cwd=ROOT).returncode == 0


def pip(folder: Path, arguments: list[str]) -> list[str]:
    return [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *arguments]


class Progress:
    """pip's output, and one line that sums it up."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.started = time.monotonic()
        self.lines: list[str] = []
        self.files = 0
        self.megabytes = 0.0
        self.now = "reads the index"

    def add(self, line: str) -> None:
        self.lines.append(line)
        match = FETCHED.match(line)
        if match and not match[2].endswith(".metadata"):
            size = float(match[3] or 0) * UNITS.get(match[4] or "", 0.0)
            self.files += 1
            self.megabytes += size
            self.now = Path(match[2]).name.split("-")[0] + (f" ({size:,.0f} MB)" if size >= 1 else "")
            if size >= LARGE_MB and not sys.stdout.isatty():
                print(f"  {self}", flush=True)
        elif line.startswith("Installing collected packages"):
            self.now = f"unpacks {line.count(',') + 1} packages"
            if not sys.stdout.isatty():
                print(f"  {self}", flush=True)

    def __str__(self) -> str:
        seconds = int(time.monotonic() - self.started)
        fetched = f"{self.files} files, {self.megabytes:,.0f} MB, " if self.files else ""
        return f"{self.what}: {fetched}{seconds // 60}:{seconds % 60:02d}, {self.now}"


def install(folder: Path, what: str, arguments: list[str]) -> int:
    progress = Progress(what)
    command = pip(folder, ["install", "--progress-bar", "off", *arguments])
    child = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert child.stdout is not None
    output = child.stdout

    def read() -> None:
        for line in output:
            progress.add(line.rstrip())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while reader.is_alive():
            reader.join(0.5)
            if sys.stdout.isatty():
                width = shutil.get_terminal_size().columns - 1
                print(f"\r\033[K  {str(progress)[: width - 2]}", end="", flush=True)
        code = child.wait()
    finally:
        if child.poll() is None:
            child.terminate()
        reader.join(5.0)
        output.close()
        if sys.stdout.isatty():
            print("\r\033[K", end="")
    if code:
        print("\n".join(progress.lines[-60:]), file=sys.stderr)
        print(f"{what} was not installed into {folder}: pip ended with {code}, see above", file=sys.stderr)
        return 1
    seconds = time.monotonic() - progress.started
    print(f"{what}: installed into {os.path.relpath(folder, ROOT)} in {seconds:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
