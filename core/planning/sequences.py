"""How rows become sequences: the length to train at, what is dropped, packing, and the tokens of an epoch."""

from __future__ import annotations

import math
from typing import NamedTuple

from core.data import DatasetFacts, LengthStats
from core.models import ModelFacts
from core.planning.setup import tokens_of_picture
from core.planning.speed import Work
from core.profile.targets import Limits, Targets
from core.tasks import TaskType

#: How full packing makes a sequence; first-fit-decreasing over thousands of rows leaves little.
PACKED_FULL = 0.96
#: Packing must save this much padding to be worth its different batches.
PACKING_GAIN = 1.15
#: And leave so many steps per epoch: a few huge steps train worse than many padded ones.
PACKED_STEPS = 20
#: The batch for which that is judged, so that the choice does not flip while the micro batch is searched.
USUAL_MICRO = 8
#: The shortest sequence that the data may lead to by itself, and the grain of lengths.
SHORTEST, GRAIN = 128, 64
#: Validators keep the last so many tokens of a GRPO prompt.
GRPO_PROMPT = 512
#: Percentiles at which a length may be cut when memory asks for it, longest first.
CUTS: tuple[float, ...] = (99, 95, 90, 80, 70, 60, 50)


class How(NamedTuple):
    """What the profile says about making sequences."""

    #: None: packed where it saves time.
    packing: bool | None
    grouped: bool
    #: GRPO: completions per prompt, tokens of each at most.
    generations: int
    completion: int


def how_of(targets: Targets) -> How:
    return How(
        targets.sample_packing, targets.group_by_length, targets.grpo_generations, targets.grpo_max_completion
    )


class Sequences(NamedTuple):
    """Text or pictures as the GPUs see them in one epoch."""

    length: int
    packing: bool
    #: Rows that take part, and their tokens on average, padding left out.
    rows: float
    row_tokens: float
    dropped_share: float
    prompt_limit: int | None
    completion_limit: int | None
    #: Sequences (pairs, completions, pictures) of one epoch.
    per_epoch: int
    #: Tokens of one sequence, padding included, and without; pictures count as one.
    padded: float
    trained: float
    #: How many model sequences one counted sequence is: 2 for a pair, else 1.
    sides: int
    pictures: bool = False

    def work(self, micro: int) -> Work:
        return Work(tokens=micro * self.padded, row_tokens=self.row_tokens)


def longest(data: DatasetFacts, model: ModelFacts, limits: Limits) -> int:
    """No sequence is longer than the model's window or the profile's limit."""
    return max(min(model.max_position, limits.max_sequence_len), 1)


def natural_length(data: DatasetFacts, targets: Targets, most: int) -> int:
    """The 99th percentile of the data, rounded up; the whole range where the rest is not much longer."""
    if data.task_type is TaskType.GRPO:
        return min(prompt_limit(data) + targets.grpo_max_completion, most)
    wanted: float = data.total.p99
    if data.total.max <= 1.2 * max(data.total.p99, 1):
        wanted = data.total.max
    return max(min(max(_rounded(wanted), SHORTEST), most), 1)


def prompt_limit(data: DatasetFacts) -> int:
    return min(GRPO_PROMPT, max(_rounded(data.prompt.max), GRAIN))


def _rounded(tokens: float) -> int:
    return math.ceil(max(tokens, 1) / GRAIN) * GRAIN


def shorter_lengths(data: DatasetFacts, length: int, least: int) -> list[int]:
    """Lengths to fall back to, longest first: percentiles of the data, then halves, never below `least`."""
    found = [_rounded(data.total.percentile(percent)) for percent in CUTS]
    half = length // 2
    while half >= least:
        found.append(half)
        half //= 2
    return sorted({one for one in found if least <= one < length}, reverse=True)


