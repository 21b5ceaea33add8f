"""Score an environment task inside the image that trained it: its model plays by `trainer.environments.play`.

Validators let the entries of a group play each other. Here the submission plays the model that it began with
and, where one is named, another submission; of shell tasks each plays the same ones.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from core.domain.tasks import INTERCODE, PVP_GAMES
from miner.backends.docker.client import DockerClient
from miner.tournament.rehearsal.scoring import (
    AGAINST,
    BASE,
    INSIDE,
    OURS,
    REPORT,
    CannotScore,
    FolderScore,
    readable_report,
    run_scorer,
)
from miner.tournament.rules import TournamentTask

#: Games of a match, and shell tasks; with as many forfeits a match ends.
GAMES = 20
#: Without a GPU, where an answer takes seconds, or to see whether there is a score at all.
FEW_GAMES = 2
#: No pair of games of a match begins later, nor a shell task of a model.
MATCH_S = 300.0


def score_games(
    client: DockerClient,
    image: str,
    task: TournamentTask,
    *,
    folder: Path,
    base: Path,
    repository: Path,
    brief: bool = False,
    against: Path | None = None,
    gpus: Sequence[str] = (),
) -> FolderScore | None:
    """Score by the mean over the task's environments: the share of points against the base, or the reward of
    shell tasks. None where none of the environments is played here. `folder` is a scratch directory; `brief`:
    whether it has a score at all."""
    began = time.monotonic()
    names = [name for name in task.dataset["environment_names"] if name in (*PVP_GAMES, INTERCODE)]
    if not names:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    seen = {base: BASE, repository: OURS}
    others = [BASE]
    if against is not None:
        seen[against] = AGAINST
        others.append(AGAINST)
    games = GAMES if gpus and not brief else FEW_GAMES
    arguments = ["--json", "--base", BASE, "--games", str(games), "--seconds", str(MATCH_S)]
    for option, values in (("--against", others), ("--game", names)):
        arguments += [word for value in values for word in (option, value)]
    command = shlex.join(["python", "-m", "trainer.environments.play", OURS, *arguments])
    report = run_scorer(client, image, f"{command} > {INSIDE / REPORT}", folder, seen, gpus)
    with readable_report():
        matches, shells = report["matches"], report.get("shell_tasks", [])
        against_base = _points(matches, shells, BASE)
        against_other = _points(matches, shells, AGAINST)
        notes = tuple(_notes(matches, shells))
        failure = str(report.get("failure", ""))
        if failure:
            notes = (f"not everything was played: {failure}", *notes)
    if not against_base:
        why = failure or "no game or shell task was played to its end"
        raise CannotScore(f"there is no score against the base: {why}")
    ours, theirs = _means(against_base)
    other = _means(against_other)[1] if against_other else None
    return FolderScore(
        metric=f"points of games and shell tasks, {', '.join(against_base)}",
        base=theirs,
        ours=ours,
        lower_is_better=False,
        against=other,
        wins=_outranks(against_other) if set(against_other) == set(names) else None,
        seconds=round(time.monotonic() - began, 1),
        notes=notes,
    )


def _points(
    matches: Sequence[Mapping[str, Any]], shells: Sequence[Mapping[str, Any]], against: str
) -> dict[str, tuple[float, float]]:
    """By environment: ours, and the other's."""
    other = Path(against).name
    found = {}
    for match in matches:
        if match["names"][1] == other and match["score"] is not None:
            found[str(match["game"])] = (float(match["score"]), 1 - float(match["score"]))
    rewards = {
        str(one["name"]): {task["question"]: float(task["reward"]) for task in one["tasks"]} for one in shells
    }
    mine, theirs = rewards.get(Path(OURS).name, {}), rewards.get(other, {})
    # Time may have been over for one of them before the other had played as many.
    if both := [question for question in mine if question in theirs]:
        found[INTERCODE] = (fmean(mine[one] for one in both), fmean(theirs[one] for one in both))
    return found


def _means(points: Mapping[str, tuple[float, float]]) -> tuple[float, float]:
    ours, other = zip(*points.values(), strict=True)
    return sum(ours) / len(points), sum(other) / len(points)


def _outranks(points: Mapping[str, tuple[float, float]]) -> bool:
    """Whether ours is first, and no worse at shell tasks: of two entries each environment's better one has
    its whole point."""
    ours, other = points.get(INTERCODE, (0.0, 0.0))
    return ours >= other and sum((mine > theirs) - (mine < theirs) for mine, theirs in points.values()) > 0


def _notes(matches: Sequence[Mapping[str, Any]], shells: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was played; forfeits are what a training has to get rid of first."""
    lines = []
    for match in matches:
        counts = f"{match['wins']} won, {match['draws']} drawn, {match['losses']} lost"
        kinds = ", ".join(f"{count} {kind}" for kind, count in match["forfeits"][0].items())
        forfeited = f"; forfeited {kinds}" if kinds else ""
        lines.append(f"{match['game']} against {match['names'][1]}: {counts}{forfeited}")
    for one in shells:
        reward = "none" if one["reward"] is None else f"{float(one['reward']):.2f}"
        submitted = f"{one['submitted']} of {len(one['tasks'])} tasks submitted, {one['ended']}"
        lines.append(f"{INTERCODE}, {one['name']}: reward {reward}, {submitted}")
    return lines
