"""A match as the evaluator plays it: pairs of games with one seed and swapped seats, until it is stopped."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from core.domain.errors import GodMinerError
from core.domain.tournament_rules import MATCH
from trainer.environments.games import (
    GameOutcome,
    board_game,
    deal,
    dealer,
    forfeited,
    load,
    opened,
    outcome,
    returns_of,
    seeds,
    variant_of,
)
from trainer.environments.memory import Memory
from trainer.environments.models import AnswerTimeout, ChatAnswer, ChatModel, ContextOverflow
from trainer.environments.prompts import GAME_ACTION, memory_tools, reflection_messages, tools, turn_messages
from trainer.environments.tool_calls import ToolCall, first_move

if TYPE_CHECKING:
    import pyspiel

#: How a match ends that Ctrl-C ends.
INTERRUPTED = "interrupted"


class GameStopped(Exception):
    """A game that is not played to its end."""


class Forfeit(StrEnum):
    """Why a turn made no move."""

    NO_CALL = "no_call"
    CUT_OFF = "cut_off"
    ILLEGAL = "illegal"
    TIMEOUT = "timeout"
    CONTEXT = "context"


@dataclass(frozen=True, slots=True)
class Turn:
    """One decision."""

    seat: int
    #: The user message; of a player that reads the state itself only what is seen of the state.
    shown: str
    #: Notes that were not empty.
    notes: str
    answer: ChatAnswer | None
    action: int | None
    #: The action as OpenSpiel writes it.
    move: str = ""
    forfeit: Forfeit | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class GameRecord:
    """One game of a match."""

    game: str
    seed: int
    variant: int
    #: By seat.
    names: tuple[str, str]
    #: By seat.
    outcomes: tuple[GameOutcome, GameOutcome]
    returns: tuple[float, ...]
    turns: tuple[Turn, ...]
    #: By seat: what was noted after the game.
    reflections: tuple[tuple[ToolCall, ...], ...]
    seconds: float

    @property
    def forfeit(self) -> tuple[int, Forfeit] | None:
        """The seat that forfeited, and why."""
        last = self.turns[-1] if self.turns else None
        return (last.seat, last.forfeit) if last and last.forfeit else None


class Contestant(Protocol):
    """One side of a match: a new one for each series of games, with one memory."""

    name: str

    def begin(self, game: str, loaded: pyspiel.Game, seat: int, seed: int) -> None:
        """Take a seat in a new game."""
        ...

    def turn(self, state: pyspiel.State) -> Turn:
        """Decide; a turn without an action forfeits."""
        ...

    def reflect(self, state: pyspiel.State, ended: GameOutcome) -> tuple[ToolCall, ...]:
        """Look back at a game that was not forfeited."""
        ...


class ModelContestant:
    """A model with its notes."""

    def __init__(self, name: str, model: ChatModel, seed: int = 0) -> None:
        self.name = name
        self.memory = Memory(model.cut)
        self._model, self._seed, self._game, self._seat = model, seed, "", 0

    def begin(self, game: str, loaded: pyspiel.Game, seat: int, seed: int) -> None:
        """Take a seat with the match's notes and without a game's."""
        self._game, self._seat = game, seat
        self.memory.new_game()

    def turn(self, state: pyspiel.State) -> Turn:
        """Ask once; note what it notes, and make its first legal move."""
        legal = state.legal_actions(self._seat)
        messages = turn_messages(self._game, state, self._seat, self.memory)
        shown, notes = str(messages[1]["content"]), self._notes()
        answer, action, forfeit = None, None, None
        began = time.monotonic()
        try:
            answer = self._model.answer(messages, tools(legal), max_tokens=MATCH.turn_tokens, seed=self._seed)
        except AnswerTimeout:
            forfeit = Forfeit.TIMEOUT
        except ContextOverflow:
            forfeit = Forfeit.CONTEXT
        else:
            self._note(answer.calls)
            action = first_move(answer.calls, legal)
            if action is None:
                forfeit = _why_no_move(answer)
        seconds = time.monotonic() - began
        return Turn(self._seat, shown, notes, answer, action, forfeit=forfeit, seconds=seconds)

    def reflect(self, state: pyspiel.State, ended: GameOutcome) -> tuple[ToolCall, ...]:
        """Ask for notes; no answer is no matter."""
        messages = reflection_messages(self._game, state, self._seat, self.memory, ended)
        try:
            answer = self._model.answer(
                messages, memory_tools(), max_tokens=MATCH.reflection_tokens, seed=self._seed
            )
        except GodMinerError:  # a server that is away is found out at the next turn
            return ()
        self._note(answer.calls)
        return answer.calls

    def _note(self, calls: Sequence[ToolCall]) -> None:
        for call in calls:
            self.memory.apply(call.name, call.arguments)

    def _notes(self) -> str:
        return "\n".join(
            f"{area.value} {number}: {text}"
            for area, texts in self.memory.slots.items()
            for number, text in enumerate(texts, 1)
            if text
        )


def _why_no_move(answer: ChatAnswer) -> Forfeit:
    if any(call.name == GAME_ACTION for call in answer.calls):
        return Forfeit.ILLEGAL
    return Forfeit.CUT_OFF if answer.cut_off else Forfeit.NO_CALL


#: Choose an action in a state.
Choose = Callable[["pyspiel.State"], int]


class PlayerContestant:
    """A player that looks at the state itself: `make` returns what chooses, for a game, a seat and a seed."""

    def __init__(self, name: str, make: Callable[[str, pyspiel.Game, int, int], Choose]) -> None:
        self.name = name
        self._make, self._game, self._seat = make, "", 0
        self._choose: Choose | None = None

    def begin(self, game: str, loaded: pyspiel.Game, seat: int, seed: int) -> None:
        """Take a seat."""
        self._choose = self._make(game, loaded, seat, seed)
        self._game, self._seat = game, seat

    def turn(self, state: pyspiel.State) -> Turn:
        """Choose an action."""
        assert self._choose is not None
        began = time.monotonic()
        action = int(self._choose(state))
        forfeit = None if action in state.legal_actions(self._seat) else Forfeit.ILLEGAL
        chosen = None if forfeit else action
        seconds = time.monotonic() - began
        shown = board_game(self._game).observe(state, self._seat)
        return Turn(self._seat, shown, "", None, chosen, forfeit=forfeit, seconds=seconds)

    def reflect(self, state: pyspiel.State, ended: GameOutcome) -> tuple[ToolCall, ...]:
        """Learn nothing."""
        return ()


def play_game(
    game: str, seed: int, seated: tuple[Contestant, Contestant], stops: Callable[[], bool] = lambda: False
) -> GameRecord:
    """Play a game with the contestants in their seats; `GameStopped` before the next turn when it stops."""
    began = time.monotonic()
    variant = variant_of(game, seed)
    loaded = load(game, variant)
    state, draw = opened(loaded, seed), dealer(seed)
    for seat, contestant in enumerate(seated):
        contestant.begin(game, loaded, seat, seed)
    turns: list[Turn] = []
    returns: list[float] | None = None
    while returns is None:
        deal(state, draw)
        if (returns := returns_of(state)) is not None:
            break
        if stops():
            raise GameStopped
        seat = state.current_player()
        turn = seated[seat].turn(state)
        if turn.action is None:
            returns = forfeited(loaded, seat)
            turns.append(turn)
        else:
            move = state.action_to_string(seat, turn.action)
            turns.append(
                Turn(seat, turn.shown, turn.notes, turn.answer, turn.action, move, seconds=turn.seconds)
            )
            state.apply_action(turn.action)
    ends = (outcome(loaded, returns, 0), outcome(loaded, returns, 1))
    loser = turns[-1].seat if turns and turns[-1].forfeit else None
    reflections = tuple(
        () if seat == loser else contestant.reflect(state, ends[seat])
        for seat, contestant in enumerate(seated)
    )
    return GameRecord(
        game=game,
        seed=seed,
        variant=variant,
        names=(seated[0].name, seated[1].name),
        outcomes=ends,
        returns=tuple(returns),
        turns=tuple(turns),
        reflections=reflections,
        seconds=time.monotonic() - began,
    )


@dataclass(frozen=True, slots=True)
class MatchRules:
    """When a match ends besides the evaluator's stops, and how many games of it are played at once."""

    seconds: float = MATCH.seconds
    #: At least so many games, in whole pairs; None for as many as there is time for.
    games: int | None = None
    base_seed: int = 42
    #: With 1 it is the evaluator's match. With more, so many series of games, each with a memory of its own.
    at_once: int = 1


