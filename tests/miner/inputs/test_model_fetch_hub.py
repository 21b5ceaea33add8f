"""Single files of a model from the hub, by the real client, against every fault."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from core.domain.job_states import EndReason, StepFailed
from miner.inputs.model_fetch import HubClient, ModelListing, git_blob_hash
from miner.inputs.model_files import HubFile
from miner.inputs.part_files import DiskReserve, FetchRetries
from tests.doubles.flaky import Request
from tests.doubles.hub import Hub

pytestmark = pytest.mark.process


WEIGHTS = bytes(range(251)) * 12_000
CONFIG = b'{"model_type": "llama"}'


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        hub.add("owner/model", {"config.json": CONFIG, "model.safetensors": WEIGHTS})
        yield hub


def listing_of(hub: Hub, model: str = "owner/model", token: str | None = None) -> ModelListing:
    return HubClient(hub.url, token).listing(model)


def reason(hub: Hub, model: str, token: str | None = None) -> tuple[EndReason, str]:
    with pytest.raises(StepFailed) as caught:
        listing_of(hub, model, token)
    return caught.value.reason, str(caught.value)


def fetch(
    hub: Hub, target: Path, name: str = "model.safetensors", tries: int = 4, timeout: float = 30.0
) -> None:
    client = HubClient(hub.url, hub.token, timeout)
    listing = client.listing("owner/model")
    file = next(file for file in listing.files if file.path == name)
    client.fetch(listing, file, target, DiskReserve(), FetchRetries(tries, pause=lambda _seconds: None))


def stored_requests(hub: Hub) -> list[Request]:
    return [request for request in hub.requests if request.line.startswith("GET /store")]


def test_a_listing_has_names_sizes_and_hashes(hub: Hub) -> None:
    listing = listing_of(hub)
    commit = hub.repo("owner/model").head
    assert listing.commit == commit.sha
    config, weights = listing.files
    assert config == HubFile("config.json", len(CONFIG), None, git_blob_hash(CONFIG))
    assert (weights.size, weights.sha256) == (len(WEIGHTS), commit.files["model.safetensors"].sha256)


@pytest.mark.parametrize("sha", ["../../etc", "a/b", ""])
def test_a_commit_that_could_climb_out_of_the_cache_is_none(hub: Hub, sha: str) -> None:
    repo = hub.repo("owner/model")
    repo.commits[-1] = replace(repo.commits[-1], sha=sha)
    assert reason(hub, "owner/model")[0] is EndReason.NETWORK


def test_what_the_hub_will_not_give_is_distinguished(hub: Hub) -> None:
    hub.add("owner/private", {}, private=True)
    hub.add("owner/disabled", {}, disabled=True)
    for model, token in (
        ("owner/nothing", None),
        ("owner/private", hub.token),
        ("owner/disabled", None),
        ("a/../b", None),
    ):
        assert reason(hub, model, token)[0] is EndReason.MODEL_MISSING
    assert "HF_TOKEN may not see it" in reason(hub, "owner/private")[1]
    for fault, expected in (
        ({"status": 403}, EndReason.MODEL_GATED),
        ({"status": 500}, EndReason.NETWORK),
        ({"no_reply": True}, EndReason.NETWORK),
    ):
        hub.fail(**fault)
        assert reason(hub, "owner/model")[0] is expected
    with pytest.raises(StepFailed) as caught:
        HubClient("http://127.0.0.1:9", None).listing("a/b")
    assert caught.value.reason is EndReason.NETWORK


@pytest.mark.parametrize(
    ("headers", "pause"),
    [
        ({"Retry-After": "30"}, 30.0),
        ({"RateLimit": '"api";r=0;t=55', "Retry-After": "5"}, 55.0),
        ({}, None),
        ({"Retry-After": "soon"}, None),
    ],
)
def test_a_limit_comes_with_the_pause_that_is_requested(
    hub: Hub, headers: dict[str, str], pause: float | None
) -> None:
    hub.fail(status=429, headers=headers)
    with pytest.raises(StepFailed) as caught:
        listing_of(hub)
    assert (caught.value.reason, caught.value.retry_after) == (EndReason.RATE_LIMITED, pause)


def test_a_gated_model_says_what_to_do_with_which_token(hub: Hub, tmp_path: Path) -> None:
    repo = hub.add("owner/model", {"config.json": CONFIG, "model.safetensors": WEIGHTS}, gated="auto")
    for token, way_out in ((None, "set HF_TOKEN"), (hub.token, "accept its terms on its page")):
        client = HubClient(hub.url, token)
        listing = client.listing("owner/model")
        with pytest.raises(StepFailed) as caught:
            client.fetch(listing, listing.files[0], tmp_path / "a", DiskReserve(), FetchRetries())
        assert caught.value.reason is EndReason.MODEL_GATED
        assert way_out in str(caught.value)
    repo.members.add("tester")
    fetch(hub, tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == WEIGHTS


def test_a_token_that_the_hub_does_not_know_keeps_us_from_nothing_public(hub: Hub, tmp_path: Path) -> None:
    client = HubClient(hub.url, "hf_" + "x" * 34)
    with pytest.raises(StepFailed) as caught:
        client.listing("owner/model")
    assert caught.value.reason is EndReason.NETWORK
    listing = client.listing("owner/model")
    assert client.token_refused
    client.fetch(listing, listing.files[0], tmp_path / "a", DiskReserve(), FetchRetries())
    assert (tmp_path / "a").exists()


@pytest.mark.parametrize("how", ["reset", "close", "hang"])
def test_what_breaks_off_is_resumed(hub: Hub, tmp_path: Path, how: str) -> None:
    hub.fail("GET /store", cut_after=2_000_000, how=how)
    hub.fail("GET /store", cut_after=900_000, how="close")
    fetch(hub, tmp_path / "a", tries=9, timeout=3.0 if how == "hang" else 30.0)
    assert (tmp_path / "a").read_bytes() == WEIGHTS
    requests = stored_requests(hub)
    # Where silence is what breaks it off, a slow machine may be silent once more.
    assert len(requests) == 3 or (how == "hang" and len(requests) > 3)
    assert any("range" in request.headers for request in requests)
    assert not any("authorization" in request.headers for request in requests)


def test_a_later_process_goes_on_where_an_earlier_one_stopped(hub: Hub, tmp_path: Path) -> None:
    hub.fail("GET /store", cut_after=2_500_000, how="close")
    hub.fail("GET /store", status=503, times=2)
    with pytest.raises(StepFailed) as caught:
        fetch(hub, tmp_path / "a", tries=2)
    assert caught.value.reason is EndReason.NETWORK
    assert not (tmp_path / "a").exists()
    fetch(hub, tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == WEIGHTS
    assert stored_requests(hub)[-1].headers["range"]
    assert hub.bytes_sent("GET /store") < 1.5 * len(WEIGHTS)


def test_a_damaged_file_is_fetched_anew_and_never_kept(hub: Hub, tmp_path: Path) -> None:
    hub.fail("GET /store", corrupt_at=1_000_000)
    fetch(hub, tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == WEIGHTS
    (tmp_path / "a").unlink()
    hub.fail("GET /store", corrupt_at=1_000_000, times=None)
    with pytest.raises(StepFailed, match="its hash is not"):
        fetch(hub, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    hub.faults.clear()
    hub.fail("GET /owner/model/resolve", corrupt_at=3)
    fetch(hub, tmp_path / "b", "config.json")
    assert (tmp_path / "b").read_bytes() == CONFIG


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"corrupt_at": 10}, {}),
        ({}, {"declared_length": 99}),
        ({}, {"declared_length": 9_999_999}),
        ({}, {"ignore_range": True}),
    ],
    ids=["damaged before", "too short", "too long", "range ignored"],
)
def test_wrong_bytes_and_lengths_around_a_break_are_survived(
    hub: Hub, tmp_path: Path, first: dict[str, int], then: dict[str, int]
) -> None:
    hub.fail("GET /store", cut_after=1_500_000, how="close", **first)
    if then:
        hub.fail("GET /store", **then)
    fetch(hub, tmp_path / "a", tries=6)
    assert (tmp_path / "a").read_bytes() == WEIGHTS


def test_a_signed_address_that_ran_out_is_asked_for_anew(hub: Hub, tmp_path: Path) -> None:
    hub.fail("GET /store", status=403, times=2)
    fetch(hub, tmp_path / "a")
    assert len(hub.lines("HEAD")) == 3


def test_the_stores_own_limit_is_a_limit(hub: Hub, tmp_path: Path) -> None:
    hub.fail("GET /store", status=429, headers={"Retry-After": "600"}, times=None)
    with pytest.raises(StepFailed) as caught:
        fetch(hub, tmp_path / "a")
    assert (caught.value.reason, caught.value.retry_after) == (EndReason.RATE_LIMITED, 600.0)
    assert "Signature" not in str(caught.value)


def test_a_file_that_is_there_is_not_fetched(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"there")
    fetch(hub, tmp_path / "a")
    assert hub.lines("GET /store") == []


def test_others_stop_when_they_are_asked_to_and_keep_what_they_have(hub: Hub, tmp_path: Path) -> None:
    client = HubClient(hub.url, hub.token)
    listing = client.listing("owner/model")
    client.stop.set()
    with pytest.raises(StepFailed):
        client.fetch(listing, listing.files[1], tmp_path / "a", DiskReserve(), FetchRetries())
    assert not (tmp_path / "a").exists()
