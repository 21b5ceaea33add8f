"""The little model and its task."""

from __future__ import annotations

import json
from pathlib import Path

from core.model_facts import facts_from_config
from core.submission.safetensors import read_header
from miner.dev import little


def test_the_weights_are_as_many_as_the_offer_says_and_fit_the_config(tmp_path: Path) -> None:
    files = little.model_files()
    path = tmp_path / "model.safetensors"
    path.write_bytes(files["model.safetensors"])
    with path.open("rb") as file:
        header = read_header(file)
    counted = sum(tensor.count for tensor in header.tensors.values())
    assert counted == little.params() >= 10**6
    facts = facts_from_config(json.loads(files["config.json"]), little.MODEL_ID, counted)
    assert facts.params_total == counted


def test_the_tokenizer_has_a_sign_for_every_byte() -> None:
    vocabulary = json.loads(little.model_files()["tokenizer.json"])["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(259))
    assert vocabulary["Ġ"] == 3 + ord(" ")
    assert vocabulary["a"] == 3 + ord("a")


def test_the_same_seed_makes_the_same_model_and_rows() -> None:
    assert little.model_files(1) == little.model_files(1) != little.model_files(2)
    assert little.rows(5, 1) == little.rows(5, 1) != little.rows(5, 2)


def test_rows_are_words_and_the_same_backwards() -> None:
    for row in json.loads(little.rows(20)):
        asked = row["instruct"].removeprefix("Backwards: ").rstrip(". ")
        assert row["output"].split() == asked.split()[::-1]
