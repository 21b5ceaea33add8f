"""Rows as sequences: the length to train at, what is dropped, packing, and the tokens of an epoch."""

from __future__ import annotations

import math
from statistics import fmean
from typing import NamedTuple

from core.data.facts import DatasetFacts, LengthStats
from core.models.facts import ModelFacts
from core.planning.candidate import image_tokens
from core.planning.time.speed import PassWork
from core.profile.targets import Targets

#: The filled part of a packed sequence; first-fit-decreasing over thousands of rows leaves little empty.
PACKED_FULL = 0.96
#: Packing must save this much padding to be worth its different batches.
PACKING_GAIN = 1.15
#: And leave so many steps per epoch: a few huge steps train worse than many padded ones.
PACKED_STEPS = 20
#: The micro batch for that decision, so that it does not flip while the search varies the micro batch.
USUAL_MICRO = 8
#: A step of more passes pads a little less than one of so many, which a plan looks at.
MOST_PASSES = 4
#: The shortest length chosen from the data alone; lengths are multiples of the grain.
SHORTEST_LENGTH, GRAIN = 128, 64
#: Validators keep the last so many tokens of a GRPO prompt.
GRPO_PROMPT = 512
#: Percentiles at which a length may be cut when memory asks for it, longest first.
CUTS: tuple[float, ...] = (99, 95, 90, 80, 70, 60, 50)


class SequenceOptions(NamedTuple):
    """Options of making sequences, by the profile or by an earlier plan."""

    #: None: packed where it saves time.
    packing: bool | None
    grouped: bool
    #: GRPO: completions per prompt, tokens of each at most.
    generations: int
    completion: int


def sequence_options(targets: Targets) -> SequenceOptions:
    return SequenceOptions(
        targets.sample_packing, targets.group_by_length, targets.grpo_generations, targets.grpo_max_completion
    )


class Sequences(NamedTuple):
    """Text or images as the GPUs see them in one epoch."""

    length: int
    #: Rows that are trained on, and their average tokens without padding.
    rows: float
    row_tokens: float
    #: Sequences (pairs, completions, images) of one epoch.
    per_epoch: int
    #: Tokens of one sequence, padding included, and without; images count as one.
    padded: float
    trained: float
    packing: bool = False
    dropped_share: float = 0.0
    prompt_limit: int | None = None
    completion_limit: int | None = None
    #: How many model sequences one counted sequence is: 2 for a pair, else 1.
    sides: int = 1
    images: bool = False

    def work(self, micro: int) -> PassWork:
        return PassWork(tokens=micro * self.padded, row_tokens=self.row_tokens)


def natural_length(data: DatasetFacts, targets: Targets, most: int) -> int:
    """The 99th percentile of the data, rounded up; the longest row if that is not much longer, or if the rows
    were made for this training."""
    if data.task_type.generates:
        return min(prompt_limit(data) + targets.grpo_max_completion, most)
    wanted: float = data.total.p99
    if data.task_type.makes_rows or data.total.max <= 1.2 * max(data.total.p99, 1):
        wanted = data.total.max
    return max(min(max(_rounded(wanted), SHORTEST_LENGTH), most), 1)


def prompt_limit(data: DatasetFacts) -> int:
    return min(GRPO_PROMPT, max(_rounded(data.prompt.max), GRAIN))


def _rounded(tokens: float) -> int:
    return math.ceil(max(tokens, 1) / GRAIN) * GRAIN


def shorter_lengths(data: DatasetFacts, length: int, least: int) -> list[int]:
    """Lengths to fall back to, longest first: percentiles of the data, then halves, never below `least`."""
    lengths = [_rounded(data.total.percentile(percent)) for percent in CUTS]
    half = length // 2
    while half >= least:
        lengths.append(half)
        half //= 2
    return sorted({shorter for shorter in lengths if least <= shorter < length}, reverse=True)


def image_sequences(data: DatasetFacts, model: ModelFacts, resolution: int, repeats: int) -> Sequences:
    assert model.image is not None
    return Sequences(
        length=image_tokens(model.image, resolution),
        rows=data.rows,
        row_tokens=1.0,
        per_epoch=data.rows * repeats,
        padded=1.0,
        trained=1.0,
        images=True,
    )


