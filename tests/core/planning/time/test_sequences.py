"""Rows into sequences: lengths, dropping, packing, padding."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from core.data.facts import assumed_facts, facts_from_lengths
from core.domain.tasks import ImageModelType, TaskType
from core.models.identify import facts_from_name
from core.planning.time.sequences import (
    BatchShape,
    SequenceOptions,
    image_sequences,
    natural_length,
    sequence_options,
    shorter_lengths,
    text_sequences,
)
from core.profile.targets import Targets
from tests.core.builders import instruct_data

PLAIN = SequenceOptions(packing=False, grouped=False, generations=8, completion=256)


def test_the_natural_length_is_the_99th_percentile_rounded_up() -> None:
    data = assumed_facts(TaskType.INSTRUCT, 1000)
    length = natural_length(data, Targets(), 8192)
    assert data.total.p99 <= length < data.total.p99 + 64
    assert length % 64 == 0
    assert natural_length(data, Targets(), 1024) == 1024, "no longer than the window or the limit"


def test_rows_of_similar_length_are_not_cut() -> None:
    data = instruct_data()  # 70 to 669 tokens, evenly
    assert natural_length(data, Targets(), 8192) >= data.total.max


def test_grpo_takes_prompt_and_completion_as_validators_cut_them() -> None:
    data = assumed_facts(TaskType.GRPO, 1000)
    seq = text_sequences(data, PLAIN, natural_length(data, Targets(), 8192), 1000, BatchShape(8, 64, 1))
    assert (seq.prompt_limit, seq.completion_limit) == (512, 256)
    assert seq.length == 768
    assert seq.per_epoch == 8000
    assert seq.dropped_share == 0


def test_longer_rows_are_dropped_and_counted() -> None:
    data = instruct_data(rows=1000)
    seq = text_sequences(data, PLAIN, 320, 1000, BatchShape(4, 32, 1))
    assert seq.dropped_share == pytest.approx(1 - (320 - 70) / 600, abs=0.02)
    assert seq.per_epoch == round(1000 * (1 - seq.dropped_share))
    assert seq.row_tokens < 320


def test_one_row_beyond_every_limit_leaves_nothing() -> None:
    data = facts_from_lengths(TaskType.INSTRUCT, [100_000], [100_000])
    assert text_sequences(data, PLAIN, 8192, 1, BatchShape(1, 32, 1)).per_epoch == 0


def test_packing_is_chosen_where_it_saves_padding_and_leaves_steps() -> None:
    uneven = assumed_facts(TaskType.INSTRUCT, 50_000)
    options = sequence_options(Targets())
    assert text_sequences(uneven, options, 2240, 50_000, BatchShape(8, 32, 1)).packing
    assert not text_sequences(uneven, options, 2240, 500, BatchShape(8, 32, 1)).packing, (
        "too few steps would be left"
    )
    even = facts_from_lengths(TaskType.INSTRUCT, [100] * 1000, [900 + n % 20 for n in range(1000)])
    assert not text_sequences(even, options, 1024, 50_000, BatchShape(8, 32, 1)).packing, "nothing to save"


def test_a_packed_epoch_holds_the_same_tokens_in_fewer_sequences() -> None:
    data = assumed_facts(TaskType.INSTRUCT, 50_000)
    packed = text_sequences(data, SequenceOptions(True, False, 8, 256), 2240, 50_000, BatchShape(8, 32, 1))
    plain = text_sequences(data, PLAIN, 2240, 50_000, BatchShape(8, 32, 1))
    assert packed.per_epoch * packed.trained == pytest.approx(plain.per_epoch * plain.trained, rel=0.01)
    assert packed.per_epoch * packed.padded < 0.7 * plain.per_epoch * plain.padded


def test_larger_batches_pad_more_unless_rows_are_grouped() -> None:
    data = assumed_facts(TaskType.INSTRUCT, 5000)
    padded = [
        text_sequences(data, PLAIN, 2240, 5000, BatchShape(micro, 32, 1)).padded for micro in (1, 4, 16)
    ]
    assert padded == sorted(padded)
    assert padded[-1] > padded[0]
    grouped = text_sequences(data, SequenceOptions(False, True, 8, 256), 2240, 5000, BatchShape(16, 32, 1))
    assert grouped.padded < padded[0] * 1.1


def test_more_passes_of_a_step_pad_less_for_pairs_of_like_length_pass_together() -> None:
    """Steps of pairs that are drawn from the same distribution gain about as much as a plan says."""
    chance = random.Random(3)
    drawn = [int(chance.lognormvariate(5, 0.8)) + 1 for _ in range(32_000)]
    data = facts_from_lengths(TaskType.DPO, [1] * len(drawn), [length - 1 for length in drawn])
    pairs = [max(drawn[at : at + 2]) for at in range(0, len(drawn), 2)]

    def planned(passes: int) -> float:
        return text_sequences(data, PLAIN, 8192, len(pairs), BatchShape(4, 4 * passes, passes)).padded

    def drawn_width(passes: int) -> float:
        each = 4 * passes
        steps = [sorted(pairs[start : start + each]) for start in range(0, len(pairs), each)]
        return fmean(step[place] for step in steps for place in range(3, each, 4))

    for passes in (2, 4):
        gain = drawn_width(passes) / drawn_width(1)
        assert gain < 0.9
        assert planned(passes) / planned(1) == pytest.approx(gain, rel=0.08)
    assert planned(16) == planned(4), "no more is looked at"


def test_a_pair_is_two_sequences() -> None:
    data = assumed_facts(TaskType.DPO, 1000)
    seq = text_sequences(data, PLAIN, 1856, 1000, BatchShape(4, 32, 1))
    assert seq.sides == 2
    assert seq.padded > seq.row_tokens * 1.9
    assert not seq.packing


def test_fallback_lengths_decrease_to_the_limit() -> None:
    data = assumed_facts(TaskType.INSTRUCT, 1000)
    lengths = shorter_lengths(data, 4096, 512)
    assert lengths == sorted(lengths, reverse=True)
    assert all(512 <= length < 4096 for length in lengths)
    assert shorter_lengths(data, 512, 512) == []


def test_images_count_with_their_repeats() -> None:
    model = facts_from_name("x", None, ImageModelType.SDXL)
    seq = image_sequences(assumed_facts(TaskType.IMAGE, 20, image_type=ImageModelType.SDXL), model, 1024, 10)
    assert (seq.per_epoch, seq.images) == (200, True)