@dataclass(slots=True)
class MatchResult:
    """The result of a match, seen from the first side."""

    game: str
    names: tuple[str, str]
    wins: int = 0
    draws: int = 0
    losses: int = 0
    #: By side: forfeits by kind.
    forfeits: tuple[Counter[Forfeit], Counter[Forfeit]] = field(
        default_factory=lambda: (Counter(), Counter())
    )
    turns: tuple[int, int] = (0, 0)
    seconds: float = 0.0
    ended: str = ""
    #: Why games could not be played.
    failure: str = ""
    #: By side: games lost in a row.
    _in_a_row: list[int] = field(default_factory=lambda: [0, 0])

    @property
    def games(self) -> int:
        """The number of games played."""
        return self.wins + self.draws + self.losses

    @property
    def score(self) -> float | None:
        """The share of points, a draw being half of one; None before a game."""
        return (self.wins + self.draws / 2) / self.games if self.games else None

    def add(self, record: GameRecord, seat: int) -> None:
        """Count a game in which the first side had this seat."""
        ended = record.outcomes[seat]
        self.wins += ended is GameOutcome.WIN
        self.draws += ended is GameOutcome.DRAW
        self.losses += ended is GameOutcome.LOSS
        for side, theirs in enumerate((ended, ended.other())):
            self._in_a_row[side] = self._in_a_row[side] + 1 if theirs is GameOutcome.LOSS else 0
        if record.forfeit:
            loser, kind = record.forfeit
            self.forfeits[0 if loser == seat else 1][kind] += 1
        mine = sum(turn.seat == seat for turn in record.turns)
        self.turns = (self.turns[0] + mine, self.turns[1] + len(record.turns) - mine)

    def stop(self) -> str:
        """Why the evaluator would end the match after this pair of games; empty if it would not."""
        for side, name in enumerate(self.names):
            if self.forfeits[side].total() >= MATCH.forfeits:
                return f"{name} forfeited {self.forfeits[side].total()} games"
            limit = MATCH.losses if self.games <= MATCH.losses else 2 * MATCH.losses
            if self._in_a_row[side] >= limit:
                return f"{name} lost {self._in_a_row[side]} games in a row"
        return ""


