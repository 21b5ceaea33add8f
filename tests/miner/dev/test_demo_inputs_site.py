"""The web site for trials."""

from __future__ import annotations

import httpx
import pytest

from miner.dev.demo_inputs import LoopbackSite

pytestmark = pytest.mark.process


def test_a_file_is_answered_with_its_length_and_anything_else_with_404() -> None:
    with LoopbackSite() as site:
        url = site.add_file("/rows.json", b"[]")
        reply = httpx.get(url, params={"X-Amz-Signature": "x"})
        assert (reply.status_code, reply.content, reply.headers["content-length"]) == (200, b"[]", "2")
        assert httpx.head(url).headers["content-length"] == "2"
        assert httpx.get(f"{site.url}/other").status_code == 404


def test_a_model_is_listed_and_its_files_are_found_at_the_commit_that_is_named() -> None:
    with LoopbackSite() as site:
        site.add_model("a/b", {"config.json": b"{}"})
        info = httpx.get(f"{site.url}/api/models/a/b").json()
        assert [(one["rfilename"], one["size"]) for one in info["siblings"]] == [("config.json", 2)]
        # git hash-object of these two bytes
        assert info["siblings"][0]["blobId"] == "9e26dfeeb6e641a33dae4961196235bdb965b21b"
        assert httpx.get(f"{site.url}/a/b/resolve/{info['sha']}/config.json").content == b"{}"
