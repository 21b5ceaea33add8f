"""Lengths in the model's own tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.facts import Confidence
from core.tasks import InstructDataset
from miner.jobs.inputs.dataset_fetch import fetch_dataset
from miner.jobs.inputs.measure import measure
from miner.jobs.inputs.words import DatasetOrder, MeasureOrder
from tests.miner.jobs.inputs.models import TOKENIZER

DATASET = InstructDataset(field_instruction="q", field_output="a")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    own = tmp_path / "own.json"
    own.write_text(json.dumps([{"q": "word " * n, "a": "three little words"} for n in range(1, 101)]))
    order = DatasetOrder(folder=tmp_path / "inputs", file=own, dataset=DATASET, max_bytes=10**7)
    fetch_dataset(order, lambda *_: None, lambda _: None)
    return tmp_path / "inputs"


def test_the_sample_is_counted_by_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    order = MeasureOrder(folder=folder, tokenizer=tmp_path / "tokenizer.json", dataset=DATASET)
    facts = measure(order)
    assert facts is not None
    assert (facts.prompt.max, facts.answer.p50, facts.total.max) == (100, 3, 103)
    assert (facts.rows, facts.lengths_confidence) == (100, Confidence.CONFIG)


@pytest.mark.parametrize("text", ["", "{}", "[", '{"model": {"type": "Unheard"}}'])
def test_a_tokenizer_that_can_not_be_read_alone_measures_nothing(
    folder: Path, tmp_path: Path, text: str
) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    order = MeasureOrder(folder=folder, tokenizer=tmp_path / "tokenizer.json", dataset=DATASET)
    assert measure(order) is None
