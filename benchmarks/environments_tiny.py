"""A little model that is trained to play on the CPU, as a tournament's container trains, and then plays.

Needs the training environment's Python in GOD_MINER_TRAINING_PYTHON. A random model of half a million weights
with a vocabulary of the game's own texts gets the arguments of an environment task: it makes its rows, trains
and submits. What it submitted plays by the evaluator's rules. It shows that rows, template, training and play
fit together, not how strong a usual model gets.
"""

from __future__ import annotations

from typing import Any

from benchmarks.environments import wilson
from benchmarks.report import Report
from benchmarks.training_python import reported

GAMES = ("leduc_poker",)
#: Of the container; it ends sooner when it has been through its rows.
HOURS, PLAYED, QUICK_PLAYED = 0.33, 200, 40
#: Against a random player: the least share of games to win, and the most that may be forfeited.
LEAST_SCORE, MOST_FORFEITS = 0.6, 0.05


def run(quick: bool, games: tuple[str, ...] = ()) -> Report:
    asked = {"games": list(games or GAMES), "hours": HOURS, "played": QUICK_PLAYED if quick else PLAYED}
    return report_of(list(reported("benchmarks.environments_tiny_worker", asked)))


def report_of(found: list[dict[str, Any]]) -> Report:
    report = Report(
        "A little model, trained on the CPU from the arguments of an environment task",
        ("game", "weights", "exit", "steps", "CPU", "against", "won", "95 %", "forfeits"),
    )
    report.data["cases"] = found
    for one in found:
        for match in one["against"]:
            won, games = match["score"] * match["games"], match["games"]
            low, high = wilson(won, games)
            report.rows.append(
                (
                    one["game"],
                    f"{one['params']:,}",
                    str(one["exit"]),
                    str(one["steps"]),
                    f"{one['cpu'] / 60:.1f} min",
                    match["opponent"],
                    f"{match['score']:.0%} of {games}",
                    f"{low:.0%} to {high:.0%}",
                    str(sum(match["forfeits"].values())),
                )
            )
        report.notes += _missed(one)
    return report


def _missed(one: dict[str, Any]) -> list[str]:
    [match] = [match for match in one["against"] if match["opponent"] == "random"]
    forfeits = sum(match["forfeits"].values()) / match["games"]
    notes = []
    if match["score"] < LEAST_SCORE:
        notes.append(
            f"{one['game']}: {match['score']:.0%} against random moves, {LEAST_SCORE:.0%} is asked for"
        )
    if forfeits > MOST_FORFEITS:
        notes.append(f"{one['game']}: {forfeits:.0%} forfeited, {MOST_FORFEITS:.0%} is allowed")
    return notes
