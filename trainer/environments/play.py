"""Play matches of the evaluator's kind: python -m trainer.environments.play MODEL --game G --against …

MODEL and each --against are a directory, the address of a server, or one of the players random, expert and
mcts:N. Of `intercode` each model plays the same tasks, alone. Progress goes to stderr, the table or the JSON
to stdout.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from core.domain.errors import GodMinerError
from core.domain.tasks import INTERCODE, PVP_GAMES
from core.domain.tournament_rules import MATCH
from core.models.tool_parsers import ParserName
from trainer.environments import results
from trainer.environments.games import Player, board_game
from trainer.environments.intercode.machine import remove_open_folders
from trainer.environments.intercode.rehearsal import TASKS, PlayedTask, ShellRehearsal, rehearse
from trainer.environments.match import (
    INTERRUPTED,
    Choose,
    Contestant,
    GameRecord,
    MatchResult,
    MatchRules,
    ModelContestant,
    PlayerContestant,
    play_match,
)
from trainer.environments.models import ChatModel, EndpointModel, LocalModel
from trainer.environments.results import (
    match_folder,
    safe_to_print,
    shell_folder,
    write_task,
    write_transcript,
)

if TYPE_CHECKING:
    import pyspiel

AT_ONCE = 8
_SAY_EVERY_S = 5.0
#: As shells report it.
_INTERRUPTED_CODE = 130


class BadContestant(GodMinerError):
    """The name is neither of a model nor of a player."""

    code = "bad_contestant"


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options of loading and asking models."""

    base: Path | None = None
    tokenizer: Path | None = None
    parser: ParserName | None = None
    turn_seconds: float = MATCH.turn_seconds
    seed: int = 42


@dataclass(frozen=True, slots=True)
class MatchEntry:
    """A participant for any match."""

    name: str
    #: None: a player that looks at the state itself.
    model: ChatModel | None
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
            f"{text!r} is not a directory; name a model's directory, http://HOST:PORT/v1, "
            "random, expert, mcts or mcts:N"
        )
    made = LocalModel(folder, base=options.base, parser=options.parser, turn_seconds=options.turn_seconds)
    return model_entry(folder.resolve().name, made, options.seed)


def model_entry(name: str, model: ChatModel, seed: int) -> MatchEntry:
    """An entry for a model that is loaded already."""
    return MatchEntry(name, model, lambda shown: ModelContestant(shown, model, seed))


def _player(name: str, make: Callable[[str, pyspiel.Game, int, int], Choose]) -> MatchEntry:
    return MatchEntry(name, None, lambda shown: PlayerContestant(shown, make))


def _random(game: str, loaded: pyspiel.Game, seat: int, seed: int) -> Choose:
    import random

    draw = random.Random(seed + seat)  # noqa: S311 - no secret
    return lambda state: int(draw.choice(state.legal_actions()))


def _mcts(simulations: str) -> Callable[[str, pyspiel.Game, int, int], Choose]:
    if simulations and not (simulations.isdecimal() and int(simulations) > 0):
        raise BadContestant(f"mcts:{simulations}: the number of simulations is 1 or more")

    def make(game: str, loaded: pyspiel.Game, seat: int, seed: int) -> Choose:
        search = importlib.import_module("trainer.environments.selfplay").MctsPlayer
        choose: Choose = search(loaded, int(simulations or board_game(game).simulations), seed + seat).choose
        return choose

    return make


def _expert() -> Callable[[str, pyspiel.Game, int, int], Choose]:
    """Our own players: one for all matches of a game, because what they have computed is large."""
    players: dict[str, Player] = {}
    lock = threading.Lock()

    def make(game: str, loaded: pyspiel.Game, seat: int, seed: int) -> Choose:
        with lock:
            if game not in players:
                players[game] = board_game(game).player()
        player = players[game]

        def choose(state: pyspiel.State) -> int:
            with lock:
                return int(player.choose(state))

        return choose

    return make


