"""Simulate a tournament from round 1 to the champion, thousands of times.

An entry's result in a task is its strength plus noise of N(0, 1); the higher result is the better one. The
champion's strength is 0, with the gate's margin in it: an entry of strength s wins one of the boss round's
tasks with the chance Φ(s / √2). So our chance in a kind of task gives our strength in it. Others have one
strength each for all kinds, from N(m, spread²), where m is such that the best of them wins as many of the
boss round's tasks as challengers do. Our own strength may be unknown by an amount that all our tasks share
(`correlation`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import erf
from operator import sub
from statistics import NormalDist

from core.domain.errors import GodMinerError
from core.domain.tournament_rules import Round, TournamentRules
from core.domain.wire import TournamentType

BRACKETS = 100_000
#: Chances of 0 and 1 would be strengths without end.
_LEAST_CHANCE = 1e-4
_NORMAL = NormalDist()
_POOL_BITS = 17


class NoChance(GodMinerError):
    """A kind of task whose chance is not known."""

    code = "no_chance"


@dataclass(frozen=True, slots=True)
class Chances:
    """Our chances against the champion by kind of task, as `rehearse --task` names them."""

    win: Mapping[str, float]
    #: For kinds that `win` does not have.
    usual: float | None = None
    #: The chance that a task separates nobody; the rest is lost.
    draw: Mapping[str, float] = field(default_factory=dict)
    #: Correlation of two of our tasks, as far as we do not know how good we are.
    correlation: float = 0.0

    def of(self, task: str) -> float:
        """Return the chance in a task: that of its own name, else of the kind that it is a variant of."""
        for name in (task, task.partition("-")[0]):
            if name in self.win:
                return self.win[name]
        if self.usual is not None:
            return self.usual
        if " " in task and self.win:  # of a family that is not known in advance
            return sum(self.win.values()) / len(self.win)
        raise NoChance(f"there is no chance to win {task}: add --p {task}=0.5, or --p 0.5 for all")

    def draws(self, task: str) -> float:
        share = self.draw.get(task, self.draw.get(task.partition("-")[0], 0.0))
        return min(share, 1.0 - self.of(task))

    def moved(self, by: float, correlation: float | None = None) -> Chances:
        """Return the chances, each larger by so much."""
        win = {name: min(max(chance + by, 0.0), 1.0) for name, chance in self.win.items()}
        usual = None if self.usual is None else min(max(self.usual + by, 0.0), 1.0)
        return Chances(win, usual, self.draw, self.correlation if correlation is None else correlation)


@dataclass(frozen=True, slots=True)
class Opponents:
    """The other entries, without the champion, and their strengths."""

    entries: int
    mean: float
    spread: float

    @classmethod
    def by_their_best(cls, entries: int, challenger_wins: float, spread: float) -> Opponents:
        """Make so many, of whom the best wins this share of the boss round's tasks."""
        best = _NORMAL.inv_cdf((entries - 0.375) / (entries + 0.25)) if entries > 1 else 0.0
        return cls(entries, _strength(challenger_wins, 0.0) - spread * best, spread)


@dataclass(slots=True)
class Placings:
    """Counts of how far we got."""

    brackets: int
    #: Rounds by name, those in which we played.
    reached: dict[str, int] = field(default_factory=dict)
    won: int = 0
    second: int = 0
    third: int = 0

    def share(self, count: int) -> float:
        return count / self.brackets


def simulate(
    rules: TournamentRules,
    chances: Chances,
    opponents: Opponents,
    *,
    brackets: int = BRACKETS,
    seed: int = 0,
) -> Placings:
    """Play the tournament so many times. `NoChance` if a kind of its tasks has none."""
    return _Simulation(rules, chances, opponents, seed).run(brackets)


def _strength(chance: float, doubt: float) -> float:
    """Return the mean strength that wins with this chance, if it is itself uncertain by `doubt`."""
    kept = min(max(chance, _LEAST_CHANCE), 1 - _LEAST_CHANCE)
    return _NORMAL.inv_cdf(kept) * math.sqrt(2 + doubt * doubt)


@lru_cache(maxsize=4)
def _noise(seed: int) -> list[float]:
    """Make values of N(0, 1) in random order. Their distribution is exact, and many cost one slice."""
    count = 1 << _POOL_BITS
    values = [_NORMAL.inv_cdf((at + 0.5) / count) for at in range(count)]
    random.Random(seed).shuffle(values)  # noqa: S311 - repeatable
    return values


def _names(played: Round) -> list[str]:
    return [one.task for one in played.tasks for _ in range(one.count)]


