"""The cache of models, from the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from core.domain.errors import GodMinerError
from miner.cli.models import app
from miner.inputs import worker
from miner.inputs.fetch import JobInputs
from miner.inputs.messages import RetryLimits
from miner.inputs.model_cache import ModelCache
from tests.doubles.hub import Hub
from tests.doubles.own_child import answered_by
from tests.miner.inputs.models import model_files

pytestmark = pytest.mark.process


runner = CliRunner()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        hub.add("owner/model", model_files())
        yield hub


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    cache = ModelCache(tmp_path / "data/models", 10**9, 0)
    for number, model in enumerate(("a/old", "b/new")):
        (cache.partial(model, "c" * 40) / "weights").write_bytes(b"w" * 1000 * (number + 1))
        cache.commit(model, "c" * 40, {})
    (cache.partial("c/begun", "d" * 40) / "weights.part").write_bytes(b"w" * 10)
    cache.leases.hold(7, "b/new")
    return cache


@pytest.fixture
def run(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> Result:
        env = {
            "DATA_DIR": str(tmp_path / "data"),
            "HF_ENDPOINT": hub.url,
            "MIN_FREE_DISK_BYTES": "0",
            "MODEL_CACHE_BYTES": "1GB",
        }
        return runner.invoke(app, list(words), env=env)

    return call


def test_list_shows_what_is_there_and_who_needs_it(cache: ModelCache, run: Any) -> None:
    assert run("prune", "--to", "100").exit_code == 2, "a size needs a unit"
    found = json.loads(run("list", "--json").stdout)
    assert {row["model"]: (row["bytes"], row["jobs"]) for row in found["models"]} == {
        "a/old": (1000, []),
        "b/new": (2000, [7]),
        "c/begun": (10, []),
    }
    assert (found["bytes"], found["quota"]) == (3010, 10**9)
    text = run("list").stdout
    assert "b/new cccccccccc  needed by job 7" in text
    assert "c/begun unfinished" in text
    assert "of 1.0 GB (MODEL_CACHE_BYTES)" in text


def test_prune_removes_what_no_job_needs(cache: ModelCache, run: Any) -> None:
    dry = json.loads(run("prune", "--dry-run", "--json").stdout)
    assert (dry["removed"], [row["model"] for row in dry["models"]]) == (False, ["c/begun", "a/old"])
    assert len(cache.snapshots()) == 2
    assert json.loads(run("prune", "--to", "1GB", "--json").stdout)["models"] == []
    refused = run("prune", "b/new")
    assert "b/new is not in the cache, or a job needs it" in refused.output
    assert "1.0 kB  removed" in run("prune", "a/old").output
    assert "0.0 kB  removed" in run("prune").output
    assert [one.model for one in cache.snapshots()] == ["b/new"]


def test_fetch_brings_a_model_and_says_what_it_is(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = json.loads(run("fetch", "owner/model", "--json").stdout)
    monkeypatch.setattr("miner.inputs.fetch.run_order", answered_by(worker))
    assert Path(found["path"], "config.json").exists()
    assert found["facts"]["architecture"] == "llama"
    assert "llama, in" in run("fetch", "owner/model").output
    # What is not there is asked for again and again: it may have been made a moment ago.
    quick = partial(JobInputs, patience=RetryLimits(tries=2, first_pause=0.01))
    monkeypatch.setattr("miner.inputs.fetch.JobInputs", quick)
    missing = run("fetch", "owner/none")
    assert isinstance(missing.exception, GodMinerError)
    assert "has no model owner/none" in str(missing.exception)
    assert run("fetch", "owner/model", "--image", "sd1").exit_code == 2
