"""The result of a rehearsal against another entry: where we win by the gate of the boss round."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from core.domain.tournament_rules import AS_OF, LEAST_GAIN
from core.domain.units import show_seconds
from miner.tournament.rehearsal.report import Rehearsal, TaskRehearsal
from miner.tournament.rules import TASKS, task_kind

_WIDTH = 80


class Verdict(StrEnum):
    WON = "won"
    LOST = "lost"
    #: Nothing separates the two. A text's boss round then has one more task.
    DRAWN = "drawn"
    #: Both have trained, and nothing here compares them.
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class SparredTask:
    """One task: ours beside the opponent's."""

    task: str
    verdict: Verdict
    why: str
    ours: float | None = None
    theirs: float | None = None
    lower_is_better: bool = True
    p_win: float | None = None
    #: Of the last attempt, and until the first submission.
    our_seconds: float | None = None
    their_seconds: float | None = None
    our_first_s: float | None = None
    their_first_s: float | None = None


def sparred(report: Rehearsal) -> list[SparredTask]:
    return [_task(one) for one in report.tasks]


def spar_data(report: Rehearsal) -> list[dict[str, Any]]:
    return [asdict(one) for one in sparred(report)]


def _task(task: TaskRehearsal) -> SparredTask:
    verdict, why = _verdict(task)
    score: Mapping[str, Any] = task.score or {}
    other = task.opponent
    compared = score.get("against") is not None
    return SparredTask(
        task.name,
        verdict,
        why,
        ours=score.get("ours"),
        theirs=score.get("against"),
        lower_is_better=bool(score.get("lower_is_better", True)),
        p_win=score.get("p_win") if compared else None,
        our_seconds=task.attempts[-1].seconds if task.attempts else None,
        their_seconds=other.attempts[-1].seconds if other and other.attempts else None,
        our_first_s=task.first_submission_s,
        their_first_s=other.first_submission_s if other else None,
    )


def _verdict(task: TaskRehearsal) -> tuple[Verdict, str]:
    """Decide by the boss round: who submits nothing loses, and the champion stays if nobody submits."""
    other = task.opponent
    if other is None or not task.complete:
        # Ours failed before the opponent's turn, or the rehearsal was interrupted.
        return (Verdict.LOST if task.problems else Verdict.UNKNOWN), _first(task.problems, "not finished")
    if other.problems:
        return Verdict.WON, f"the opponent fails: {other.problems[0]}"
    if task.score is None:
        # A submission that evaluators reject is a problem; an image without our scorer is none.
        why = next(
            (text for text in task.deviations if "scorer" in text), "there is no score of this kind here"
        )
        return (Verdict.LOST if task.problems else Verdict.UNKNOWN), _first(task.problems, why)
    over = task.score.get("over_against")
    if isinstance(over, dict):
        if over.get("wins") == 0 and over.get("losses") == 0:
            return Verdict.DRAWN, "no row differs by enough to count"
        return (Verdict.WON if over["won"] else Verdict.LOST), str(over["reason"])
    wins = task.score.get("wins")
    if wins is None:
        return Verdict.UNKNOWN, "not everything was compared"
    return (Verdict.WON if wins else Verdict.LOST), _margin(task.score)


def _first(problems: list[str], otherwise: str) -> str:
    return problems[0] if problems else otherwise


def _margin(score: Mapping[str, Any]) -> str:
    """Our gain over the opponent, as a share of its score."""
    ours, theirs = float(score["ours"]), float(score["against"])
    gain = theirs - ours if score["lower_is_better"] else ours - theirs
    if not theirs:
        return f"{gain:+.4f}"
    return f"{abs(gain / theirs):.2%} {'better' if gain >= 0 else 'worse'}, {LEAST_GAIN:.0%} better needed"


def spar_lines(report: Rehearsal) -> Iterator[str]:
    """The comparison for people."""
    assert report.opponent is not None
    tasks = sparred(report)
    yield from _wrapped(f"{report.source} at {report.commit[:12]}")
    yield from _wrapped(f"against {report.opponent.source} at {report.opponent.commit[:12]}")
    yield ""
    heads = f"{'opponent':>10}{'ours':>10}{'P(win)':>8}"
    yield f"{'task':<16}{heads}  {'result':<8} {'trained: opponent, ours':>24}"
    for one in tasks:
        numbers = f"{_number(one.theirs):>10}{_number(one.ours):>10}{_share(one.p_win):>8}"
        times = f"{_time(one.their_seconds)}, {_time(one.our_seconds)}"
        yield f"{one.task:<16}{numbers}  {one.verdict:<8} {times:>24}"
    yield ""
    for one in tasks:
        yield from _wrapped(f"{one.task}: {one.verdict}: {one.why}", "  ")
        if one.our_first_s is not None and one.their_first_s is not None:
            yield from _wrapped(
                f"  first submission after {_time(one.our_first_s)}, the opponent's after "
                f"{_time(one.their_first_s)}",
                "  ",
            )
    yield from _deviation_lines(report)
    yield ""
    lost = [one.task for one in tasks if one.verdict is Verdict.LOST]
    won = sum(one.verdict is Verdict.WON for one in tasks)
    where = f"; we lose {', '.join(lost)}" if lost else ""
    drawn = sum(one.verdict is Verdict.DRAWN for one in tasks)
    draws = f", {drawn} drawn" if drawn else ""
    yield from _wrapped(f"{won} of {len(tasks)} won{draws}, by the gate of {AS_OF}{where}")
    yield f"report and logs: {report.output}"
    kind = TASKS[task_kind(tasks[0].task)].tournament
    yield f"next: god-miner tournament odds {kind} --report {report.output}/report.json"


def _deviation_lines(report: Rehearsal) -> Iterator[str]:
    """List differences from what validators do, each once."""
    found: dict[str, list[str]] = {}
    for task in report.tasks:
        for text in task.deviations:
            found.setdefault(text, []).append(task.name)
    if found:
        yield ""
    for text, names in found.items():
        where = "" if len(names) == len(report.tasks) else f"{', '.join(names)}: "
        yield from _wrapped(f"~ {where}{text}", "  ")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _time(seconds: float | None) -> str:
    return "–" if seconds is None else show_seconds(seconds)


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)
