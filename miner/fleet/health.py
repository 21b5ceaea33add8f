"""Which cards may be used, judged from one look to the next.

A card that fails, vanishes or is taken by somebody else is out at once, and back only after it has been fine
for a while: one that comes and goes would take a job with it every time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from core.hardware import GpuKind
from miner.fleet.base import Gpu
from miner.fleet.looks import Look, Seen

#: Memory on an idle card beyond this, or this part of all of it, means that somebody uses it.
FOREIGN_BYTES = 2**30
FOREIGN_SHARE = 0.02


class Change(NamedTuple):
    """Something that the operator wants to know."""

    kind: str
    gpu: str
    text: str


@dataclass(frozen=True, slots=True)
class Judged:
    gpus: tuple[Gpu, ...]
    #: What this host is planned for, with the least memory of the usable cards; None: there is no such card.
    kind: GpuKind | None
    #: Card → what happened, where not even a running job can go on.
    failed: dict[str, str] = field(default_factory=dict)
    #: Cards whose last job's memory is not free yet.
    unclean: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    #: Whether memory in use can be seen at all.
    sees_memory: bool = False
    changes: tuple[Change, ...] = ()


@dataclass(slots=True)
class _Card:
    seen: Seen
    #: What is or was wrong with it; None: nothing, for long enough.
    fault: str | None = None
    #: Whether a job that runs on it is lost.
    is_fatal: bool = False
    fine_since: float | None = None


class Health:
    def __init__(self, *, return_seconds: float, settle_seconds: float = 60.0) -> None:
        self._return_seconds = return_seconds
        #: For the processes of a job that has ended, and for jobs of an earlier life to be found again.
        self._settle_seconds = settle_seconds
        self._cards: dict[str, _Card] = {}
        self._first_look_at: float | None = None

    def judge(
        self, look: Look, now: float, in_use: Callable[[str], bool], released_at: Mapping[str, float]
    ) -> Judged:
        """`in_use`: one of our jobs runs on it."""
        first_look_at = self._first_look_at = now if self._first_look_at is None else self._first_look_at
        changes, unclean = [], set()
        faults = self._faults(look)
        for name, card in self._cards.items():
            fault, is_fatal = faults.get(name), name in faults
            if fault is None and not in_use(name) and (foreign := _foreign(card.seen)):
                if now - max(released_at.get(name, first_look_at), first_look_at) < self._settle_seconds:
                    unclean.add(name)
                else:
                    fault = foreign
            changes += self._note(name, card, fault, is_fatal, now)
        return self._judged(frozenset(unclean), tuple(changes))

    def _faults(self, look: Look) -> dict[str, str]:
        """Take in what was seen; what is wrong with those that were not."""
        seen = {card.id: card for card in look.cards}
        for name, one in seen.items():
            known = self._cards.setdefault(name, _Card(one))
            known.seen = one
        return {
            name: look.errors.get(card.seen.index, "the driver does not list it any more")
            for name, card in self._cards.items()
            if name not in seen
        }

    def _note(self, name: str, card: _Card, fault: str | None, is_fatal: bool, now: float) -> list[Change]:
        if fault is not None:
            is_news = card.fault is None or (is_fatal and not card.is_fatal)
            card.fault, card.is_fatal, card.fine_since = fault, is_fatal, None
            return [Change("gpu_out", name, fault)] if is_news else []
        if card.fault is None:
            return []
        card.is_fatal = False
        card.fine_since = now if card.fine_since is None else card.fine_since
        if not 0 <= now - card.fine_since < self._return_seconds:
            text, card.fault = card.fault, None
            return [Change("gpu_back", name, f"fine for {self._return_seconds:g} s again (it was: {text})")]
        return []

    def _judged(self, unclean: frozenset[str], changes: tuple[Change, ...]) -> Judged:
        main = self._main_kind()
        cards = sorted(self._cards.items(), key=lambda item: item[1].seen.index)
        gpus = tuple(_gpu(name, card, main) for name, card in cards)
        usable = [gpu.kind for gpu in gpus if gpu.out is None]
        return Judged(
            gpus=gpus,
            kind=min(usable, key=lambda kind: kind.memory_bytes, default=None),
            failed={name: card.fault for name, card in cards if card.fault and card.is_fatal},
            unclean=unclean,
            shared=frozenset(name for name, card in cards if card.seen.processes),
            sees_memory=any(card.seen.used_bytes is not None for _, card in cards),
            changes=changes,
        )

    def _main_kind(self) -> str | None:
        """Plans are made for one kind of card: that of most cards, among equals the faster one."""
        kinds = [card.seen.kind for card in self._cards.values()]
        count = Counter(kind.name for kind in kinds)
        best = max(kinds, key=lambda kind: (count[kind.name], kind.bf16_flops, kind.name), default=None)
        return None if best is None else best.name


def _foreign(seen: Seen) -> str | None:
    if seen.used_bytes is None or seen.used_bytes <= max(FOREIGN_BYTES, FOREIGN_SHARE * seen.total_bytes):
        return None
    return f"somebody else uses {seen.used_bytes / 2**30:.1f} GiB of it"


def _gpu(name: str, card: _Card, main: str | None) -> Gpu:
    seen, out = card.seen, card.fault
    if out is not None and card.fine_since is not None:
        out = f"{out}; fine again, and watched for a while"
    if out is None and seen.excluded is not None:
        out = f"taken out: {seen.excluded}"
    if out is None and seen.kind.name != main:
        out = f"a {seen.kind.name} among {main}: this host is planned for one kind of card"
    return Gpu(name, seen.index, seen.kind, seen.linked, out)