class BatchShape(NamedTuple):
    """Rows of a pass and of a step; the passes that a step's rows are shared out to by length."""

    micro: int
    effective: int
    passes: int


def text_sequences(
    data: DatasetFacts, options: SequenceOptions, length: int, rows: float, batch: BatchShape
) -> Sequences:
    """Make one epoch at this length. Padding depends on the passes of the batch, the steps that packing
    leaves on its size."""
    if data.task_type.generates:
        return _grpo(data, options, length, rows)
    if data.task_type.has_pairs:
        return _pairs(data, options, length, rows, batch)
    dropped = data.total.share_over(length)
    trained_rows, mean = rows * (1 - dropped), data.total.mean_kept(length)
    padded = _padded(data.total, length, batch.micro, batch.passes, options.grouped, mean)
    usual = _padded(data.total, length, USUAL_MICRO, 1, options.grouped, mean)
    packed = trained_rows * mean / (length * PACKED_FULL)
    packing = _packs(options, packed, usual / max(mean, 1), batch.effective)
    if packing:
        count = math.ceil(packed) if trained_rows else 0
        padded, trained = float(length), PACKED_FULL * length
    else:
        count, trained = round(trained_rows), mean
    return Sequences(
        length=length,
        packing=packing,
        rows=trained_rows,
        row_tokens=mean,
        dropped_share=dropped,
        per_epoch=count,
        padded=max(padded, 1.0),
        trained=trained,
    )


def _packs(options: SequenceOptions, packed: float, gain: float, effective: int) -> bool:
    if options.packing is not None:
        return options.packing
    return gain >= PACKING_GAIN and packed / effective >= PACKED_STEPS


def _padded(stats: LengthStats, length: int, micro: int, passes: int, grouped: bool, mean: float) -> float:
    """Tokens of a row in a pass as long as its longest one. Of a step's n rows, ordered by length, the k-th
    is about as long as k in n + 1 of all rows, longer where lengths have a long tail; each pass takes the
    next `micro`. `mean` is of the rows that are not dropped."""
    if grouped:
        return min(mean * 1.05, length)
    kept = 100 * (1 - stats.share_over(length))
    looked_at = min(passes, MOST_PASSES)
    each = micro / (micro * looked_at + 1)
    longest = fmean(stats.percentile(kept * each * number) for number in range(1, looked_at + 1))
    return min(max(longest, mean), length)


def _pairs(
    data: DatasetFacts, options: SequenceOptions, length: int, rows: float, batch: BatchShape
) -> Sequences:
    """Pad chosen and rejected to one length; they pass together."""
    dropped, mean = data.total.share_over(length), data.total.mean_kept(length)
    rows *= 1 - dropped
    padded = _padded(data.total, length, 2 * batch.micro, batch.passes, options.grouped, mean)
    answers = data.answer.mean + (data.rejected.mean if data.rejected else data.answer.mean)
    trained = min(2 * data.prompt.mean + answers, 2.0 * length)
    return Sequences(
        length=length,
        rows=rows,
        row_tokens=mean,
        dropped_share=dropped,
        per_epoch=round(rows),
        padded=max(2 * padded, 1.0),
        trained=trained,
        sides=2,
    )


def _grpo(data: DatasetFacts, options: SequenceOptions, length: int, rows: float) -> Sequences:
    """Every prompt is answered `generations` times; nothing is dropped, prompts are cut from the left."""
    completion = min(options.completion, max(length - GRAIN, 1))
    prompt = max(min(prompt_limit(data), length - completion), 1)
    mean = data.prompt.mean_cut(prompt) + completion
    return Sequences(
        length=prompt + completion,
        rows=rows,
        row_tokens=mean,
        prompt_limit=prompt,
        completion_limit=completion,
        per_epoch=math.floor(rows) * options.generations,
        padded=float(min(data.prompt.percentile(90), prompt) + completion),
        trained=mean,
    )
