"""A model in the cache, whatever the hub does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.domain.job_states import EndReason, StepFailed
from core.domain.tasks import ImageModelType
from core.models.facts import Family
from miner.inputs import model_cache, model_files
from miner.inputs import model_fetch as module
from miner.inputs.messages import ModelDone, ModelOrder, RetryLimits
from miner.inputs.model_cache import ModelCache
from miner.inputs.model_fetch import fetch_model
from tests.doubles.hub import Hub
from tests.miner.inputs.models import WEIGHTS, sharded
from tests.miner.inputs.models import model_files as files_of_a_model

pytestmark = pytest.mark.process


PATIENCE = RetryLimits(tries=3, first_pause=0.001, timeout=60.0)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        hub.add("owner/model", files_of_a_model(**{"pytorch_model.bin": b"pickle", "run.py": b"import os"}))
        yield hub


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "models", 10**9, 0)


def get(hub: Hub, cache: ModelCache, model: str = "owner/model", **more: Any) -> ModelDone:
    fields = {"quota": cache.quota, "patience": PATIENCE, "token": hub.token, **more}
    order = ModelOrder(model=model, endpoint=hub.url, cache=cache.folder, **fields)
    return fetch_model(order, lambda *_: None, lambda _: None)


def failure(hub: Hub, cache: ModelCache, model: str = "owner/model", **more: Any) -> StepFailed:
    with pytest.raises(StepFailed) as caught:
        get(hub, cache, model, **more)
    assert cache.find(model) is None
    return caught.value


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_model_comes_once_with_what_is_needed_and_its_facts(hub: Hub, cache: ModelCache) -> None:
    done = get(hub, cache)
    assert names(done.path) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (done.path / "model.safetensors").read_bytes() == WEIGHTS
    assert done.facts.family is Family.LLAMA
    assert get(hub, cache).path == done.path
    assert len(hub.lines("GET /store")) == 1
    assert len(hub.lines("/api/models")) == 2


def test_shards_come_as_their_index_says(hub: Hub, cache: ModelCache) -> None:
    hub.add("owner/large", {**sharded(), "consolidated.safetensors": WEIGHTS})
    done = get(hub, cache, "owner/large")
    assert names(done.path) == sharded().keys()


def test_a_new_commit_is_fetched_beside_the_old_one(hub: Hub, cache: ModelCache) -> None:
    old = get(hub, cache)
    hub.repo("owner/model").commit({"generation_config.json": b"{}"})
    new = get(hub, cache)
    assert new.path != old.path
    assert names(new.path) - names(old.path) == {"generation_config.json"}


def test_the_caches_copy_stands_in_while_the_hub_is_away(hub: Hub, cache: ModelCache) -> None:
    there = get(hub, cache)
    notes: list[str] = []
    hub.fail(status=500, times=None)
    order = ModelOrder(
        model="owner/model", endpoint=hub.url, cache=cache.folder, quota=10**9, patience=PATIENCE
    )
    assert fetch_model(order, lambda *_: None, notes.append).path == there.path
    assert "the cache's copy of owner/model is used" in notes[0]
    assert failure(hub, cache, "owner/other").reason is EndReason.NETWORK


@pytest.mark.parametrize("where", ["/api/models", "/resolve/", "GET /store"])
@pytest.mark.parametrize("headers", [{}, {"X-Error-Code": "RepoNotFound"}])
def test_a_hub_that_does_not_find_a_model_for_a_moment_is_asked_again(
    hub: Hub, cache: ModelCache, where: str, headers: dict[str, str]
) -> None:
    hub.fail(where, status=404, headers=headers, times=2)
    there = get(hub, cache)
    hub.fail("/api/models", status=404, headers=headers, times=None)
    assert get(hub, cache).path == there.path
    lasting = EndReason.MODEL_MISSING if headers else EndReason.NETWORK
    assert failure(hub, cache, "owner/other").reason is lasting


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"status": 500}, EndReason.NETWORK),
        ({"status": 429, "headers": {"Retry-After": "900"}}, EndReason.RATE_LIMITED),
        ({"cut_after": 0, "how": "reset"}, EndReason.NETWORK),
        ({"corrupt_at": 70_000}, EndReason.NETWORK),
        ({"declared_length": 5}, EndReason.NETWORK),
    ],
)
def test_lasting_trouble_leaves_no_model_and_passes_when_it_is_over(
    hub: Hub, cache: ModelCache, fault: dict[str, Any], reason: EndReason
) -> None:
    hub.fail("GET /store", times=None, **fault)
    assert failure(hub, cache).reason is reason
    hub.faults.clear()
    assert (get(hub, cache).path / "model.safetensors").read_bytes() == WEIGHTS


def test_what_is_there_of_a_model_is_not_fetched_twice(hub: Hub, cache: ModelCache) -> None:
    hub.add("owner/large", sharded(4, 3000))
    last = hub.repo("owner/large").head.files["model-00004-of-00004.safetensors"]
    hub.fail(last.sha256, status=500, times=None)
    failure(hub, cache, "owner/large")
    first = hub.bytes_sent("GET /store")
    hub.faults.clear()
    get(hub, cache, "owner/large")
    assert hub.bytes_sent("GET /store") <= max(first, 4 * last.size) + last.size


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"config.json": b"{}", "tokenizer.json": b"{}", "pytorch_model.bin": b"x"}, "are pickles only"),
        (files_of_a_model(**{"model.safetensors": WEIGHTS[:-5]}), "cut off"),
        (files_of_a_model(**{"config.json": b"[]"}), "not a JSON object"),
    ],
    ids=["pickles", "weights", "config"],
)
def test_what_is_no_model_is_reported_and_not_kept(
    hub: Hub, cache: ModelCache, files: dict[str, bytes], why: str
) -> None:
    hub.add("owner/bad", files)
    failed = failure(hub, cache, "owner/bad")
    assert failed.reason is EndReason.BAD_MODEL
    assert why in str(failed)


def test_room_is_made_before_anything_large_comes(hub: Hub, cache: ModelCache) -> None:
    assert failure(hub, cache, quota=1000).reason is EndReason.DISK_FULL
    assert hub.lines("GET /store") == []
    assert failure(hub, cache, keep_free=1 << 60).reason is EndReason.DISK_FULL


def test_an_image_model_is_a_file_or_a_folder(
    hub: Hub, cache: ModelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(
        "owner/flux", {"flux.safetensors": WEIGHTS, "model_index.json": b"{}", "vae/x.safetensors": WEIGHTS}
    )
    folder = get(hub, cache, "owner/flux", image_type=ImageModelType.FLUX)
    assert names(folder.path) == {"flux.safetensors", "model_index.json", "vae/x.safetensors"}
    cache.prune()
    monkeypatch.setattr(model_files, "SINGLE_FILE_BYTES", 1000)
    file = get(hub, cache, "owner/flux", image_type=ImageModelType.FLUX)
    assert file.path.name == "flux.safetensors"
    assert file.path.read_bytes() == WEIGHTS
    assert get(hub, cache, "owner/flux", image_type=ImageModelType.FLUX).path == file.path
    assert file.facts.family is Family.FLUX


def test_an_operators_own_copy_is_only_looked_at(hub: Hub, cache: ModelCache, tmp_path: Path) -> None:
    for name, content in files_of_a_model().items():
        assert isinstance(content, bytes)
        (tmp_path / name).write_bytes(content)
    assert get(hub, cache, own=tmp_path).path == tmp_path
    assert hub.requests == []


def test_a_file_that_somebody_removes_before_all_is_there_leaves_no_half_model(
    hub: Hub, cache: ModelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = module._ModelFetch._fetch_all

    def robbed(self: module._ModelFetch, listing: Any, selection: Any, folder: Path) -> None:
        fetched(self, listing, selection, folder)
        (folder / "tokenizer.json").unlink()

    with monkeypatch.context() as patch:
        patch.setattr(module._ModelFetch, "_fetch_all", robbed)
        caught = failure(hub, cache)
    assert caught.reason is EndReason.LOST
    assert "tokenizer.json: fetched, and removed from" in str(caught)
    assert names(get(hub, cache).path) == {"config.json", "tokenizer.json", "model.safetensors"}


def test_several_at_once_fetch_it_once(hub: Hub, cache: ModelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cache, "LOCK_RETRY_SECONDS", 0.01)
    hub.fail("GET /store", rate=200_000, times=None)
    done: list[ModelDone] = []
    notes: list[str] = []

    def fetch_one() -> None:
        order = ModelOrder(
            model="owner/model", endpoint=hub.url, cache=cache.folder, quota=10**9, patience=PATIENCE
        )
        done.append(fetch_model(order, lambda *_: None, notes.append))

    threads = [threading.Thread(target=fetch_one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({model.path for model in done}) == 1
    assert len(done) == 4
    assert len(hub.lines("GET /store")) == 1
    assert notes == ["owner/model is being fetched for another job"] * 3


def test_progress_ends_at_the_whole(hub: Hub, cache: ModelCache) -> None:
    reported: list[tuple[int, int | None]] = []
    order = ModelOrder(model="owner/model", endpoint=hub.url, cache=cache.folder, quota=10**9)
    fetch_model(order, lambda did, of: reported.append((did, of)), lambda _: None)
    assert (
        reported[-1][0]
        == reported[-1][1]
        == sum(file.size for name, file in hub.repo("owner/model").head.files.items() if name[0] not in "pr")
    )
