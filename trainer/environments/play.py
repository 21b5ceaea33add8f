"""Play matches of the evaluator's kind: python -m trainer.environments.play MODEL --game G --against …

MODEL and each --against are a directory, the address of a server, or one of the players random, expert and
mcts:N. Progress goes to stderr, the table or the JSON to stdout.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.domain.errors import GodMinerError
from trainer.environments import tables
from trainer.environments.games import PVP_GAMES, board_game
from trainer.environments.match import (
    Choose,
    Contestant,
    GameRecord,
    MatchResult,
    MatchRules,
    ModelContestant,
    PlayerContestant,
    play_match,
)
from trainer.environments.models import TURN_SECONDS, ChatModel, EndpointModel, LocalModel
from trainer.environments.tool_calls import ParserName
from trainer.environments.transcript import match_folder, write_transcript

if TYPE_CHECKING:
    import pyspiel

AT_ONCE = 8
_SAY_EVERY_S = 5.0


class BadContestant(GodMinerError):
    """What was named is neither a model nor a player."""

    code = "bad_contestant"


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How models are loaded and asked."""

    base: Path | None = None
    tokenizer: Path | None = None
    parser: ParserName | None = None
    turn_seconds: float = TURN_SECONDS
    seed: int = 42


@dataclass(frozen=True, slots=True)
class MatchEntry:
    """Who can be seated in any match."""

    name: str
    is_model: bool
    #: Makes a new one for each series of games, with the name that it has there.
    contestant: Callable[[str], Contestant]


def entry_for(text: str, options: ModelOptions) -> MatchEntry:
    """Make an entry of what a person named; a model is loaded once for all matches."""
    if text == "random":
        return _player(text, _random)
    if text == "expert":
        return _player(text, _expert())
    if text == "mcts" or text.startswith("mcts:"):
        return _player(text, _mcts(text.partition(":")[2]))
    if text.startswith(("http://", "https://")):
        served = EndpointModel(text, tokenizer=options.tokenizer, turn_seconds=options.turn_seconds)
        return model_entry(text.partition("://")[2].replace("/v1", ""), served, options.seed)
    folder = Path(text)
    if not folder.is_dir():
        raise BadContestant(
            f"{text!r} is no directory; name a model's directory, http://HOST:PORT/v1, "
            "random, expert, mcts or mcts:N"
        )
    made = LocalModel(folder, base=options.base, parser=options.parser, turn_seconds=options.turn_seconds)
    return model_entry(folder.resolve().name, made, options.seed)


def model_entry(name: str, model: ChatModel, seed: int) -> MatchEntry:
    """An entry for a model that is loaded already."""
    return MatchEntry(name, True, lambda shown: ModelContestant(shown, model, seed))


def _player(name: str, make: Callable[[str, pyspiel.Game, int, int], Choose]) -> MatchEntry:
    return MatchEntry(name, False, lambda shown: PlayerContestant(shown, make))


def _random(game: str, loaded: pyspiel.Game, seat: int, seed: int) -> Choose:
    import random

    draw = random.Random(seed + seat)  # noqa: S311 - no secret
    return lambda state: int(draw.choice(state.legal_actions()))


def _mcts(simulations: str) -> Callable[[str, pyspiel.Game, int, int], Choose]:
    if simulations and not (simulations.isdecimal() and int(simulations) > 0):
        raise BadContestant(f"mcts:{simulations}: the number of simulations is 1 or more")

    def make(game: str, loaded: pyspiel.Game, seat: int, seed: int) -> Choose:
        search = importlib.import_module("trainer.environments.players.mcts").MctsPlayer
        choose: Choose = search(loaded, int(simulations or board_game(game).simulations), seed + seat).choose
        return choose

    return make


def _expert() -> Callable[[str, pyspiel.Game, int, int], Choose]:
    """Our own players: one for all matches of a game, because what they have computed is large."""
    player_for = importlib.import_module("trainer.environments.players").player_for
    players: dict[str, Any] = {}
    lock = threading.Lock()

    def make(game: str, loaded: pyspiel.Game, seat: int, seed: int) -> Choose:
        with lock:
            if game not in players:
                players[game] = player_for(game)
        player = players[game]

        def choose(state: pyspiel.State) -> int:
            with lock:
                return int(player.choose(state))

        return choose

    return make


