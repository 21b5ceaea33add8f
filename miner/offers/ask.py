"""An offer as understood: which model, how large, what it is called in policies."""

from __future__ import annotations

from typing import NamedTuple

from core.model_facts import facts_from_name
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


class Ask(NamedTuple):
    offer: MinerTaskOffer
    image_type: ImageModelType | None
    #: What it is called in a policy, the most exact word first.
    kinds: tuple[str, ...]
    model: ModelFacts
    size: Size

    @property
    def task_type(self) -> TaskType:
        return self.offer.task_type

    @property
    def hours(self) -> float:
        return self.offer.hours_to_complete

    @property
    def params(self) -> int:
        return self.size.params or self.model.params_total

    @property
    def planned_params(self) -> int | None:
        """The planner's count: as stated, absurd ones too, unless the name says more."""
        return self.size.params if self.size.doubt else self.offer.model_params_count

    @property
    def billions(self) -> int:
        """As validators count for the work score: whole billions of the stated count, else of the name."""
        stated = self.offer.model_params_count
        if stated:
            size, most = stated // 10**9, _MOST_BILLIONS
        else:
            size, most = (params_from_name(self.offer.model) or 0) // 10**9, _MOST_NAMED
        return min(max(size, _LEAST_BILLIONS), most)


def understand(offer: MinerTaskOffer, image_type: ImageModelType | None = None) -> Ask:
    """`image_type`: as a start names it; an offer does not, so it is told by the model's name."""
    if offer.task_type is TaskType.IMAGE:
        image_type = image_type or image_type_from_name(offer.model)
        kinds = kinds_of(offer.task_type, image_type, offer.model)
        model = image_model(offer.model, image_type)
        return Ask(offer, image_type, kinds, model, Size(model.params_total))
    size = size_of(offer.model, offer.model_params_count)
    kinds = kinds_of(offer.task_type, None, offer.model)
    return Ask(offer, None, kinds, facts_from_name(offer.model, size.params), size)


def image_model(model_id: str, image_type: ImageModelType) -> ModelFacts:
    return facts_from_name(model_id, None, image_type)


def size_of(model_id: str, params_count: int | None) -> Size:
    """Names lie, and counts of quantised files do too; planning for the smaller would cost a missed task."""
    stated, named = usable_count(params_count), params_from_name(model_id)
    if stated and named and not 1 / _LIE <= stated / named <= _LIE:
        return Size(max(stated, named), (stated, named))
    return Size(stated or named)
