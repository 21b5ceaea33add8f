"""The rows of a task in tokens: what Axolotl is fed and what the scores are taken of."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

#: Labels of what is read and not learned.
IGNORED = -100
Ids = Sequence[int]


def compact(ids: Sequence[int]) -> array[int]:
    """Four bytes a token instead of eight and more: a large task has a hundred million."""
    return array("i", ids)


class LabelledRow(NamedTuple):
    """Instruct and chat: one sequence; `labels` is -100 where nothing is learned."""

    ids: Ids
    labels: Ids


class PairRow(NamedTuple):
    """DPO: two answers to one prompt, cut as the evaluation cuts them."""

    prompt: Ids
    chosen: Ids
    rejected: Ids


class PromptRow(NamedTuple):
    """GRPO: a prompt as text, and what the task's rewards want to know beside the completion."""

    prompt: str
    extra: Any


Row = LabelledRow | PairRow | PromptRow
