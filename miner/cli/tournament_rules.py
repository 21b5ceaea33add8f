"""`god-miner tournament rules`: the rules of tournaments, their age, and what upstream has changed since."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from miner.cli.options import AsJson, load_settings
from miner.cli.output import echo, echo_json

if TYPE_CHECKING:
    from core.domain.tournament_rules import RoundTask, TournamentRules
    from miner.api.tournament import RulesCheck

_WIDTH = 80
#: Below the text of a round.
_UNDER = " " * 12


def rules(
    check: Annotated[
        bool, typer.Option("--check", help="Compare with upstream's present files: what has changed.")
    ] = False,
    upstream: Annotated[
        str | None,
        typer.Option(metavar="DIR|URL", help="Compare with a checkout, or with files below an address."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show every rule with its source.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the rules of tournaments: when they begin, what is played, who goes on.

    With --check upstream's files of constants are read again, and what has changed is said in words, with
    what of ours depends on it. Exit code 1 if something changed, or could not be compared."""
    found = _compared(upstream) if check or upstream else None
    if as_json:
        echo_json(_as_data(found))
    else:
        for line in _check_lines(found) if found else _lines(datetime.now(UTC), everything):
            echo(line)
    if found and (found.changes or found.problem):
        raise typer.Exit(1)


def _compared(upstream: str | None) -> RulesCheck:
    from miner.tournament.rules_watch import RAW_UPSTREAM, check_rules

    return check_rules(
        upstream or RAW_UPSTREAM,
        cache=load_settings().data_dir / "tournament" / "answers",
        say=lambda line: echo(line, err=True),
    )


def _as_data(found: RulesCheck | None) -> dict[str, object]:
    from core.domain.tournament_rules import AS_OF, FACTS, TOURNAMENTS
    from miner.tournament.rules import next_start
    from miner.tournament.rules_watch import shown

    facts = [
        {
            "name": fact.name,
            "value": shown(fact.value),
            "file": fact.source.path,
            "commit": fact.source.commit,
            "day": fact.source.day.isoformat(),
            "constant": fact.constant,
            "uses": fact.uses,
        }
        for fact in FACTS
    ]
    now = datetime.now(UTC)
    tournaments = {
        str(kind): {**one.model_dump(mode="json"), "next_start": next_start(kind, now).isoformat()}
        for kind, one in TOURNAMENTS.items()
    }
    check = found.model_dump(mode="json") if found else None
    return {"as_of": AS_OF, "check": check, "tournaments": tournaments, "facts": facts}


def _check_lines(found: RulesCheck) -> Iterator[str]:
    for change in found.changes:
        yield from _wrapped(f"{change.name}: {change.old} → {change.new}")
        where = f"{change.constant} in {change.file}" if change.constant else ""
        yield from _wrapped(where, "    ") if where else ()
        yield from _wrapped(f"depends on it: {change.uses}", "    ")
    if found.problem:
        yield from _wrapped(f"not compared: {found.problem}")
    if found.compared:
        changed = f"{len(found.changes)} changed" if found.changes else "none has changed"
        yield f"{found.compared} rules compared: {changed} since {found.as_of}"
    if found.problem:
        yield _age_line()


def _age_line() -> str:
    from core.domain.tournament_rules import AS_OF

    days = (datetime.now(UTC).date() - datetime.fromisoformat(AS_OF).date()).days
    return f"the rules here are of {AS_OF}, {days} days old"


def _lines(now: datetime, everything: bool) -> Iterator[str]:
    from core.domain.tournament_rules import TOURNAMENTS, UPSTREAM, emission_shares

    yield from _wrapped(f"Tournaments of {UPSTREAM}; {_age_line()}.")
    shares = emission_shares({})
    for kind, one in TOURNAMENTS.items():
        yield ""
        yield from _tournament_lines(one, shares[kind], now)
    yield ""
    if everything:
        yield from _fact_lines()
    else:
        yield "Every rule with its source: --all; what upstream has changed since: --check"


def _fact_lines() -> Iterator[str]:
    from core.domain.tournament_rules import FACTS
    from miner.tournament.rules_watch import shown

    yield "Every rule, by upstream's file; * is not compared by --check"
    for source, group in groupby(sorted(FACTS, key=lambda fact: fact.source), key=lambda fact: fact.source):
        yield ""
        yield f"{source}, {source.day}"
        for fact in group:
            mark = " " if fact.constant else "*"
            yield from _wrapped(f"{mark} {fact.name}: {shown(fact.value)}", "  ")


def _tournament_lines(one: TournamentRules, share: float, now: datetime) -> Iterator[str]:
    from miner.tournament.rules import next_start

    start = next_start(one.kind, now)
    yield from _wrapped(
        f"{one.kind}: next {start:%a %Y-%m-%d %H:%M} UTC, fee {one.fee_tao:g} TAO, "
        f"{one.least_entries} entries needed, {share:.0%} of the emission at balanced entries"
    )
    for each in one.rounds:
        joined = " or " if each.drawn else ", "
        yield from _wrapped(f"{each.name:<9} {each.text}", "  ", _UNDER)
        yield from _wrapped(joined.join(_played(task, each.drawn) for task in each.tasks), _UNDER, _UNDER)


def _played(one: RoundTask, drawn: bool) -> str:
    from miner.tournament.rules import TASKS, gpus_of

    text = f"{one.count} {one.task}" if one.count > 1 else one.task
    if one.pool:
        text += " (the newer models)"
    if one.task in TASKS:
        task, sizes = TASKS[one.task], (one.least_b or 0.0, one.most_b or 0.0)
        least, most = (gpus_of(task, size) for size in sizes)
        if one.most_b is not None:
            text += f" of {sizes[0]:g}-{sizes[1]:g}B"
        text += f" on {least}-{most} GPUs" if least != most else f" on {most} GPU{'s' * (most > 1)}"
    return f"{text} {one.share:.0%}" if drawn else text


def _wrapped(text: str, indent: str = "", more: str | None = None) -> list[str]:
    after = indent + "    " if more is None else more
    wrapped = textwrap.TextWrapper(_WIDTH, indent, after, break_on_hyphens=False, break_long_words=False)
    return wrapped.wrap(text)
