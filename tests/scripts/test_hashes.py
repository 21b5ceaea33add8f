"""Installing by hash: a file that is not the pinned one is refused."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from requirements import lacking, nltk_data
from scripts import audit, install, pins, sbom
from scripts.pins import Pin


def wheel(folder: Path) -> Path:
    """A package of one module."""
    path = folder / "sesame-1.0-py3-none-any.whl"
    files = {
        "sesame.py": b"SEEDS = 1\n",
        "sesame-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: sesame\nVersion: 1.0\n",
        "sesame-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        lines = []
        for name, data in files.items():
            archive.writestr(name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(data)}")
        archive.writestr(
            "sesame-1.0.dist-info/RECORD", "\n".join([*lines, "sesame-1.0.dist-info/RECORD,,"]) + "\n"
        )
    return path


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder


@pytest.mark.process
@pytest.mark.parametrize("changed", [False, True])
def test_a_file_is_installed_only_with_its_hash(
    changed: bool,
    environment: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = wheel(tmp_path)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if changed:
        with file.open("ab") as more:
            more.write(b"\0")
    pins.write(tmp_path / "requirements" / "daemon.txt", [Pin("sesame", "1.0", "", (digest,))])
    monkeypatch.setattr(install, "ROOT", tmp_path)
    arguments = ["--no-index", "--find-links", str(tmp_path), *install.locked("daemon")]
    assert install.install(environment, "daemon", arguments) == int(changed)
    said = "".join(capsys.readouterr())
    assert ("DO NOT MATCH THE HASHES" in said) == changed
    assert changed or "installed into" in said


def test_a_base_keeps_what_it_has_and_gets_what_it_lacks() -> None:
    text = (pins.FOLDER / "games.txt").read_text("utf-8")
    rest = lacking.lacking(text, {"scipy", "absl-py"})
    names = [pin.name for pin in pins.read(pins.FOLDER / "games.txt")]
    assert rest == "".join(
        pin.entry() for pin in pins.read(pins.FOLDER / "games.txt") if pin.name not in ("scipy", "absl-py")
    )
    assert {"scipy", "absl-py", "numba", "open-spiel"} <= set(names)
    assert lacking.lacking(text, set(names)) == ""


def test_a_base_may_hold_the_remains_of_a_package_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torn-1.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert "pytest" in lacking.installed()


def test_data_with_another_hash_are_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "packages" / "corpora" / "words.zip"
    source.parent.mkdir(parents=True)
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr("words/one.txt", "one")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    monkeypatch.setattr(nltk_data, "FILES", {"corpora/words.zip": digest})
    address = (tmp_path / "packages").as_uri()
    nltk_data.fetch(tmp_path / "good", address)
    assert (tmp_path / "good/corpora/words/one.txt").read_text() == "one"
    source.write_bytes(source.read_bytes() + b"\0")
    with pytest.raises(SystemExit, match=f"not {digest}"):
        nltk_data.fetch(tmp_path / "bad", address)
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize("name", sbom.CONTENTS)
def test_the_sbom_names_each_package_with_its_hashes(name: str) -> None:
    document = sbom.sbom(name)
    assert document == sbom.sbom(name)
    components = document["components"]
    found = {(one["name"], one["version"]): {each["content"] for each in one["hashes"]} for one in components}
    assert len(found) == len(components)
    for file in sbom.CONTENTS[name]:
        for pin in pins.read(pins.FOLDER / f"{file}.txt"):
            assert set(pin.hashes) <= found[pin.name, pin.version]


@pytest.mark.parametrize(
    ("answers", "code", "expected"),
    [
        ([{"name": "a", "version": "1", "vulns": []}], 0, "1 packages audited, 0 vulnerabilities"),
        (
            [{"name": "a", "version": "1", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2"]}]}],
            1,
            "a 1: PYSEC-1, fixed in 2",
        ),
        ([{"name": "a", "skip_reason": "not found"}], 2, "said nothing about 1 of 1 packages"),
    ],
    ids=["clean", "a hole", "no answer"],
)
def test_an_audit_says_what_it_knows(
    answers: list[dict[str, Any]], code: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.verdict(answers) == code
    assert expected in "".join(capsys.readouterr())


def test_an_audit_asks_for_every_version_once() -> None:
    lists = audit.pinned()
    wanted = {
        f"{pin.name}=={pin.version.partition('+')[0]}"
        for path in pins.FOLDER.glob("*.txt")
        for pin in pins.read(path)
    }
    assert sorted(one for lines in lists for one in lines) == sorted(wanted)
    for lines in lists:
        names = [line.partition("==")[0] for line in lines]
        assert len(names) == len(set(names))