def pairings(entries: Sequence[MatchEntry], group: bool) -> list[tuple[MatchEntry, MatchEntry]]:
    """The first against each other, or everybody against everybody."""
    if group:
        return list(itertools.combinations(entries, 2))
    return [(entries[0], other) for other in entries[1:]]


def play_all(
    games: Sequence[str],
    entries: Sequence[MatchEntry],
    rules: MatchRules,
    *,
    group: bool = False,
    output: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[MatchResult]:
    """Play all matches one after the other, and keep the transcripts."""
    for game in games:
        for one, other in pairings(entries, group):
            folder = match_folder(output, game, (one.name, other.name)) if output else None
            result = play_match(
                game,
                lambda one=one, other=other: (one.contestant(one.name), other.contestant(other.name)),  # type: ignore[misc]
                rules,
                _Progress(folder, say),
            )
            say(_state(result) + f", {result.ended}")
            yield result


class _Progress:
    """Write the transcript of each game, and say now and then how the match stands."""

    def __init__(self, folder: Path | None, say: Callable[[str], None]) -> None:
        self._folder, self._say, self._next = folder, say, 0.0

    def __call__(self, result: MatchResult, record: GameRecord) -> None:
        if self._folder is not None:
            write_transcript(self._folder, result.games, record)
        if time.monotonic() >= self._next:
            self._say(_state(result))
            self._next = time.monotonic() + _SAY_EVERY_S


def _state(result: MatchResult) -> str:
    forfeits = sum(side.total() for side in result.forfeits)
    names = " : ".join(result.names)
    counts = f"{result.wins} won, {result.draws} drawn, {result.losses} lost, {forfeits} forfeited"
    return f"{result.game} {names}: {counts}"


def report_lines(results: Sequence[MatchResult], entries: Sequence[MatchEntry], group: bool) -> list[str]:
    """What people read at the end."""
    lines = tables.match_table(results)
    if group:
        names = [entry.name for entry in entries]
        lines += ["", *tables.group_table(tables.group_scores(results, names), names)]
    return lines


def report(results: Sequence[MatchResult], entries: Sequence[MatchEntry], group: bool) -> Mapping[str, Any]:
    """The same for machines."""
    facts: dict[str, Any] = {"matches": [tables.as_json(result) for result in results]}
    if group:
        facts["rank_quantiles"] = tables.group_scores(results, [entry.name for entry in entries])
    return facts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="environments play", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--game", action="append", choices=PVP_GAMES, default=[])
    parser.add_argument("--against", action="append", default=[])
    parser.add_argument("--group", action="store_true")
    parser.add_argument("--games", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--at-once", type=int)
    parser.add_argument("--turn-seconds", type=float, default=TURN_SECONDS)
    parser.add_argument("--base", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--parser", type=ParserName, choices=list(ParserName))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--json", action="store_true", dest="as_json")
    return parser


def _entries(texts: Sequence[str], options: ModelOptions) -> list[MatchEntry]:
    entries = [entry_for(text, options) for text in texts]
    names = [entry.name for entry in entries]
    # The same name twice: a model against itself, or directories of one name.
    return [
        MatchEntry(f"{one.name}#{names[: place + 1].count(one.name)}", one.is_model, one.contestant)
        if names.count(one.name) > 1
        else one
        for place, one in enumerate(entries)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Play what the command line asks for; 0 when all matches were played. What ended before a failure is
    reported."""
    asked = _parser().parse_args(arguments)
    options = ModelOptions(asked.base, asked.tokenizer, asked.parser, asked.turn_seconds, asked.seed)
    games = asked.game or list(PVP_GAMES)

    def say(text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    results: list[MatchResult] = []
    failed = False
    try:
        entries = _entries([asked.model, *(asked.against or ["mcts"])], options)
        at_once = asked.at_once or (AT_ONCE if any(entry.is_model for entry in entries) else 1)
        seconds = asked.seconds or board_game(games[0]).evaluation_seconds
        rules = MatchRules(seconds, asked.games, asked.seed, at_once)
        for result in play_all(games, entries, rules, group=asked.group, output=asked.output, say=say):
            results.append(result)
    except GodMinerError as error:
        say(str(error))
        if not results:
            return 1
        failed = True
    group = asked.group and not failed
    facts = report(results, entries, group)
    if asked.output:
        asked.output.mkdir(parents=True, exist_ok=True)
        (asked.output / "results.json").write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
        say(f"transcripts: {asked.output}")
    text = json.dumps(facts) if asked.as_json else "\n".join(report_lines(results, entries, group))
    sys.stdout.write(text + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
