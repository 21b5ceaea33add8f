"""Games played by players, for the tests of all of them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pyspiel

GOOFSPIEL = {"players": 2, "imp_info": True, "points_order": "random", "returns_type": "win_loss"}
PARAMETERS = {
    "gin_rummy": {"hand_size": 8, "knock_card": 10},
    "liars_dice": {"players": 2, "numdice": 5},
    "leduc_poker": {"players": 2},
    "othello": {},
    "clobber": {"rows": 4, "columns": 5},
    "goofspiel": {**GOOFSPIEL, "num_cards": 8},
}

Choice = Callable[[pyspiel.State], int]
#: Gin rummy: with the nine of diamonds, three melds of three.
NO_DISCARD = [10, 36, 49, 18, 19, 20, 32, 33, *[0, 1, 13, 16, 22, 26, 29, 35], 34]


def game(name: str, **changed: int) -> pyspiel.Game:
    loaded = pyspiel.load_game(name, {**PARAMETERS[name], **changed})
    return pyspiel.convert_to_turn_based(loaded) if name == "goofspiel" else loaded


def at_random(seed: int) -> Choice:
    numbers = random.Random(seed)
    return lambda state: int(numbers.choice(state.legal_actions()))


def returns(state: pyspiel.State, choices: tuple[Choice, Choice], seed: int) -> list[float]:
    """Play a game to its end."""
    chance = random.Random(seed)
    while not state.is_terminal():
        if state.is_chance_node():
            outcomes, weights = zip(*state.chance_outcomes(), strict=True)
            state.apply_action(chance.choices(outcomes, weights)[0])
        else:
            state.apply_action(choices[state.current_player()](state))
    return list(state.returns())


def after(name: str, actions: list[int], **changed: int) -> pyspiel.State:
    state = game(name, **changed).new_initial_state()
    for action in actions:
        state.apply_action(action)
    return state


def score(name: str, choice: Choice, other: Choice, games: int, **changed: int) -> float:
    """The share of games won, draws counted half, each deal from both seats."""
    won = 0.0
    for seed in range(games):
        for seat in range(2):
            choices = (choice, other) if seat == 0 else (other, choice)
            result = returns(game(name, **changed).new_initial_state(), choices, seed)[seat]
            won += 1.0 if result > 0 else 0.5 if result == 0 else 0.0
    return won / (2 * games)
