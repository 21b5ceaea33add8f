"""Start-up code and changed files in installed packages."""

from __future__ import annotations

import base64
import hashlib
import os
import time
from pathlib import Path

import pytest

from miner.doctor.checks import packages
from miner.support.findings import FindingStatus


def install(prefix: Path, name: str, files: dict[str, str]) -> Path:
    """Write a package as pip does: its files, then their RECORD."""
    folder = prefix / "lib" / "python3.11" / "site-packages"
    lines = []
    for file, text in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{file},sha256={digest},{len(text.encode())}\n")
    record = folder / f"{name}-1.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("".join([*lines, f"{name}-1.dist-info/RECORD,,\n"]))
    return folder


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(packages, "SLACK_NS", 0)
    install(tmp_path, "sesame", {"sesame/__init__.py": "seeds = 1\n", "sesame/oil.so": "machine code"})
    install(
        tmp_path, "setuptools", {"distutils-precedence.pth": "import os; 1\n", "paths.pth": "/elsewhere\n"}
    )
    return tmp_path


def site(prefix: Path) -> Path:
    return prefix / "lib" / "python3.11" / "site-packages"


def found(prefix: Path) -> tuple[FindingStatus, str]:
    [finding] = packages.findings_of(str(prefix), "the daemon's")
    return finding.status, finding.detail


def test_an_unchanged_environment_passes(prefix: Path) -> None:
    status, detail = found(prefix)
    assert status is FindingStatus.OK
    assert "2 in" in detail
    assert "4 files of code as installed" in detail


def made_by_uv(prefix: Path) -> None:
    (site(prefix) / "_virtualenv.py").write_text("x = 1\n")
    (site(prefix) / "_virtualenv.pth").write_text("import _virtualenv")
    (prefix / "pyvenv.cfg").write_text("uv = 0.13.9\n")


def test_an_environment_that_uv_made_is_well(prefix: Path) -> None:
    made_by_uv(prefix)
    assert found(prefix)[0] is FindingStatus.OK


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("litellm_init.pth", "import base64\n", "litellm_init.pth belongs to no package"),
        ("_virtualenv.pth", "import _virtualenv", "_virtualenv.pth belongs to no package"),
        ("_virtualenv.py", "x = 2\n", "_virtualenv.pth belongs to no package"),
        ("sitecustomize.py", "", "sitecustomize.py runs at each start of Python"),
        ("sitecustomize.abi3.so", "", "sitecustomize.abi3.so runs at each start of Python"),
        ("sesame/__init__.py", "seeds = 2\n", "sesame/__init__.py was changed"),
        ("sesame/oil.so", "more machine code", "sesame/oil.so was changed"),
    ],
)
def test_files_added_or_changed_after_the_installation_are_named(
    name: str, text: str, expected: str, prefix: Path
) -> None:
    if name == "_virtualenv.py":
        made_by_uv(prefix)
    path = site(prefix) / name
    before = path.stat() if path.exists() else None
    records = [*site(prefix).glob("*/RECORD"), *prefix.glob("pyvenv.cfg")]
    installed = max(record.stat().st_ctime_ns for record in records)

    def written_later() -> bool:
        path.write_text(text)
        return path.stat().st_ctime_ns > installed

    while not written_later():  # the file system's clock ticks every few milliseconds
        pass
    if before is not None:  # as an attacker who hides it would
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    status, detail = found(prefix)
    assert status is FindingStatus.WARN
    assert expected in detail


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "with a byte order mark"])
def test_start_up_code_that_a_package_brings_along_is_named_too(mark: str, prefix: Path) -> None:
    install(prefix, "litellm", {"litellm_init.pth": f"{mark}import subprocess\n"})
    status, detail = found(prefix)
    assert status is FindingStatus.WARN
    assert "litellm_init.pth runs code at each start of Python" in detail


def test_a_missing_file_is_named(prefix: Path) -> None:
    (site(prefix) / "sesame/__init__.py").unlink()
    assert "sesame/__init__.py was changed" in found(prefix)[1]


def test_a_file_of_two_packages_may_be_the_version_of_either(prefix: Path) -> None:
    install(prefix, "tahini", {"docs/conf.py": "one = 1\n"})
    install(prefix, "halva", {"docs/conf.py": "two = 2\n"})
    assert found(prefix)[0] is FindingStatus.OK


def test_files_that_were_not_read_for_lack_of_time_are_reported(prefix: Path) -> None:
    module, record = site(prefix) / "sesame/__init__.py", site(prefix) / "sesame-1.dist-info/RECORD"
    while module.stat().st_ctime_ns <= record.stat().st_ctime_ns:
        os.utime(module)  # as a copy would
    environment = packages.examine_environment(site(prefix), seconds=0.0)
    assert (environment.unread, environment.changed) == (1, [])
    assert packages.examine_environment(site(prefix)).unread == 0


def test_a_large_environment_takes_seconds_at_most(prefix: Path) -> None:
    files = {f"large/{number // 500}/m{number}.py": f"x = {number}\n" for number in range(5_000)}
    install(prefix, "large", files)
    began = time.process_time()
    assert found(prefix)[0] is FindingStatus.OK
    assert time.process_time() - began < 5
