"""Which specifications are accepted, what is mounted, and what is handed over to the training's user."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miner.backends.base import AttemptSpec, BackendRejected, Mount
from miner.backends.preflight import check_spec, gpus_of, hand_over_files, mounts_of
from miner.observe.redact import Redactor


@pytest.fixture
def spec(tmp_path: Path) -> AttemptSpec:
    run_dir = tmp_path / "jobs" / "1" / "attempt_1"
    run_dir.mkdir(parents=True)
    return AttemptSpec("gm-1-1", ("python", "-c", "pass"), run_dir)


def checked(spec: AttemptSpec, tmp_path: Path, redact: Callable[[str], str] = str) -> None:
    check_spec(spec, redact, (tmp_path,))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"gpus": ("0", "GPU-fa4e0000-0000-4000-8000-000000000001", "MIG-12345678-9abc")},
        {"gpus": ("cpu",)},
        {"cpus": "0-31,64,70-71", "memory_bytes": 1 << 40, "shm_bytes": 1 << 34, "timeout_s": 3600.0},
        {"env": {"A_B": "x\ny"}, "labels": {"job": "7", "attempt": "1"}},
    ],
)
def test_a_good_specification_is_accepted(fields: dict[str, Any], spec: AttemptSpec, tmp_path: Path) -> None:
    checked(replace(spec, **fields), tmp_path)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"key": "-rf"}, "key"),
        ({"key": "a/b"}, "key"),
        ({"key": "x" * 101}, "key"),
        ({"argv": ()}, "no command"),
        ({"argv": ("a\0b",)}, "zero byte"),
        ({"gpus": ("all",)}, "'all'"),
        ({"gpus": ("0,1",)}, "neither an index"),
        ({"gpus": ("1", "1")}, "twice"),
        ({"env": {"LD PRELOAD": "x"}}, "variable"),
        ({"labels": {"Job": "1"}}, "label"),
        ({"cpus": "0-"}, "cpus"),
        ({"memory_bytes": 0}, "memory"),
        ({"timeout_s": -1.0}, "limit"),
    ],
)
def test_a_bad_specification_is_rejected_with_the_reason(
    fields: dict[str, Any], reason: str, spec: AttemptSpec, tmp_path: Path
) -> None:
    with pytest.raises(BackendRejected, match=reason):
        checked(replace(spec, **fields), tmp_path)


def test_everything_wrong_is_reported_at_once(spec: AttemptSpec, tmp_path: Path) -> None:
    with pytest.raises(BackendRejected) as caught:
        checked(replace(spec, gpus=("all",), cpus="x", argv=()), tmp_path)
    assert str(caught.value).count(";") == 2


@pytest.mark.parametrize(
    "fields",
    [{"argv": ("a", "open sesame")}, {"env": {"P": "open sesame"}}, {"labels": {"p": "open sesame"}}],
)
def test_a_secret_that_backends_would_show_is_rejected_and_not_shown(
    fields: dict[str, Any], spec: AttemptSpec, tmp_path: Path
) -> None:
    with pytest.raises(BackendRejected, match="holds a secret") as caught:
        checked(replace(spec, **fields), tmp_path, Redactor(["open sesame"]))
    assert "sesame" not in str(caught.value)


def test_links_inside_our_own_folders_are_refused_and_the_operator_s_are_not(
    spec: AttemptSpec, tmp_path: Path
) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    (outside / "models").mkdir(parents=True)
    (outside / "short").symlink_to(outside / "models")
    checked(replace(spec, mounts=(Mount(outside / "short"),)), tmp_path)
    inside = spec.run_dir.parent / "inputs"
    inside.symlink_to(outside)
    for path in (inside, inside / "models"):
        with pytest.raises(BackendRejected, match="inputs is a link"):
            checked(replace(spec, mounts=(Mount(path),)), tmp_path)
    other = spec.run_dir.parent / "attempt_2"
    other.symlink_to("/etc")
    with pytest.raises(BackendRejected, match="attempt_2 is a link"):
        checked(replace(spec, run_dir=other), tmp_path)


@pytest.mark.parametrize("path", ["relative", "/", "/tmp/../etc", "/no/such/place"])
def test_paths_that_cannot_be_mounted_are_rejected(path: str, spec: AttemptSpec, tmp_path: Path) -> None:
    with pytest.raises(BackendRejected):
        checked(replace(spec, mounts=(Mount(Path(path)),)), tmp_path)


def test_the_pretend_gpu_is_not_requested() -> None:
    assert gpus_of(AttemptSpec("k", ("a",), Path("/r"), gpus=("cpu",))) == ()
    assert gpus_of(AttemptSpec("k", ("a",), Path("/r"), gpus=("1", "0"))) == ("1", "0")


def mounted(*mounts: Mount) -> list[tuple[str, bool]]:
    spec = AttemptSpec("k", ("a",), Path("/d/jobs/1/attempt_1"), mounts)
    return [(str(mount.path), mount.read_only) for mount in mounts_of(spec)]


def test_what_lies_in_a_mount_of_the_same_kind_is_not_mounted_again() -> None:
    assert mounted() == [("/d/jobs/1/attempt_1", False)]
    job, inputs, models = (
        Mount(Path("/d/jobs/1"), False),
        Mount(Path("/d/jobs/1/inputs")),
        Mount(Path("/d/models")),
    )
    assert mounted(models, inputs, job) == [
        ("/d/jobs/1", False),
        ("/d/jobs/1/inputs", True),
        ("/d/models", True),
    ]
    below = Mount(Path("/d/models/a/b"))
    assert mounted(below, models) == [("/d/jobs/1/attempt_1", False), ("/d/models", True)]


def test_a_path_named_twice_is_writable_if_it_is_so_once() -> None:
    path = Path("/d/x")
    assert ("/d/x", False) in mounted(Mount(path), Mount(path, False), Mount(path))


_PARTS = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(
    lambda parts: Path("/").joinpath(*parts)
)


@given(mounts=st.lists(st.builds(Mount, _PARTS, st.booleans()), max_size=6), look=_PARTS)
def test_leaving_mounts_out_changes_nothing_of_what_may_be_written(mounts: list[Mount], look: Path) -> None:
    """A path is as its nearest mount says, before and after."""
    spec = AttemptSpec("k", ("a",), Path("/z"), tuple(mounts))
    wanted: dict[Path, bool] = {}
    for mount in mounts:
        wanted[mount.path] = wanted.get(mount.path, True) and mount.read_only
    kept = {mount.path: mount.read_only for mount in mounts_of(spec)}
    assert nearest(kept, look) == nearest(wanted, look)
    order = [mount.path for mount in mounts_of(spec)]
    assert all(outer not in order[order.index(inner) :] for inner in order for outer in inner.parents)


def nearest(mounts: dict[Path, bool], path: Path) -> bool | None:
    return next((mounts[place] for place in (path, *path.parents) if place in mounts), None)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
UID = 10002


def owner(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_uid, status.st_gid


@needs_root
def test_the_run_folder_is_given_whole_and_what_links_lead_to_is_not(
    spec: AttemptSpec, tmp_path: Path
) -> None:
    (spec.run_dir / "work" / "deep").mkdir(parents=True)
    (spec.run_dir / "work" / "file").write_text("x")
    victim = tmp_path / "victim"
    (victim / "inner").mkdir(parents=True)
    (spec.run_dir / "work" / "link").symlink_to(victim)
    (spec.run_dir / "file-link").symlink_to(victim / "inner")
    hand_over_files(spec, (), UID)
    for path in (spec.run_dir, *spec.run_dir.rglob("*")):
        assert owner(path) == (UID, UID)
    assert owner(victim) == owner(victim / "inner") == (0, 0)


@needs_root
def test_another_writable_folder_is_given_and_its_content_kept(spec: AttemptSpec) -> None:
    job = spec.run_dir.parent
    (job / "inputs").mkdir()
    hand_over_files(spec, (Mount(job, read_only=False),), UID)
    assert owner(job) == (UID, UID)
    assert owner(job / "inputs") == (0, 0)


@needs_root
def test_inputs_of_ours_are_made_readable_and_others_are_named(spec: AttemptSpec, tmp_path: Path) -> None:
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
    with pytest.raises(BackendRejected, match=str(model)):
        hand_over_files(spec, (Mount(model),), UID)
    hand_over_files(spec, (Mount(model),), UID, [tmp_path])
    assert (model.stat().st_mode & 0o777, weights.stat().st_mode & 0o777) == (0o755, 0o644)
    (model / "link").symlink_to(secret)
    with pytest.raises(BackendRejected, match="link is not readable"):
        hand_over_files(spec, (Mount(model),), UID, [tmp_path])
    assert secret.stat().st_mode & 0o777 == 0o600


@needs_root
def test_unreadable_inputs_are_rejected(spec: AttemptSpec, tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    rows.write_text("[]")
    rows.chmod(0o600)
    with pytest.raises(BackendRejected, match=r"chmod -R a\+rX"):
        hand_over_files(spec, (Mount(rows),), UID)
    rows.chmod(0o644)
    hand_over_files(spec, (Mount(rows),), UID)
