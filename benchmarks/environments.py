"""Expert players against tree search as strong as the evaluator's, and how fast they label states.

Needs the training environment's Python in GOD_MINER_TRAINING_PYTHON. The games, their variants, openings and
deals are those of the evaluator, each seed from both seats. The search clones the true state: it sees the
opponent's dice and cards, and on goofspiel's second seat the bid of the round.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

from benchmarks.report import Report
from benchmarks.training_python import reported

SEEDS, QUICK_SEEDS = 100, 20
#: By game: the least share of games to win; draws count half.
BARS = {
    "gin_rummy": 0.5,
    "liars_dice": 0.5,
    "leduc_poker": 0.5,
    "othello": 0.6,
    "clobber": 0.7,
    "goofspiel": 0.6,
}
#: Gin games that one task asks for, and the cores of its machine.
GIN_GAMES, CORES = 6_000, 24


def run(quick: bool, games: tuple[str, ...] = ()) -> Report:
    unknown = sorted(set(games) - set(BARS))
    if unknown:
        raise SystemExit(f"no game is called {', '.join(unknown)}; there are {', '.join(BARS)}")
    asked = {"games": list(games or BARS), "seeds": QUICK_SEEDS if quick else SEEDS}
    report = Report(
        "Experts against tree search: 50 simulations, liar's dice 225; 1 rollout, uct 2",
        (
            "game",
            "won",
            "95 %",
            "first seat",
            "second seat",
            "bar",
            "labels/s and core",
            "labels/game",
            "start",
        ),
    )
    report.data["cases"] = []
    for found in reported("benchmarks.environments_worker", asked):
        report.data["cases"].append(found)
        report.rows += [_row(found)] if "seats" in found else []
        report.notes += _notes(found)
    report.notes += _NOTES
    return report


def wilson(won: float, games: int, z: float = 1.96) -> tuple[float, float]:
    """The confidence interval of a share."""
    share, square = won / games, z * z / games
    middle = share + square / 2
    half = z * sqrt(share * (1 - share) / games + square / (4 * games))
    return (middle - half) / (1 + square), (middle + half) / (1 + square)


def _row(found: dict[str, Any]) -> tuple[str, ...]:
    first, second = found["seats"]
    games = 2 * found["seeds"]
    low, high = wilson(first + second, games)
    return (
        found["name"],
        f"{(first + second) / games:.1%}",
        f"{low:.1%} – {high:.1%}",
        f"{first / found['seeds']:.1%}",
        f"{second / found['seeds']:.1%}",
        f"≥ {BARS[found['game']]:.0%}" if found["game"] == found["name"] else "",
        f"{found['labels'] / max(found['label_s'], 1e-9):,.0f}",
        f"{found['labels'] / games:.1f}",
        f"{found['start_s']:.1f} s",
    )


def _notes(found: dict[str, Any]) -> list[str]:
    if "text" in found:
        return [found["text"]]
    if found["name"] != "gin_rummy":
        return []
    ours, search = (found[part] / (2 * found["seeds"]) for part in ("label_s", "search_s"))
    minutes = (ours + search) * GIN_GAMES / CORES / 60
    return [
        f"gin_rummy: {ours + search:.2f} s of processor time a game, {search:.2f} of them the search's: "
        f"{GIN_GAMES:,} games on {CORES} cores take {minutes:.1f} min (bar: 7)."
    ]


_NOTES = (
    "Times are processor time of one thread: other work on the machine counts little. Start: compiling, and "
    "for liar's dice solving, once in a process; forked ones inherit it.",
    "Leduc is even by symmetry: here neither side folds, and each deal is played from both seats.",
)
