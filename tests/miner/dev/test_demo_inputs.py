"""The little model and its task."""

from __future__ import annotations

import json
from pathlib import Path

from core.models.identify import facts_from_config
from core.submission.safetensors import read_header
from miner.dev import demo_inputs


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