class _Simulation:
    def __init__(self, rules: TournamentRules, chances: Chances, opponents: Opponents, seed: int) -> None:
        self.rules, self.opponents = rules, opponents
        self.rounds = [one for one in rules.rounds if one.name != "boss"]
        boss = rules.round("boss")
        self.boss = _names(boss) if boss is not None else []
        #: Text alone adds tasks for drawn ones; a drawn continuation is followed by a plain task of instruct.
        self.deciders = rules.kind is TournamentType.TEXT
        self.stand_ins = {task: "instruct-kl" if task in rules.not_lost else task for task in self.boss}
        # The correlation of two results against one champion, solved for what they share.
        share = min(max(chances.correlation, 0.0), 0.95)
        self.doubt = math.sqrt(2 * share / (1 - share))
        wanted = {*self.boss, *self.stand_ins.values(), *(one.task for r in self.rounds for one in r.tasks)}
        self.ours = {task: _strength(chances.of(task), self.doubt) for task in sorted(wanted)}
        #: Of what is not won, as the shared doubt moves both.
        self.drawn = {task: chances.draws(task) / max(1 - chances.of(task), 1e-9) for task in sorted(wanted)}
        self.chances = {task: (1 + erf(one / 2)) / 2 for task, one in self.ours.items()}
        self.strict = [task in rules.not_lost for task in self.boss]
        self.tasks = {one.name: _names(one) for one in self.rounds}
        self.mean, self.spread = opponents.mean, opponents.spread
        self.noise = _noise(seed)
        self.random = random.Random(seed).random  # noqa: S311 - repeatable
        self.room = len(self.noise) - max(opponents.entries + 2, 2)
        self.placings = Placings(0)

    def run(self, brackets: int) -> Placings:
        self.placings = Placings(brackets)
        for _ in range(brackets):
            self._play()
        return self.placings

    def _take(self, count: int) -> list[float]:
        start = int(self.random() * self.room)
        return self.noise[start : start + count]

    def _play(self) -> None:
        """Play one tournament. We are entry 0, and the champion is -1."""
        placings = self.placings
        shared = self.doubt * self._take(1)[0] if self.doubt else 0.0
        mean, spread = self.mean, self.spread
        strengths = [0.0, *(mean + spread * one for one in self._take(self.opponents.entries)), 0.0]
        alive = list(range(len(strengths) - 1))
        at, final_pair = 0, False
        while len(alive) > 1:
            played = self.rounds[min(at, len(self.rounds) - 1)]
            placings.reached[played.name] = placings.reached.get(played.name, 0) + (at < len(self.rounds))
            final_pair = len(alive) == 2
            alive = self._round(played, alive, strengths, shared)
            at += 1
            if not alive or alive[0] != 0:
                # Of a single pair before the champion's round, the loser is third.
                placings.third += final_pair and at > 1
                return
        placings.reached["boss"] = placings.reached.get("boss", 0) + 1
        if self._dethrones(shared):
            placings.won += 1
        else:
            placings.second += 1

    def _round(self, played: Round, alive: list[int], strengths: list[float], shared: float) -> list[int]:
        """Return who goes on, ourselves first, or nobody if we do not. The champion's group must beat it."""
        tasks = self.tasks[played.name] if not played.drawn else [self._draw(played)]
        if played.group is None:
            groups = [alive] if not played.drawn else self._pairs(alive)
        else:
            groups = self._groups(played, alive)
        on = []
        for group in groups:
            best = self._best(group, tasks, strengths, shared, played.advance + (-1 in group))
            if -1 in group:
                # What comes after the champion in its group is out.
                best = best[: best.index(-1)] if -1 in best else best[: played.advance]
            if 0 in group and 0 not in best:
                return []
            on += best
        on.sort()
        return on

    def _draw(self, played: Round) -> str:
        at = self.random()
        for one in played.tasks:
            at -= one.share
            if at < 0:
                return one.task
        return played.tasks[-1].task

    def _pairs(self, alive: list[int]) -> list[list[int]]:
        mixed = alive if len(alive) == 2 else self._mixed(alive)
        return [mixed[at : at + 2] for at in range(0, len(mixed), 2)]

    def _groups(self, played: Round, alive: list[int]) -> list[list[int]]:
        """Make groups of equal size. The champion plays in one of them."""
        most = played.group or len(alive)
        mixed = self._mixed([*alive, -1])
        count = -(-len(mixed) // most)
        return [mixed[at::count] for at in range(count)]

    def _mixed(self, players: Sequence[int]) -> list[int]:
        keyed = [(self.random(), player) for player in players]
        keyed.sort()
        return [player for _, player in keyed]

    def _best(
        self, group: list[int], tasks: list[str], strengths: list[float], shared: float, count: int
    ) -> list[int]:
        """Return the best of a group by their mean place, and at equal ones by the last task."""
        size = len(group)
        if size <= 1:
            return group
        if len(tasks) == 1:
            strengths[0] = self.ours[tasks[0]] + shared
            losses = list(map(sub, self._take(size), [strengths[player] for player in group]))
            order = sorted(range(size), key=losses.__getitem__)
            return [group[at] for at in order[:count]]
        places, losses = [0] * size, []
        for task in tasks:
            strengths[0] = self.ours[task] + shared
            losses = list(map(sub, self._take(size), [strengths[player] for player in group]))
            for place, at in enumerate(sorted(range(size), key=losses.__getitem__)):
                places[at] += place
        keyed = sorted(zip(places, losses, group, strict=True))
        return [player for _, _, player in keyed[:count]]

    # — the champion

    def _dethrones(self, shared: float) -> bool:
        results = [self._duel(task, shared) for task in self.boss]
        won, lost = results.count(1), results.count(-1)
        if not self.deciders:
            return won > 0 and lost <= self.rules.may_lose
        if any(result < 0 for result, strict in zip(results, self.strict, strict=True) if strict):
            return False
        if won + lost < len(results):
            # One more task for each that was drawn, once; a second draw counts for nobody.
            drawn = [task for task, result in zip(self.boss, results, strict=True) if not result]
            results = [self._duel(self.stand_ins[task], shared) for task in drawn]
            won, lost = won + results.count(1), lost + results.count(-1)
        needed = min(max(len(self.boss), won + lost) - self.rules.may_lose, won + lost)
        return won >= max(needed, 1)

    def _duel(self, task: str, shared: float) -> int:
        """Return 1 if the task is won, 0 if drawn, -1 if lost."""
        chance = self.chances[task] if not shared else (1 + erf((self.ours[task] + shared) / 2)) / 2
        at = self.random()
        if at < chance:
            return 1
        return 0 if at < chance + (1 - chance) * self.drawn[task] else -1
