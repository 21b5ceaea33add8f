"""A worker's third task: a sample's lengths in tokens of the model that will be trained.

`tokenizers` is the Rust library below transformers; it reads a model's tokenizer.json and nothing else of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.data import DatasetFacts
from core.data_profile import Sample, facts_of
from miner.jobs.inputs.dataset_fetch import RECORD, SAMPLE, Found
from miner.jobs.inputs.words import MeasureOrder

#: Texts encoded in one call.
BATCH = 256


def measure(order: MeasureOrder) -> DatasetFacts | None:
    """None when the tokenizer is of a kind that can't be read alone; lengths by bytes stand then."""
    from tokenizers import Tokenizer

    found = Found.model_validate_json((order.folder / RECORD).read_bytes())
    sample = Sample.from_json((order.folder / SAMPLE).read_bytes())
    if found.profile is None:
        return None
    try:
        tokenizer = Tokenizer.from_file(str(order.tokenizer))
    except Exception:  # noqa: BLE001 - a plain Exception is what the library raises for a file it can't read
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def count(texts: Sequence[str]) -> list[int]:
        lengths: list[int] = []
        for start in range(0, len(texts), BATCH):
            # Without special tokens: half of them would be counted for texts in the middle of a row.
            batch = tokenizer.encode_batch_fast(list(texts[start : start + BATCH]), add_special_tokens=False)
            lengths += [len(one.ids) for one in batch]
        return lengths

    return facts_of(order.dataset, found.profile, sample, count)
