"""Directories handed over to the training's user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from miner.engines.base import EngineRejected, EngineSpec, Mount
from miner.engines.preflight import hand_over_files

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
UID = 10002


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    run_dir = tmp_path / "job" / "attempt"
    (run_dir / "work" / "deep").mkdir(parents=True)
    (run_dir / "work" / "file").write_text("x")
    return EngineSpec("k", ("a",), run_dir)


def owner(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_uid, found.st_gid


@needs_root
def test_the_run_folder_is_given_whole_and_what_links_lead_to_is_not(
    spec: EngineSpec, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    (victim / "inner").mkdir(parents=True)
    (spec.run_dir / "work" / "link").symlink_to(victim)
    (spec.run_dir / "file-link").symlink_to(victim / "inner")
    hand_over_files(spec, (), UID)
    for path in (spec.run_dir, *spec.run_dir.rglob("*")):
        assert owner(path) == (UID, UID)
    assert owner(victim) == owner(victim / "inner") == (0, 0)


@needs_root
def test_another_writable_folder_is_given_and_its_content_kept(spec: EngineSpec) -> None:
    job = spec.run_dir.parent
    (job / "inputs").mkdir()
    hand_over_files(spec, (Mount(job, read_only=False),), UID)
    assert owner(job) == (UID, UID)
    assert owner(job / "inputs") == (0, 0)


@needs_root
def test_inputs_of_ours_are_made_readable_and_others_are_named(spec: EngineSpec, tmp_path: Path) -> None:
    """As `save_pretrained` writes them under a tight umask; what a link leads to elsewhere stays shut."""
    secret = tmp_path / "token"
    secret.write_text("s")
    secret.chmod(0o600)
    model = tmp_path / "cache" / "model"
    model.mkdir(parents=True)
    weights = model / "model.safetensors"
    weights.write_text("w")
    weights.chmod(0o600)
    model.chmod(0o700)
    with pytest.raises(EngineRejected, match=str(model)):
        hand_over_files(spec, (Mount(model),), UID)
    hand_over_files(spec, (Mount(model),), UID, [tmp_path])
    assert (model.stat().st_mode & 0o777, weights.stat().st_mode & 0o777) == (0o755, 0o644)
    (model / "link").symlink_to(secret)
    with pytest.raises(EngineRejected, match="link is not readable"):
        hand_over_files(spec, (Mount(model),), UID, [tmp_path])
    assert secret.stat().st_mode & 0o777 == 0o600


def test_unreadable_inputs_are_rejected(spec: EngineSpec, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    rows = tmp_path / "rows.json"
    rows.write_text("[]")
    rows.chmod(0o600)
    with pytest.raises(EngineRejected, match=r"chmod -R a\+rX"):
        hand_over_files(spec, (Mount(rows),), UID)
    rows.chmod(0o644)
    hand_over_files(spec, (Mount(rows),), UID)
