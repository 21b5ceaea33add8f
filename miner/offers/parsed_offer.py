"""An offer reduced to what a decision may depend on: which model, how large, what policies call it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import NamedTuple

from core.domain.tasks import ImageModelType, TaskType
from core.domain.wire import MinerTaskOffer
from core.models.facts import ModelFacts
from core.models.identify import NameFacts, facts_from_name_facts, facts_in_name, image_model_facts
from core.models.image_families import OLDER_SD, image_type_from_name, is_older_sd
from core.models.names import params_from_name, usable_count

#: Name and count that differ by more than this factor mean two different models.
_MAX_MISMATCH = 2.0
#: The validators' work score knows nothing smaller or larger, and believes a name up to eight.
_LEAST_BILLIONS, _MOST_BILLIONS, _MOST_NAMED = 1, 40, 8


class SizeEstimate(NamedTuple):
    """Size that a text model is assumed to have."""

    #: The stated count, else the name's, if either says.
    params: int | None
    #: (stated, named) where they contradict each other. The larger one is planned for.
    mismatch: tuple[int, int] | None = None


@dataclass(frozen=True)
class ParsedOffer:
    """The part of an offer that a decision may depend on, without names and ids, so that equal ones are
    decided alike; hours and counts are, exactly: the reasons quote them."""

    task_type: TaskType
    hours: float
    image_type: ImageModelType | None
    #: Its names in a policy, the most exact first.
    kinds: tuple[str, ...]
    name_facts: NameFacts
    #: The parameter count as the offer states it.
    stated_params: int | None
    #: Set for an image offer only: a text offer's count is the same for all and means nothing.
    rows: int | None
    #: The entry of `rules.models_denied` that the model's name matches.
    denied: str | None = None

    @cached_property
    def size(self) -> SizeEstimate:
        if self.image_type is not None:
            return SizeEstimate(self.model.params_total)
        return _larger_size(self.name_facts.params, self.stated_params)

    @cached_property
    def model(self) -> ModelFacts:
        if self.image_type is not None:
            return image_model_facts(self.kinds[0], self.image_type)
        return facts_from_name_facts(self.name_facts, self.planned_params)

    @property
    def params(self) -> int:
        return self.size.params or self.model.params_total

    @property
    def planned_params(self) -> int | None:
        """The planner's count: as stated, absurd ones too, unless the name says more."""
        return self.size.params if self.size.mismatch else self.stated_params

    @property
    def billions(self) -> int:
        """Count as validators do for the work score: whole billions of the stated count, else of the name."""
        if self.stated_params:
            size, most = self.stated_params // 10**9, _MOST_BILLIONS
        else:
            size, most = (self.name_facts.params or 0) // 10**9, _MOST_NAMED
        return min(max(size, _LEAST_BILLIONS), most)


def parse_offer(
    offer: MinerTaskOffer, image_type: ImageModelType | None = None, denied: Sequence[str] = ()
) -> ParsedOffer:
    """Reduce an offer to what decides. `image_type`: as a start names it; for offers, from the name.
    `denied`: the policy's patterns of names."""
    name, image = offer.model, not offer.task_type.is_text
    image_type = (image_type or image_type_from_name(name)) if image else None
    return ParsedOffer(
        task_type=offer.task_type,
        hours=offer.hours_to_complete,
        image_type=image_type,
        kinds=task_kinds(offer.task_type, image_type, name),
        name_facts=facts_in_name(name),
        stated_params=offer.model_params_count,
        rows=offer.ds_size if image else None,
        denied=next((pattern for pattern in denied if fnmatchcase(name.lower(), pattern.lower())), None),
    )


def task_kinds(task_type: TaskType, image_type: ImageModelType | None, model_id: str) -> tuple[str, ...]:
    """Return a task's names in a policy, the most exact first."""
    words = [task_type.word]
    if image_type is not None:
        words.insert(0, image_type.value)
        if image_type is ImageModelType.SDXL and is_older_sd(model_id):
            words.insert(0, OLDER_SD)
    return tuple(words)


def estimate_size(model_id: str, params_count: int | None) -> SizeEstimate:
    return _larger_size(params_from_name(model_id), params_count)


def _larger_size(named: int | None, params_count: int | None) -> SizeEstimate:
    """Names lie, and counts of quantised files do too; planning for the smaller would cost a missed task."""
    stated = usable_count(params_count)
    if stated and named and not 1 / _MAX_MISMATCH <= stated / named <= _MAX_MISMATCH:
        return SizeEstimate(max(stated, named), (stated, named))
    return SizeEstimate(stated or named)