def play_all(
    games: Sequence[str],
    entries: Sequence[MatchEntry],
    rules: MatchRules,
    *,
    output: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[MatchResult]:
    """Play the first entry against each other one, and keep the transcripts. Nothing follows Ctrl-C or a
    failure."""
    first, *others = entries
    for game in games:
        for other in others:
            folder = match_folder(output, game, (first.name, other.name)) if output else None
            result = play_match(
                game,
                lambda other=other: (first.contestant(first.name), other.contestant(other.name)),  # type: ignore[misc]
                rules,
                _Progress(folder, say),
            )
            say(_state(result) + f", {result.ended}")
            yield result
            if result.failure or result.ended == INTERRUPTED:
                return


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


def play_shells(
    entries: Sequence[MatchEntry],
    rules: MatchRules,
    *,
    output: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[ShellRehearsal]:
    """Let each model play the same shell tasks, and keep the transcripts. After Ctrl-C or a failure none
    follows."""
    for entry in entries:
        if entry.model is None:
            say(f"{entry.name} plays no {INTERCODE}: that is for models")
            continue
        progress = _ShellProgress(shell_folder(output, entry.name) if output else None, entry.name, say)
        played = rehearse(
            entry.model,
            name=entry.name,
            tasks=rules.games or TASKS,
            seed=rules.base_seed,
            at_once=rules.at_once,
            seconds=rules.seconds,
            on_task=progress,
        )
        say(f"{INTERCODE} {entry.name}: {len(played.tasks)} tasks, mean reward {played.mean:.2f}")
        yield played
        if played.failure or played.interrupted:
            return


class _ShellProgress:
    """Write the transcript of each task, and say what it earned."""

    def __init__(self, folder: Path | None, name: str, say: Callable[[str], None]) -> None:
        self._folder, self._name, self._say = folder, name, say

    def __call__(self, number: int, task: PlayedTask) -> None:
        if self._folder is not None:
            write_task(self._folder, number, task)
        self._say(f"{INTERCODE} {self._name}: task {number}, reward {task.reward:.2f}")


@dataclass
class Played:
    """The results of everything that was requested."""

    matches: list[MatchResult] = field(default_factory=list)
    shells: list[ShellRehearsal] = field(default_factory=list)

    @property
    def interrupted(self) -> bool:
        return any(one.ended == INTERRUPTED for one in self.matches) or any(
            one.interrupted for one in self.shells
        )

    @property
    def failure(self) -> str:
        """The first failure; empty if there was none."""
        failures = [one.failure for one in self.matches] + [one.failure for one in self.shells]
        return next(filter(None, failures), "")


def report_lines(played: Played) -> list[str]:
    """Return the tables that people read at the end."""
    lines = results.match_table(played.matches) if played.matches else []
    if played.shells:
        lines += [*([""] if lines else []), *results.shell_table(played.shells)]
    return lines


def report(played: Played) -> dict[str, Any]:
    """Return the results as JSON-ready data."""
    facts: dict[str, Any] = {"matches": [results.as_json(result) for result in played.matches]}
    if played.shells:
        facts["shell_tasks"] = [results.shell_as_json(one) for one in played.shells]
    return facts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="environments play", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--game", action="append", choices=[*PVP_GAMES, INTERCODE], default=[])
    parser.add_argument("--against", action="append", default=[])
    parser.add_argument("--games", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--at-once", type=int)
    parser.add_argument("--turn-seconds", type=float, default=MATCH.turn_seconds)
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
        dataclasses.replace(one, name=f"{one.name}#{names[: place + 1].count(one.name)}")
        if names.count(one.name) > 1
        else one
        for place, one in enumerate(entries)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Play what the command line asks for. Exit code 0 when all was played, 1 after a failure, 130 after
    Ctrl-C; what ended before is reported."""
    asked = _parser().parse_args(arguments)

    def say(text: str) -> None:
        sys.stderr.write(safe_to_print(text) + "\n")
        sys.stderr.flush()

    played, code, failure = Played(), 0, ""
    try:
        if asked.output:
            asked.output.mkdir(parents=True, exist_ok=True)
        entries = _entries([asked.model, *(asked.against or _opponents(asked.game))], _options(asked))
        _play(asked, entries, played, say)
    except (GodMinerError, OSError) as error:
        failure = str(error)
    except ModuleNotFoundError as error:
        failure = _missing(error)
    except KeyboardInterrupt:
        code = _INTERRUPTED_CODE
    if failure := failure or played.failure:
        say(failure)
        code = 1
    if played.interrupted:
        code = _INTERRUPTED_CODE
    if code and not (played.matches or played.shells):
        return code
    facts = {**report(played), **({"failure": failure} if failure else {})}
    text = json.dumps(facts) if asked.as_json else safe_to_print("\n".join(report_lines(played)))
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    try:
        if asked.output:
            (asked.output / "results.json").write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
            say(f"transcripts: {asked.output}")
    except OSError as error:
        say(str(error))
        code = code or 1
    return code


#: Packages that games need beside the training stack, by imported name.
_GAMES = {"pyspiel": "open-spiel", "numba": "numba"}


def _missing(error: ModuleNotFoundError) -> str:
    text = (
        f"{error.name} is missing in the environment of {sys.executable}: `make training` makes one with it"
    )
    if error.name in _GAMES:
        text += f", or add it to this one: {sys.executable} -m pip install {' '.join(_GAMES.values())}"
    return text


def _opponents(games: Sequence[str]) -> list[str]:
    """Return the default opponents: search, or nobody for shell tasks alone."""
    return [] if set(games) == {INTERCODE} else ["mcts"]


def _options(asked: argparse.Namespace) -> ModelOptions:
    return ModelOptions(asked.base, asked.tokenizer, asked.parser, asked.turn_seconds, asked.seed)


def _is_elsewhere(model: ChatModel | None) -> bool:
    return isinstance(model, EndpointModel) and not model.is_here


def _play(
    asked: argparse.Namespace, entries: Sequence[MatchEntry], played: Played, say: Callable[[str], None]
) -> None:
    games = list(dict.fromkeys(asked.game)) or list(PVP_GAMES)
    boards = [game for game in games if game != INTERCODE]
    has_models = any(entry.model for entry in entries)
    if INTERCODE in games and not has_models:
        raise BadContestant(f"{INTERCODE} is played by models: name a directory or a server")
    if INTERCODE in games and any(_is_elsewhere(entry.model) for entry in entries):
        raise BadContestant(
            f"a server elsewhere plays no {INTERCODE}: its commands could read this machine's files"
        )
    seconds = asked.seconds or board_game(boards[0] if boards else PVP_GAMES[0]).evaluation_seconds
    at_once = asked.at_once or (AT_ONCE if has_models else 1)
    rules = MatchRules(seconds, asked.games, asked.seed, at_once)
    for result in play_all(boards, entries, rules, output=asked.output, say=say):
        played.matches.append(result)
    if INTERCODE in games and not (played.failure or played.interrupted):
        for one in play_shells(entries, rules, output=asked.output, say=say):
            played.shells.append(one)


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """Do as `main` does, and end the process."""
    code = main(arguments)
    if code == _INTERRUPTED_CODE:
        # Python would wait for threads that a second Ctrl-C left in an answer.
        remove_open_folders()
        os._exit(code)
    raise SystemExit(code)


if __name__ == "__main__":
    run()
