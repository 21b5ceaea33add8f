"""A small real image without a registry: this machine's own Python and C library, in three seconds.

Not a distribution: just what a Python program and a shell script need. Larger things, such as a training
environment, are mounted at their own paths.
"""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

NAME = "ci-base:1"
#: The system's interpreter: the tests' own may lie in somebody's home.
_SYSTEM = [Path("/usr/bin/python3"), Path("/usr/local/bin/python3")]
PYTHON = next((path for path in _SYSTEM if path.exists()), _SYSTEM[0])
PROGRAMS = ("sh", "sleep", "cat", "ls", "id", "env", "true", "false", "kill", "df", "stat", "chmod", "rm")
PROGRAMS += ("timeout", "install", "useradd", "mkdir")
#: Asked for by name at run time, by torch among others.
LIBRARIES = ("libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libnss_files.so.2", "libpthread.so.0")
LIBRARIES += ("libdl.so.2", "librt.so.1", "libutil.so.1")
#: Of the standard library what no program needs.
_LEFT_OUT = re.compile(
    r"/(test|tests|__pycache__|idlelib|tkinter|turtledemo|ensurepip|lib2to3|dist-packages|config-[^/]*)(/|$)"
)
#: The first is the root itself. What mode a folder gets that nobody names differs between Docker's storages.
FOLDERS = (".", "usr", "usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "usr/local", "usr/local/bin")
FOLDERS += ("dev", "proc", "sys", "tmp", "etc", "root", "run", "var", "opt", "home")

#: A training stack that says it has everything.
STACK = "opt/stack"
READY = 'print(\'{"axolotl": "", "native": "", "kohya": "", "ai-toolkit": ""}\')\n'
#: Like images for GPUs, it claims all of them for itself.
ENVIRONMENT = ("NVIDIA_VISIBLE_DEVICES=all", f"PYTHONPATH=/{STACK}")


@cache
def tar(*more: str) -> bytes:
    """The image's file system, with more of this machine's programs."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for folder in FOLDERS:
            _folder(archive, folder)
        for link in ("bin", "sbin", "lib", "lib64"):
            _link(archive, link, f"usr/{link}")
        seen = set(FOLDERS)
        for path in _files((*PROGRAMS, *more)):
            _add(archive, path, seen)
        for name in {"python", "python3"} - {PYTHON.resolve().name}:
            _link(archive, f"usr/local/bin/{name}", str(PYTHON.resolve()))
        _text(archive, "etc/passwd", "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n")
        _text(archive, f"{STACK}/trainer/__init__.py", "")
        _text(archive, f"{STACK}/trainer/runner/__init__.py", "")
        _text(archive, f"{STACK}/trainer/runner/check_engines.py", READY)
        _text(archive, "etc/group", "root:x:0:\nnogroup:x:65534:\n")
    return out.getvalue()


def load(host: str, environment: tuple[str, ...] = ENVIRONMENT) -> str:
    """Into the Docker Engine at `host`: the image's id."""
    import docker

    api = docker.APIClient(base_url=host, version="auto", timeout=120)
    path = "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    try:
        changes = [f"ENV {line}" for line in (f"PATH={path}", *environment)]
        repository, _, tag = NAME.partition(":")
        api.import_image_from_data(tar(), repository=repository, tag=tag, changes=changes)
        return str(api.inspect_image(NAME)["Id"])
    finally:
        api.close()


def _files(names: tuple[str, ...]) -> Iterator[Path]:
    version = subprocess.run(
        [PYTHON, "-I", "-c", "import sys, sysconfig; print(sysconfig.get_path('stdlib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    library = Path(version)
    folders = (Path("/usr/bin"), Path("/usr/sbin"))
    programs = [path for name in names for path in [one / name for one in folders] if path.exists()]
    modules = sorted((library / "lib-dynload").glob("*.so"))
    yield PYTHON.resolve()
    yield from programs
    for path in sorted(library.rglob("*")):
        if path.is_file() and not _LEFT_OUT.search(str(path.parent) + "/"):
            yield path
    yield from _libraries([PYTHON.resolve(), *programs, *modules])


def _libraries(programs: list[Path]) -> Iterator[Path]:
    found = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True, check=False).stdout
    yield from sorted({Path(path) for path in re.findall(r"(/\S+\.so\S*)", found) if Path(path).exists()})
    known = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    for name in LIBRARIES:
        hit = re.search(rf"\s{re.escape(name)} .*x86-64.* => (\S+)", known) or re.search(
            rf"\s{re.escape(name)} .*=> (\S+)", known
        )
        if hit:
            yield Path(hit[1])


def _add(archive: tarfile.TarFile, path: Path, seen: set[str]) -> None:
    """At its place below /usr, links followed: /lib is one to /usr/lib."""
    name = str(path).lstrip("/")
    if not name.startswith("usr/"):
        name = f"usr/{name}"
    if name in seen:
        return
    seen.add(name)
    for folder in reversed(Path(name).parents):
        if str(folder) not in seen:
            seen.add(str(folder))
            _folder(archive, str(folder))
    info = archive.gettarinfo(str(path.resolve()), name)
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.type, info.linkname = tarfile.REGTYPE, ""
    info.size = path.resolve().stat().st_size
    with path.resolve().open("rb") as file:
        archive.addfile(info, file)


def _folder(archive: tarfile.TarFile, name: str) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
    archive.addfile(info)


def _link(archive: tarfile.TarFile, name: str, target: str) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    archive.addfile(info)


def _text(archive: tarfile.TarFile, name: str, text: str) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(text), 0o644
    archive.addfile(info, io.BytesIO(text.encode()))


__all__ = ["NAME", "load", "tar"]
