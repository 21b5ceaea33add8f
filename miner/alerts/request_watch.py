"""Requests of validators: those that could not be read, and fields that this version does not know.

An offer pays an append and an assignment for it. Bodies are examined later, once a minute.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from pydantic import BaseModel

from core.domain.records import printable
from core.domain.wire import MinerTaskOffer, TrainRequestImage, TrainRequestText

#: Requests that are remembered of a validator, and the largest body that is examined.
MAX_OUTCOMES = 512
MAX_BODY_BYTES = 64 * 1024
#: Hotkeys that are remembered (only registered validators get this far), and new fields of each.
MAX_HOTKEYS, MAX_NEW_FIELDS = 256, 100
#: The schema of a body, by path.
MODELS: Mapping[str, type[BaseModel]] = {
    "/task_offer/": MinerTaskOffer,
    "/task_offer_image/": MinerTaskOffer,
    "/start_training/": TrainRequestText,
    "/start_training_grpo/": TrainRequestText,
    "/start_training_image/": TrainRequestImage,
}


class RequestWatch:
    """The newest requests of each validator. For one event loop."""

    def __init__(self) -> None:
        self._outcomes: dict[str, deque[tuple[float, float]]] = {}
        self._problems: dict[str, str] = {}
        self._bodies: dict[tuple[str, str], tuple[float, bytes]] = {}
        #: Time at which a field was last seen, by hotkey and field.
        self._new_fields: dict[str, dict[str, float]] = {}

    def note_valid(self, hotkey: str, path: str, raw: bytes, now: float) -> None:
        self._note(hotkey, now, 0.0)
        if len(raw) <= MAX_BODY_BYTES:
            self._bodies[hotkey, path] = (now, raw)

    def note_invalid(self, hotkey: str, path: str, problem: str, now: float) -> None:
        self._note(hotkey, now, 1.0)
        self._problems[hotkey] = printable(f"{path}: {problem}")[:200]

    def outcomes(self) -> Iterable[tuple[str, Iterable[tuple[float, float]]]]:
        """Return the times of requests by hotkey, with 1 for one that could not be read."""
        return self._outcomes.items()

    def problem(self, hotkey: str) -> str:
        """The fault of the last request that could not be read."""
        return self._problems.get(hotkey, "")

    def new_fields(self, since: float) -> Iterator[tuple[str, float, set[str]]]:
        for hotkey, seen in self._new_fields.items():
            names = {name for name, at in seen.items() if at >= since}
            yield hotkey, max(seen.values(), default=since), names

    def take_bodies(self) -> dict[tuple[str, str], tuple[float, bytes]]:
        bodies, self._bodies = self._bodies, {}
        return bodies

    def note_new_fields(self, hotkey: str, names: Iterable[str], at: float) -> None:
        seen = self._new_fields.setdefault(hotkey, {})
        seen.update(dict.fromkeys(names, at))
        while len(seen) > MAX_NEW_FIELDS:  # names may be made up without end
            del seen[min(seen, key=seen.__getitem__)]

    def _note(self, hotkey: str, now: float, value: float) -> None:
        known = self._outcomes.get(hotkey)
        if known is None:
            if len(self._outcomes) >= MAX_HOTKEYS:
                return
            known = self._outcomes[hotkey] = deque(maxlen=MAX_OUTCOMES)
        known.append((now, value))


def unknown_fields(path: str, raw: bytes) -> list[str]:
    """Return the fields of a body that its model does not have, at most ten."""
    model = MODELS.get(path)
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return []
    if model is None or not isinstance(body, dict):
        return []
    known = {name for key, about in model.model_fields.items() for name in (key, about.alias)}
    return [printable(str(name)[:60]) for name in body if name not in known][:10]
