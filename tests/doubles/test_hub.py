"""The stand-in hub, asked by the real client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from huggingface_hub import HfApi, RepoFile, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tests.doubles.hub import Hub

WEIGHTS = bytes(range(256)) * 1000
FILES: dict[str, bytes | Path] = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": WEIGHTS,
    "unet/diffusion.safetensors": WEIGHTS[::-1],
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(page=2) as hub:
        hub.add("owner/model", FILES)
        yield hub


def test_a_snapshot_by_the_real_client_is_whole_and_the_token_never_reaches_the_store(
    hub: Hub, tmp_path: Path
) -> None:
    found = snapshot_download("owner/model", endpoint=hub.url, local_dir=tmp_path, token=hub.token)
    assert {name: Path(found, name).read_bytes() for name in FILES} == FILES
    stored = [request for request in hub.requests if request.path.startswith("/store/")]
    assert len(stored) == 2
    assert not any("authorization" in request.headers for request in stored)


def test_the_tree_comes_in_pages_with_sizes_and_hashes(hub: Hub) -> None:
    tree = list(HfApi(hub.url).list_repo_tree("owner/model", recursive=True))
    files = {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}
    assert files.keys() == FILES.keys()
    assert (
        files["model.safetensors"].lfs.sha256
        == hub.repo("owner/model").head.files["model.safetensors"].sha256
    )
    assert files["config.json"].lfs is None
    assert len(hub.lines("/tree/")) == 2


def test_info_and_whoami_are_as_the_client_reads_them(hub: Hub) -> None:
    api = HfApi(hub.url, token=hub.token)
    info = api.model_info("owner/model", files_metadata=True)
    assert info.sha == hub.repo("owner/model").head.sha
    assert {one.rfilename: one.size for one in info.siblings or []} == {k: len(v) for k, v in FILES.items()}  # type: ignore[arg-type]
    assert api.whoami()["name"] == "tester"


def test_what_may_not_be_read_is_told_apart(hub: Hub, tmp_path: Path) -> None:
    hub.add("owner/gated", FILES, gated="manual")
    hub.add("owner/private", FILES, private=True)
    hub.add("owner/member", FILES, gated="auto", private=True, members={"tester"})

    def get(repo: str, token: str | bool = False, revision: str | None = None) -> str:
        return hf_hub_download(
            repo, "config.json", endpoint=hub.url, cache_dir=tmp_path, token=token, revision=revision
        )

    with pytest.raises(GatedRepoError):
        get("owner/gated", hub.token)
    with pytest.raises(RepositoryNotFoundError):
        get("owner/private", hub.token)
    with pytest.raises(RepositoryNotFoundError):
        get("owner/nothing", hub.token)
    with pytest.raises(RevisionNotFoundError):
        get("owner/model", revision="nope")
    with pytest.raises(HfHubHTTPError, match="Invalid credentials"):
        HfApi(hub.url, token="hf_" + "w" * 34).model_info("owner/model")
    assert Path(get("owner/member", hub.token)).exists()


def test_faults_hit_the_requests_they_were_ordered_for(hub: Hub, tmp_path: Path) -> None:
    pieces = 10 * 1024**2  # as the client writes them; what is less is lost with the connection
    hub.add("owner/large", {"model.safetensors": b"7" * (pieces + 5)})
    hub.fail("GET /store", cut_after=pieces + 1, how="close", times=1)
    found = hf_hub_download("owner/large", "model.safetensors", endpoint=hub.url, local_dir=tmp_path)
    assert Path(found).read_bytes() == b"7" * (pieces + 5)
    ranges = [
        request.headers.get("range") for request in hub.requests if request.line.startswith("GET /store")
    ]
    assert ranges == [None, f"bytes={pieces}-"]


@pytest.mark.parametrize("how", ["reset", "close", "hang"])
def test_a_connection_can_break_in_three_ways(hub: Hub, how: str) -> None:
    hub.fail("config", cut_after=3, how=how)
    url = f"{hub.url}/owner/model/resolve/main/config.json"
    with pytest.raises(httpx.TransportError):
        httpx.get(url, timeout=2)
    assert httpx.get(url, timeout=60).content == FILES["config.json"]


def test_lengths_bytes_and_status_can_be_wrong(hub: Hub) -> None:
    url = f"{hub.url}/owner/model/resolve/main/config.json"
    whole = FILES["config.json"]
    assert isinstance(whole, bytes)
    hub.fail(status=429, headers={"Retry-After": "7"})
    refused = httpx.get(url)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "7")
    hub.fail(declared_length=5)
    assert httpx.get(url).content == whole[:5]
    hub.fail(corrupt_at=2)
    assert httpx.get(url).content == whole[:2] + bytes([whole[2] ^ 0xFF]) + whole[3:]
    hub.fail(no_length=True)
    plain = httpx.get(url)
    assert plain.content == whole
    assert "content-length" not in plain.headers
    hub.fail(no_reply=True)
    with pytest.raises(httpx.TransportError):
        httpx.get(url)


def test_ranges_are_honoured_only_for_the_same_file_unless_told_otherwise(hub: Hub) -> None:
    url = f"{hub.url}/owner/model/resolve/main/config.json"
    whole = FILES["config.json"]
    assert isinstance(whole, bytes)
    etag = httpx.head(url).headers["etag"]
    part = httpx.get(url, headers={"Range": "bytes=3-5", "If-Range": etag})
    assert (part.status_code, part.content) == (206, whole[3:6])
    assert part.headers["content-range"] == f"bytes 3-5/{len(whole)}"
    assert httpx.get(url, headers={"Range": "bytes=3-5", "If-Range": '"other"'}).content == whole
    hub.fail(ignore_range=True)
    assert httpx.get(url, headers={"Range": "bytes=3-5"}).content == whole
    assert httpx.get(url, headers={"Range": "bytes=999-"}).status_code == 416