@contextmanager
def threads_until_interrupted(
    count: int, name: str, interrupted: threading.Event
) -> Iterator[ThreadPoolExecutor]:
    """A pool whose threads look at `interrupted`. Ctrl-C sets it and waits for what they are doing; a second
    one does not wait, nor does an error."""
    pool = ThreadPoolExecutor(count, name)
    try:
        try:
            yield pool
        except KeyboardInterrupt:
            interrupted.set()
        except BaseException:
            interrupted.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()
    except KeyboardInterrupt:
        interrupted.set()
        pool.shutdown(wait=False, cancel_futures=True)


#: Called after each game, by one thread at a time.
OnGame = Callable[[MatchResult, GameRecord], None]
#: Makes both sides, new ones for each series of games.
Sides = Callable[[], tuple[Contestant, Contestant]]


def play_match(
    game: str, sides: Sides, rules: MatchRules, on_game: OnGame, now: Callable[[], float] = time.monotonic
) -> MatchResult:
    """Play pairs until the evaluator would stop, the time is over or enough games are played. Ctrl-C and a
    failure of a model, a server or a disk end the match too: what was played before counts."""
    began = now()
    first = sides()
    result = MatchResult(game, (first[0].name, first[1].name))
    lock, interrupted = threading.Lock(), threading.Event()
    pairs = _pairs(rules)

    def next_seed() -> int | None:
        with lock:
            if not result.ended and result.games and now() - began >= rules.seconds:
                result.ended = "time is over"
            seed = None if result.ended else next(pairs, None)
            if seed is None and not result.ended:
                result.ended = "all games played"
            return seed

    def play_series(one: Contestant, other: Contestant) -> None:
        while (seed := next_seed()) is not None:
            try:
                played = [
                    (play_game(game, seed, (one, other), interrupted.is_set), 0),
                    (play_game(game, seed, (other, one), interrupted.is_set), 1),
                ]
                with lock:
                    for record, seat in played:
                        result.add(record, seat)
                        on_game(result, record)
                    result.ended = result.ended or result.stop()
            except GameStopped:
                return
            except (GodMinerError, OSError) as error:
                with lock:
                    result.ended = result.ended or "an error"
                    result.failure = result.failure or str(error)
            except BaseException:
                with lock:
                    result.ended = result.ended or "an error"
                raise

    with threads_until_interrupted(rules.at_once, "games", interrupted) as pool:
        if rules.at_once == 1:
            play_series(*first)
        else:
            series = [
                pool.submit(play_series, *(sides() if number else first)) for number in range(rules.at_once)
            ]
            for one in series:
                one.result()
    if interrupted.is_set():
        result.ended = INTERRUPTED
    result.seconds = now() - began
    return result


def _pairs(rules: MatchRules) -> Iterator[int]:
    """The seeds of the pairs, as many as are asked for."""
    left = None if rules.games is None else (rules.games + 1) // 2
    for seed in seeds(rules.base_seed):
        if left == 0:
            return
        left = None if left is None else left - 1
        yield seed
