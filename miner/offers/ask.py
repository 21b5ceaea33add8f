"""An offer as understood: which model, how large, what it is called in policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import NamedTuple

from core.model_facts import Named, facts_of, image_facts, read_name
from core.model_names import image_type_from_name, params_from_name, usable_count
from core.models import ModelFacts
from core.tasks import ImageModelType, TaskType
from core.wire import MinerTaskOffer
from miner.offers.policies.words import kinds_of

#: Name and count that differ by more than this tell of two different models.
_LIE = 2.0
#: The validators' work score knows nothing smaller or larger, and believes a name up to eight.
_LEAST_BILLIONS, _MOST_BILLIONS, _MOST_NAMED = 1, 40, 8


class Size(NamedTuple):
    """How large a text model is taken to be."""

    #: The count that was stated, else the name's; None: neither says.
    params: int | None
    #: The two where they contradict each other: (stated, named). The larger one is planned for.
    doubt: tuple[int, int] | None = None


@dataclass(frozen=True)
class Ask:
    """All of an offer that a decision may depend on. Names and ids are no part of it, so that equal ones are
    decided alike; hours and counts are, exactly: the reasons quote them."""

    task_type: TaskType
    hours: float
    image_type: ImageModelType | None
    #: What it is called in a policy, the most exact word first.
    kinds: tuple[str, ...]
    named: Named
    #: The parameter count as the offer states it.
    stated: int | None
    #: Of an image offer. A text offer's count is the same for all and no count of anything.
    rows: int | None
    #: The entry of `rules.models_denied` that the model's name matches.
    denied: str | None = None

    @cached_property
    def size(self) -> Size:
        if self.image_type is not None:
            return Size(self.model.params_total)
        return _size(self.named.params, self.stated)

    @cached_property
    def model(self) -> ModelFacts:
        if self.image_type is not None:
            return image_facts("", self.image_type)
        return facts_of(self.named, self.planned_params)

    @property
    def params(self) -> int:
        return self.size.params or self.model.params_total

    @property
    def planned_params(self) -> int | None:
        """The planner's count: as stated, absurd ones too, unless the name says more."""
        return self.size.params if self.size.doubt else self.stated

    @property
    def billions(self) -> int:
        """As validators count for the work score: whole billions of the stated count, else of the name."""
        if self.stated:
            size, most = self.stated // 10**9, _MOST_BILLIONS
        else:
            size, most = (self.named.params or 0) // 10**9, _MOST_NAMED
        return min(max(size, _LEAST_BILLIONS), most)


def understand(
    offer: MinerTaskOffer, image_type: ImageModelType | None = None, denied: Sequence[str] = ()
) -> Ask:
    """`image_type`: as a start names it; an offer does not, so it is told by the model's name. `denied`: the
    policy's patterns of names."""
    name, image = offer.model, offer.task_type is TaskType.IMAGE
    image_type = (image_type or image_type_from_name(name)) if image else None
    return Ask(
        task_type=offer.task_type,
        hours=offer.hours_to_complete,
        image_type=image_type,
        kinds=kinds_of(offer.task_type, image_type, name),
        named=read_name(name),
        stated=offer.model_params_count,
        rows=offer.ds_size if image else None,
        denied=next((one for one in denied if fnmatchcase(name.lower(), one.lower())), None),
    )


def size_of(model_id: str, params_count: int | None) -> Size:
    return _size(params_from_name(model_id), params_count)


def _size(named: int | None, params_count: int | None) -> Size:
    """Names lie, and counts of quantised files do too; planning for the smaller would cost a missed task."""
    stated = usable_count(params_count)
    if stated and named and not 1 / _LIE <= stated / named <= _LIE:
        return Size(max(stated, named), (stated, named))
    return Size(stated or named)
