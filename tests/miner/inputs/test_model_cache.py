"""The shared cache of models: what is whole, what is kept, what goes first."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.domain.job_states import EndReason, StepFailed
from miner.inputs import model_cache as module
from miner.inputs.model_cache import CachedModel, ModelCache, ModelLeases, is_unlocked, locked

COMMIT = "c" * 40


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "models", quota=1000, keep_free=0)


def put(
    cache: ModelCache, model: str, size: int = 300, used: float = 0.0, commit: str = COMMIT
) -> CachedModel:
    cache.claim(model, size)
    (cache.partial(model, commit) / "deep").mkdir(exist_ok=True)
    (cache.partial(model, commit) / "deep/weights").write_bytes(b"w" * size)
    snapshot = cache.commit(model, commit, {"single": None})
    os.utime(snapshot.path.with_suffix(".json"), (used, used))
    return snapshot


def models(cache: ModelCache) -> list[str]:
    return [cached.model for cached in cache.snapshots()]


def test_a_committed_model_is_a_plain_folder_that_anybody_may_read(cache: ModelCache) -> None:
    os_umask = os.umask(0o077)
    try:
        snapshot = put(cache, "owner/name")
    finally:
        os.umask(os_umask)
    assert snapshot.path == cache.folder / "owner--name" / COMMIT
    assert (snapshot.path / "deep/weights").stat().st_mode & 0o777 == 0o644
    assert snapshot.path.stat().st_mode & 0o777 == 0o755
    assert (snapshot.path / "deep").stat().st_mode & 0o777 == 0o755
    assert (snapshot.bytes, snapshot.files, snapshot.about) == (300, {"deep/weights": 300}, {"single": None})
    for found in (cache.find("owner/name"), cache.find("owner/name", COMMIT)):
        assert found.path == snapshot.path
    assert cache.find("owner/name", "d" * 40) is None
    assert cache.find("owner/other") is None
    assert cache.unfinished() == []


def test_the_newest_snapshot_is_found_where_no_commit_is_named(cache: ModelCache) -> None:
    put(cache, "a/b", used=5, commit="1" * 40)
    put(cache, "a/b", used=9, commit="2" * 40)
    found = cache.find("a/b")
    assert found.commit == "2" * 40


@pytest.mark.parametrize("harm", ["short", "gone", "record"])
def test_a_snapshot_that_is_not_whole_any_more_is_none(cache: ModelCache, harm: str) -> None:
    snapshot = put(cache, "a/b")
    if harm == "short":
        (snapshot.path / "deep/weights").write_bytes(b"")
    elif harm == "gone":
        (snapshot.path / "deep/weights").unlink()
    else:
        snapshot.path.with_suffix(".json").write_text("{")
    assert cache.find("a/b") is None
    put(cache, "a/b")
    assert cache.find("a/b") is not None


def test_a_kill_between_record_and_folder_loses_nothing(cache: ModelCache) -> None:
    snapshot = put(cache, "a/b")
    cache.partial("a/b", COMMIT).rmdir()
    snapshot.path.rename(cache.folder / ".partial/a--b" / COMMIT)
    assert cache.find("a/b") is None
    assert models(cache) == []
    assert [cached.model for cached in cache.unfinished()] == ["a/b"]
    cache.commit("a/b", COMMIT, {})
    assert models(cache) == ["a/b"]


def test_the_least_recently_used_goes_first_when_there_is_no_room(cache: ModelCache) -> None:
    for number, name in enumerate(("a/1", "a/2", "a/3"), 1):
        put(cache, name, used=float(number))
    cache.find("a/1")
    put(cache, "a/4", 300)
    assert sorted(models(cache)) == ["a/1", "a/3", "a/4"]
    put(cache, "a/5", 900)
    assert models(cache) == ["a/5"]


def test_what_a_job_needs_stays_and_then_the_disk_is_full(cache: ModelCache) -> None:
    put(cache, "a/1", 600)
    cache.leases.hold(7, "a/1")
    with pytest.raises(StepFailed) as caught:
        cache.claim("a/2", 500)
    assert caught.value.reason is EndReason.DISK_FULL
    assert "0.00 GB more than there is room for" in str(caught.value)
    assert models(cache) == ["a/1"]
    cache.leases.release(7)
    cache.claim("a/2", 500)
    assert models(cache) == []


def test_the_disk_counts_as_well_as_the_quota(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path, quota=1 << 60, keep_free=1 << 58)
    with pytest.raises(StepFailed, match="MIN_FREE_DISK_BYTES"):
        cache.claim("a/1", 1)


def test_what_is_fetched_right_now_is_reckoned_with_and_never_evicted(cache: ModelCache) -> None:
    with cache.fetching("a/1"):
        cache.claim("a/1", 700)
        (cache.partial("a/1", COMMIT) / "x").write_bytes(b"x" * 100)
        with pytest.raises(StepFailed):
            cache.claim("a/2", 400)
        cache.claim("a/2", 300)
    assert [cached.model for cached in cache.unfinished()] == ["a/1"]
    cache.claim("a/3", 1000)
    assert cache.unfinished() == []


def test_what_was_begun_counts_for_its_own_model(cache: ModelCache) -> None:
    (cache.partial("a/1", COMMIT) / "x").write_bytes(b"x" * 600)
    cache.claim("a/1", 1000)
    assert [cached.bytes for cached in cache.unfinished()] == [600]


@pytest.mark.parametrize(
    ("goes", "seen"),
    [("the name", ([100], [107])), ("the file", ([100],)), ("the commit", ([0],)), ("the model", ([],))],
)
def test_what_goes_while_one_looks_is_not_counted_and_ends_nobody(
    cache: ModelCache, monkeypatch: pytest.MonkeyPatch, goes: str, seen: tuple[list[int], ...]
) -> None:
    """One waits for a model that another fetches: files change their names while the first asks for sizes."""
    partial = cache.partial("a/1", COMMIT)
    (partial / "config.json.part").write_bytes(b"c" * 7)
    if goes != "the commit":
        (partial / "weights").write_bytes(b"w" * 100)
    stat, gone = Path.stat, []

    def late(path: Path, **kwargs: bool) -> os.stat_result:
        """The listing was made, the size is asked for: now it happens."""
        if not gone and (path == partial.parent if goes == "the model" else path.suffix == ".part"):
            gone.append(path)
            if goes == "the name":
                path.rename(path.with_suffix(""))
            elif goes == "the file":
                path.unlink()
            else:
                shutil.rmtree(partial if goes == "the commit" else partial.parent)
        return stat(path, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", late)
        found = [cached.bytes for cached in cache.unfinished()]
    assert gone
    assert found in seen


def test_another_commit_gives_up_what_was_begun(cache: ModelCache) -> None:
    (cache.partial("a/1", "1" * 40) / "x").write_bytes(b"x")
    assert list(cache.partial("a/1", "2" * 40).parent.iterdir()) == [cache.partial("a/1", "2" * 40)]


def test_pruning_takes_what_nobody_needs(cache: ModelCache) -> None:
    for number in (1, 2, 3):
        put(cache, f"a/{number}", 100, used=float(number))
    (cache.partial("a/4", COMMIT) / "x").write_bytes(b"x" * 50)
    cache.leases.hold(1, "a/2")
    dry = cache.prune(dry_run=True)
    assert [cached.model for cached in dry] == ["a/4", "a/1", "a/3"]
    assert len(models(cache)) == 3
    assert [cached.model for cached in cache.prune(to_bytes=250)] == ["a/4", "a/1"]
    assert [cached.model for cached in cache.prune(models=("a/2",))] == []
    assert [cached.model for cached in cache.prune(models=("a/3",))] == ["a/3"]
    assert models(cache) == ["a/2"]
    with locked(cache.folder / ".locks/a--2"):
        cache.leases.release(1)
        assert cache.prune() == []
    assert [cached.model for cached in cache.prune()] == ["a/2"]
    assert list((cache.folder / ".trash").iterdir()) == []


def test_no_model_that_is_still_to_go_can_be_found_while_others_are_taken_apart(
    cache: ModelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, "a/b")
    put(cache, "c/d")
    found: list[CachedModel | None] = []
    with monkeypatch.context() as patched:
        patched.setattr(module.shutil, "rmtree", lambda *_, **__: found.append(cache.find("c/d")))
        assert len(cache.prune()) == 2
    assert set(found) == {None}


def test_a_job_that_comes_while_it_is_looked_what_may_go_keeps_its_model(
    cache: ModelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, "a/b")
    unfinished = cache.unfinished

    def job_comes() -> list[CachedModel]:
        if cache.leases.by_model() == {}:
            looked.append(1)
            if len(looked) == 2:  # what is free is known by then
                cache.leases.hold(1, "a/b")
        return unfinished()

    looked: list[int] = []
    monkeypatch.setattr(cache, "unfinished", job_comes)
    assert cache.prune() == []
    assert models(cache) == ["a/b"]


def test_a_kill_while_a_model_is_removed_leaves_nothing_that_nobody_counts(
    cache: ModelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = put(cache, "a/b")

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            cache.prune()
    assert not snapshot.path.exists()
    assert (cache.snapshots(), cache.find("a/b")) == ([], None)
    put(cache, "a/b")
    assert models(cache) == ["a/b"]


NAMES = st.sampled_from(["a/1", "a/2", "b", "c-d/e_f.g"])
STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "hold", "release", "prune", "find"]), NAMES, st.integers(1, 700)),
    max_size=15,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_whatever_happens_held_models_stay_and_the_quota_holds(
    steps: list[tuple[str, str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache = ModelCache(tmp_path_factory.mktemp("cache"), quota=1000, keep_free=0)
    for what, model, number in steps:
        held = {one.path for one in cache.snapshots() if one.model in cache.leases.by_model()}
        if what == "put":
            with contextlib.suppress(StepFailed):
                put(cache, model, number, used=float(number), commit=f"{number:040}")
        elif what == "hold":
            cache.leases.hold(number, model)
        elif what == "release":
            cache.leases.release_all_but(())
        elif what == "prune":
            cache.prune(to_bytes=number)
        else:
            cache.find(model)
        there = {one.path for one in cache.snapshots()}
        assert held <= there
        assert sum(one.bytes for one in cache.snapshots()) <= 1000
        assert all(path.is_dir() for path in there)


def test_leases_hold_until_they_are_released_also_for_other_processes(tmp_path: Path) -> None:
    leases = ModelLeases(tmp_path / "leases")
    assert leases.by_model() == {}
    leases.hold(2, "a/b")
    leases.hold(1, "a/b")
    written = (tmp_path / "leases/1.json").stat().st_ino
    leases.hold(1, "a/b")
    assert (tmp_path / "leases/1.json").stat().st_ino == written, "holding again writes nothing"
    leases.hold(3, "gpt2")
    assert ModelLeases(tmp_path / "leases").by_model() == {"a/b": [1, 2], "gpt2": [3]}
    leases.hold(3, "a/b")
    leases.release(1)
    leases.release(1)
    leases.release(99)
    assert leases.by_model() == {"a/b": [2, 3]}


def test_what_ended_without_a_word_is_forgotten_at_the_start(tmp_path: Path) -> None:
    leases = ModelLeases(tmp_path)
    for job in (1, 2, 3):
        leases.hold(job, "a/b")
    leases.release_all_but({2, 7})
    assert leases.by_model() == {"a/b": [2]}


def test_rubbish_is_no_lease(tmp_path: Path) -> None:
    for name, text in {
        "1.json": "",
        "2.json": "[]",
        "3.json": '{"model": 5}',
        "x.json": '{"model": "a/b"}',
    }.items():
        (tmp_path / name).write_text(text)
    assert ModelLeases(tmp_path).by_model() == {}


def test_a_full_disk_is_waited_for_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_atomically", full)
    with pytest.raises(StepFailed) as caught:
        ModelLeases(tmp_path).hold(1, "a/b")
    assert caught.value.reason is EndReason.DISK_FULL


HOLD = "import sys; from pathlib import Path; from miner.inputs.model_cache import locked\n"
HOLD += "with locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


@pytest.mark.process
def test_one_process_holds_a_lock_and_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_RETRY_SECONDS", 0.01)
    path = tmp_path / "deep/lock"
    assert is_unlocked(path)
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout.readline() == "held\n"
        assert not is_unlocked(path)
        waited = 0

        def waiting() -> None:
            nonlocal waited
            waited += 1
            if waited == 2:
                other.kill()  # a lock does not outlive its holder, however it ends

        with locked(path, waiting):
            assert waited >= 2
            assert not is_unlocked(path)
    assert is_unlocked(path)
