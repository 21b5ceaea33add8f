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


def test_the_same_seed_makes_the_same_model_and_rows() -> None:
    assert demo_inputs.model_files(1) == demo_inputs.model_files(1) != demo_inputs.model_files(2)
    assert (
        demo_inputs.training_rows(5, 1) == demo_inputs.training_rows(5, 1) != demo_inputs.training_rows(5, 2)
    )


def test_rows_are_words_and_the_same_backwards() -> None:
    for row in json.loads(demo_inputs.training_rows(20)):
        asked = row["instruct"].removeprefix("Backwards: ").rstrip(". ")
        assert row["output"].split() == asked.split()[::-1]
