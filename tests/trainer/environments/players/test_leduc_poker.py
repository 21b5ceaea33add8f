from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest

pyspiel = pytest.importorskip("pyspiel")

from tests.trainer.environments.players.playing import game  # noqa: E402
from trainer.environments.players.leduc_poker import LeducPlayer  # noqa: E402


def test_it_raises_while_it_may_and_never_folds() -> None:
    state = game("leduc_poker").new_initial_state()
    for card in (0, 4):
        state.apply_action(card)
    chosen = []
    while not state.is_chance_node():
        chosen.append(LeducPlayer().choose(state))
        state.apply_action(chosen[-1])
    assert chosen == [2, 2, 1]


@pytest.mark.parametrize("seat", [0, 1])
def test_nobody_wins_against_it_on_average(seat: int) -> None:
    """The value of an exact best response, wins minus losses, is that of an equal game."""
    player = LeducPlayer()
    assert best_response(game("leduc_poker"), seat, player.choose) == pytest.approx(0.0, abs=1e-12)


def best_response(loaded: pyspiel.Game, seat: int, other: Callable[[pyspiel.State], int]) -> float:
    """What a player of this seat gets who knows the other's choices, over all deals."""
    states: dict[str, list[tuple[pyspiel.State, float]]] = defaultdict(list)
    depths: dict[str, int] = {}

    def visit(state: pyspiel.State, chance: float) -> None:
        if state.is_terminal():
            return
        if state.is_chance_node():
            for action, probability in state.chance_outcomes():
                visit(state.child(action), chance * probability)
        elif state.current_player() != seat:
            visit(state.child(other(state)), chance)
        else:
            name = state.information_state_string(seat)
            states[name].append((state, chance))
            depths[name] = len(state.history())
            for action in state.legal_actions():
                visit(state.child(action), chance)

    chosen: dict[str, int] = {}

    def value(state: pyspiel.State) -> float:
        if state.is_terminal():
            result = state.returns()[seat]
            return float(result > 0) - float(result < 0)
        if state.is_chance_node():
            return sum(p * value(state.child(action)) for action, p in state.chance_outcomes())
        if state.current_player() != seat:
            return value(state.child(other(state)))
        return value(state.child(chosen[state.information_state_string(seat)]))

    root = loaded.new_initial_state()
    visit(root, 1.0)
    for name in sorted(states, key=lambda known: -depths[known]):
        here = states[name]
        chosen[name] = max(
            here[0][0].legal_actions(),
            key=lambda action: sum(chance * value(state.child(action)) for state, chance in here),
        )
    return value(root)