def picture_sequences(data: DatasetFacts, model: ModelFacts, resolution: int, repeats: int) -> Sequences:
    assert model.image is not None
    return Sequences(
        length=tokens_of_picture(model.image, resolution),
        packing=False,
        rows=data.rows,
        row_tokens=1.0,
        dropped_share=0.0,
        prompt_limit=None,
        completion_limit=None,
        per_epoch=data.rows * repeats,
        padded=1.0,
        trained=1.0,
        sides=1,
        pictures=True,
    )


def text_sequences(
    data: DatasetFacts, how: How, length: int, rows: float, micro: int, effective: int
) -> Sequences:
    """One epoch at this length. `micro` matters for padding, `effective` for whether packing leaves steps."""
    if data.task_type is TaskType.GRPO:
        return _grpo(data, how, length, rows)
    dropped = data.total.share_over(length)
    kept, mean = rows * (1 - dropped), data.total.mean_kept(length)
    if data.task_type is TaskType.DPO:
        return _pairs(data, how, length, kept, dropped, micro)
    padded = _padded(data.total, length, micro, how.grouped, mean)
    usual = _padded(data.total, length, USUAL_MICRO, how.grouped, mean)
    packing = _packs(how, kept * mean / (length * PACKED_FULL), usual / max(mean, 1), effective)
    if packing:
        count = math.ceil(kept * mean / (length * PACKED_FULL)) if kept else 0
        full = float(length), PACKED_FULL * length
    else:
        count, full = round(kept), (padded, mean)
    return Sequences(
        length=length,
        packing=packing,
        rows=kept,
        row_tokens=mean,
        dropped_share=dropped,
        prompt_limit=None,
        completion_limit=None,
        per_epoch=count,
        padded=max(full[0], 1.0),
        trained=full[1],
        sides=1,
    )


def _packs(how: How, packed: float, gain: float, effective: int) -> bool:
    if how.packing is not None:
        return how.packing
    return gain >= PACKING_GAIN and packed / effective >= PACKED_STEPS


def _padded(stats: LengthStats, length: int, micro: int, grouped: bool, mean: float) -> float:
    """A batch is as long as its longest row: on average the n-th of n+1 equal parts of the distribution.
    `mean`: of the rows that are kept."""
    if grouped:
        return min(mean * 1.05, length)
    over = stats.share_over(length)
    return min(max(stats.percentile(100 * (1 - over) * micro / (micro + 1)), mean), length)


def _pairs(data: DatasetFacts, how: How, length: int, kept: float, dropped: float, micro: int) -> Sequences:
    """Chosen and rejected are padded alike and pass together."""
    mean = data.total.mean_kept(length)
    padded = _padded(data.total, length, 2 * micro, how.grouped, mean)
    answers = data.answer.mean + (data.rejected.mean if data.rejected else data.answer.mean)
    trained = min(2 * data.prompt.mean + answers, 2.0 * length)
    return Sequences(
        length=length,
        packing=False,
        rows=kept,
        row_tokens=mean,
        dropped_share=dropped,
        prompt_limit=None,
        completion_limit=None,
        per_epoch=round(kept),
        padded=max(2 * padded, 1.0),
        trained=trained,
        sides=2,
    )


def _grpo(data: DatasetFacts, how: How, length: int, rows: float) -> Sequences:
    """Every prompt is answered `generations` times; nothing is dropped, prompts are cut from the left."""
    completion = min(how.completion, max(length - GRAIN, 1))
    prompt = max(min(prompt_limit(data), length - completion), 1)
    mean = data.prompt.mean_cut(prompt) + completion
    return Sequences(
        length=prompt + completion,
        packing=False,
        rows=rows,
        row_tokens=mean,
        dropped_share=0.0,
        prompt_limit=prompt,
        completion_limit=completion,
        per_epoch=math.floor(rows) * how.generations,
        padded=float(min(data.prompt.percentile(90), prompt) + completion),
        trained=mean,
        sides=1,
    )


__all__ = [
    "CUTS",
    "How",
    "Sequences",
    "how_of",
    "longest",
    "natural_length",
    "picture_sequences",
    "prompt_limit",
    "shorter_lengths",
    "text_sequences",
]
