"""The little model and its task."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from core.models.identify import facts_from_config
from core.submission.safetensors import read_header
from miner.dev import demo_inputs
from miner.dev.demo_inputs import LoopbackSite


def test_the_weights_are_as_many_as_the_offer_says_and_fit_the_config(tmp_path: Path) -> None:
    files = demo_inputs.model_files()
    path = tmp_path / "model.safetensors"
    path.write_bytes(files["model.safetensors"])
    with path.open("rb") as file:
        header = read_header(file)
    counted = sum(tensor.count for tensor in header.tensors.values())
    assert counted == demo_inputs.model_params() >= 10**6
    facts = facts_from_config(json.loads(files["config.json"]), demo_inputs.MODEL_ID, counted)
    assert facts.params_total == counted


def test_the_tokenizer_has_a_sign_for_every_byte() -> None:
    vocabulary = json.loads(demo_inputs.model_files()["tokenizer.json"])["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(259))
    assert vocabulary["Ġ"] == 3 + ord(" ")
    assert vocabulary["a"] == 3 + ord("a")


def test_a_seed_names_a_model_and_rows_of_words_and_the_same_backwards() -> None:
    for make in (demo_inputs.model_files, lambda seed: demo_inputs.training_rows(5, seed)):
        assert make(1) == make(1) != make(2)
    for row in json.loads(demo_inputs.training_rows(20)):
        asked = row["instruct"].removeprefix("Backwards: ").rstrip(". ")
        assert row["output"].split() == asked.split()[::-1]


@pytest.mark.process
def test_a_file_is_answered_with_its_length_and_anything_else_with_404() -> None:
    with LoopbackSite() as site:
        url = site.add_file("/rows.json", b"[]")
        reply = httpx.get(url, params={"X-Amz-Signature": "x"})
        assert (reply.status_code, reply.content, reply.headers["content-length"]) == (200, b"[]", "2")
        assert httpx.head(url).headers["content-length"] == "2"
        assert httpx.get(f"{site.url}/other").status_code == 404


@pytest.mark.process
def test_a_model_is_listed_and_its_files_are_found_at_the_commit_that_is_named() -> None:
    with LoopbackSite() as site:
        site.add_model("a/b", {"config.json": b"{}"})
        info = httpx.get(f"{site.url}/api/models/a/b").json()
        assert [(one["rfilename"], one["size"]) for one in info["siblings"]] == [("config.json", 2)]
        # git hash-object of these two bytes
        assert info["siblings"][0]["blobId"] == "9e26dfeeb6e641a33dae4961196235bdb965b21b"
        assert httpx.get(f"{site.url}/a/b/resolve/{info['sha']}/config.json").content == b"{}"
