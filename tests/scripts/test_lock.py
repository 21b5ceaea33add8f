"""Pins, their files, and the findings of `lock-check`."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from scripts import install, lock, pins
from scripts.pins import FOLDER, Pin

ROOT = Path(__file__).parents[2]
NOW = datetime(2026, 11, 28, tzinfo=UTC)
PARTS = {
    **install.DAEMON,
    **{
        f"{part} {build}": (*files, *torch, *(("sources",) if part == "training" else ()))
        for part, files in install.TRAINING.items()
        for build, torch in install.TORCH.items()
    },
}


def test_every_file_has_versions_and_hashes_alone() -> None:
    for path in FOLDER.glob("*.txt"):
        text = path.read_text("utf-8").removeprefix(pins.HEADER)
        found = pins.read(path)
        assert "".join(pin.entry() for pin in found) == text
        assert found
        assert all(pin.hashes for pin in found)


@pytest.mark.parametrize("python", install.PYTHONS)
@pytest.mark.parametrize("part", PARTS)
def test_a_part_names_each_package_once(part: str, python: str) -> None:
    names = [
        pin.name
        for file in dict.fromkeys(PARTS[part])
        for pin in pins.read(FOLDER / f"{file}.txt")
        if lock.applies(pin.marker, python)
    ]
    assert sorted(names) == sorted(set(names))
    assert ("torch" in names) == (part not in install.DAEMON)


def test_a_version_asked_for_by_name_is_the_pinned_one() -> None:
    pinned = {f"{pin.name}=={pin.version}" for path in FOLDER.glob("*.txt") for pin in pins.read(path)}
    wanted = {name for files in lock.sets() for needed in files.values() for name in needed if "==" in name}
    assert wanted <= pinned
    assert wanted


def package(name: str = "sesame", *wheels: str, marker: str = "", sdist: bool = True) -> dict[str, Any]:
    def file(name: str) -> dict[str, Any]:
        digest = f"{abs(hash(name)):064x}"[-64:]
        return {"name": name, "hashes": {"sha256": digest}, "upload-time": NOW - timedelta(days=30)}

    found: dict[str, Any] = {
        "name": name,
        "version": "1",
        "marker": marker,
        "wheels": [file(one) for one in wheels],
    }
    return {**found, "sdist": file(f"{name}-1.tar.gz")} if sdist else found


def test_hashes_are_those_of_wheels_for_linux_on_x86_64_and_our_pythons() -> None:
    wanted = [
        "sesame-1-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        "sesame-1-cp312-abi3-manylinux_2_28_x86_64.whl",
    ]
    others = [
        "sesame-1-cp311-cp311-musllinux_1_2_x86_64.whl",
        "sesame-1-cp311-cp311-manylinux_2_28_aarch64.whl",
        "sesame-1-cp314-cp314t-manylinux_2_28_x86_64.whl",
        "sesame-1-pp311-pypy311_pp73-manylinux_2_28_x86_64.whl",
        "sesame-1-cp311-cp311-win_amd64.whl",
    ]
    found = package("sesame", *wanted, *others)
    [(pin, is_source)] = lock.pins_of(found)
    assert set(pin.hashes) == {wheel["hashes"]["sha256"] for wheel in found["wheels"][:2]}
    assert not is_source


@pytest.mark.parametrize(
    "wheels", [(), ("sesame-1-cp311-cp311-manylinux_2_28_x86_64.whl",)], ids=["none", "not for all"]
)
def test_a_package_without_wheels_must_be_named(wheels: tuple[str, ...]) -> None:
    with pytest.raises(lock.Failed, match=r"sesame 1 has no wheel for Python .*3\.13.*SOURCES"):
        list(lock.pins_of(package("sesame", *wheels)))


def test_a_named_one_is_built_from_source_where_it_has_no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "SOURCES", {"sesame": "3.13"})
    wheels = [f"sesame-1-cp{number}-cp{number}-manylinux_2_28_x86_64.whl" for number in ("311", "312")]
    (wheel, _), (source, is_source) = lock.pins_of(package("sesame", *wheels))
    assert is_source
    assert [wheel.marker, source.marker] == ["python_full_version < '3.13'", "python_full_version >= '3.13'"]
    assert set(wheel.hashes).isdisjoint(source.hashes)


@pytest.mark.parametrize(
    ("marker", "short"),
    [
        (" and ".join(lock.PLATFORM), ""),
        ("python_full_version >= '3.11' and sys_platform == 'linux'", ""),
        ("python_full_version == '3.13.*'", "python_full_version >= '3.13'"),
        ("python_full_version == '3.11.*'", "python_full_version < '3.12'"),
    ],
)
def test_a_marker_says_only_what_our_pythons_differ_in(marker: str, short: str) -> None:
    assert lock.shortened(marker) == short


def test_each_package_is_in_the_first_file_that_needs_it_and_cuda_is_divided_off() -> None:
    graph = lock.needs(
        "torch==2\n    # via god-miner-lock (pyproject.toml)\nnvidia-cublas==1\n    # via torch\n"
        "sympy==1\n    # via\n    #   -c chosen.txt\n    #   torch\nmpmath==1\n    # via sympy\n"
        "axolotl==1\n    # via god-miner-lock (pyproject.toml)\n"
    )
    names = ("torch", "nvidia-cublas", "sympy", "mpmath", "axolotl")
    packages = [package(name, f"{name}-1-py3-none-any.whl") for name in names]
    found = lock.divided({"demo": ("torch==2",), "training": ("axolotl", "torch==2")}, graph, packages)
    assert {file: [pin.name for pin in entries] for file, entries in found.items()} == {
        "demo": ["sympy", "mpmath"],
        "training": ["axolotl"],
        "torch-cuda": ["torch", "nvidia-cublas"],
    }
    # Not the build for the CPU, whose version begins with the same.
    assert str(found["torch-cuda"][0]) == "torch===1"


def test_the_evaluators_stack_is_resolved_for_one_python_with_torch_in_its_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []

    def compiled(_uv: str, _needed: object, output: Path, *_: str, pythons: tuple[str, ...]) -> str:
        asked.append(pythons)
        if output.suffix == ".txt":
            return "torch==2\n"
        return "".join(
            f"[[packages]]\nname = '{name}'\nversion = '1'\nmarker = \"python_full_version < '3.13'\"\n"
            f"wheels = [{{ name = '{name}-1-cp312-cp312-manylinux_2_28_x86_64.whl', hashes.sha256 = 'a' }}]\n"
            for name in ("torch", "nvidia-cublas")
        )

    monkeypatch.setattr(lock, "compiled", compiled)
    found = lock.resolved("uv", {"pictures": lock.PICTURES}).files
    assert asked == [("3.12",), ("3.12",)]
    assert [str(pin) for pin in found.pop("pictures")] == ["torch==1", "nvidia-cublas==1"]
    assert not found


OURS = Pin("sesame", "1", "", ("a", "b"))


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        ([Pin("sesame", "1", "", ("a", "b", "c"))], []),
        ([Pin("sesame", "1", "", ("a",))], ["sesame==1 has hashes that PyPI does not serve"]),
        ([Pin("sesame", "2", "", ("a", "b"))], ["sesame==1 is not what", "sesame==2 is missing"]),
        ([OURS, Pin("oil", "3", "", ("d",))], ["oil==3 is missing, run make lock"]),
    ],
    ids=["a later wheel", "another hash", "another version", "one more"],
)
def test_a_check_says_what_differs_from_the_index(served: list[Pin], expected: list[str]) -> None:
    found = list(lock.differences("daemon", [OURS], served))
    assert len(found) == len(expected)
    for problem, text in zip(found, expected, strict=True):
        assert text in problem


def test_a_release_younger_than_seven_days_needs_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    uploaded = {
        ("old", "1"): NOW - timedelta(days=8),
        ("young", "2"): NOW - timedelta(days=6),
        ("patched", "3"): NOW - timedelta(days=1),
        ("undated", "4"): None,
    }
    monkeypatch.setattr(lock, "YOUNG", {"patched": ("2026-11-28T00:00:00+00:00", "a hole in version 2")})
    found = list(lock.too_young(uploaded, NOW))
    assert [problem.split()[0] for problem in found] == ["undated", "young"]
    assert "2026-11-22, less than 7 days ago" in found[1]


def test_the_index_is_asked_for_releases_before_the_cooldown(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def resolved(_uv: str, _files: object, *options: str) -> lock.Resolved:
        asked[:] = options
        return lock.Resolved({}, {})

    monkeypatch.setattr(lock, "resolved", resolved)
    monkeypatch.setattr(lock, "YOUNG", {"patched": ("2026-11-28T00:00:00+00:00", "a hole in version 2")})
    before = datetime.now(UTC)
    assert lock.write("uv", upgrade=True) == 0
    newest = datetime.fromisoformat(asked[asked.index("--exclude-newer") + 1])
    assert timedelta() <= newest - (before - timedelta(days=7)) < timedelta(minutes=5)
    assert "patched=2026-11-28T00:00:00+00:00" in asked
    assert "--upgrade" in asked


@pytest.mark.parametrize(
    ("said", "code", "expected"),
    [
        ("error: Failed to fetch: https://index.invalid/", 2, "cannot be reached"),
        ("a==1 is missing an upload date, but user provided: 2026", 2, "cooldown of 7 days cannot be kept"),
        ("Because a==1 depends on b==2", 1, "Because a==1"),
    ],
    ids=["no network", "no times", "conflict"],
)
def test_errors_of_uv_are_explained(
    said: str, code: int, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(_uv: str) -> int:
        raise lock.Failed(said)

    monkeypatch.setattr(lock, "program", lambda *_: Path("uv"))
    monkeypatch.setattr(lock, "check", failing)
    assert lock.main(["check"]) == code
    assert expected in capsys.readouterr().err


def test_nothing_is_installed_without_hashes() -> None:
    """The Dockerfiles and the Makefile install only our own code without hashes."""
    for path in [*ROOT.glob("dockerfiles/*"), ROOT / "Makefile", ROOT / ".ci/run"]:
        text = re.sub(r"\\\n", " ", path.read_text("utf-8"))
        for command in re.findall(r"\bpip install\b[^&|;\n]*", text):
            ours = (
                "--no-deps" in command
                and "--no-build-isolation" in command
                and command.strip().endswith(" .")
            )
            assert ours or ("--require-hashes" in command and "-r " in command), f"{path.name}: {command}"


def test_every_image_is_named_by_its_digest() -> None:
    for path in ROOT.glob("dockerfiles/*"):
        text = path.read_text("utf-8")
        images = re.findall(r"^ARG \w*(?:BASE|IMAGE)\w*=(\S+)$", text, re.MULTILINE)
        images += [
            name for name in re.findall(r"^(?:FROM|COPY --from=)(\S+)", text, re.MULTILINE) if "/" in name
        ]
        assert images
        assert all(re.search(r"@sha256:[0-9a-f]{64}$", name) for name in images), path.name
