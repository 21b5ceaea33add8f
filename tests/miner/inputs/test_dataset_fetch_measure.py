"""Lengths in the model's own tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.domain.records import Confidence
from core.domain.tasks import InstructDataset
from miner.inputs.dataset_fetch import fetch_dataset, measure_lengths
from miner.inputs.messages import DatasetOrder, MeasureOrder
from tests.miner.inputs.models import TOKENIZER

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
    facts = measure_lengths(order)
    assert facts is not None
    assert (facts.prompt.max, facts.answer.percentile(50), facts.total.max) == (100, 3, 103)
    assert (facts.rows, facts.lengths_confidence) == (100, Confidence.CONFIG)


@pytest.mark.parametrize("text", ["", "{}", "[", '{"model": {"type": "Unheard"}}'])
def test_a_tokenizer_that_cannot_be_read_alone_measures_nothing(
    folder: Path, tmp_path: Path, text: str
) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    order = MeasureOrder(folder=folder, tokenizer=tmp_path / "tokenizer.json", dataset=DATASET)
    assert measure_lengths(order) is None
