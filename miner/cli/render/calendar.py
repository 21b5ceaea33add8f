"""The calendar of tournaments: starts, fees, weights, and what an entry is worth."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from core.domain.units import rfc3339
from miner.cli.output import echo, print_pages
from miner.cli.render.terminal import plain_table
from miner.tournament.calendar import CalendarEntry


def print_calendar(found: Sequence[CalendarEntry], missing: Sequence[str]) -> None:
    columns = ["kind", "may begin (UTC)", "fee", "emission", "prize", "pays from", "at your P(win)"]
    table = plain_table(*columns, right=columns[2:])
    for one in found:
        table.add_row(
            str(one.kind),
            f"{one.starts_at:%a %m-%d %H:%M}",
            f"{one.fee.value:g}",
            f"{100 * one.weight.value:.0f} %",
            "–" if one.prize is None else f"{one.prize:.3g}",
            _break_even(one),
            "–" if one.expected is None else f"{one.p_win:g}: {one.expected:+.2f}",
        )
    print_pages([table])
    echo("Fee, prize (of a champion, in a week) and expected value are in TAO.")
    echo("Register an hour before at the latest.")
    for line in dict.fromkeys(f"fees: {one.fee.source}" for one in found):
        echo(line)
    for line in dict.fromkeys(f"emission: {one.weight.source}" for one in found):
        echo(line)
    for one in found:
        if one.bonus:
            echo(f"{one.kind}: until 2025, earlier wins counted {100 * one.bonus:.0f} % more for admission;")
            echo("  no such rule is known today, so it is not in the numbers")
    if all(one.prize is None for one in found):
        echo("What an entry is worth: give --p-win and either --prize, or --alpha-price")
        echo("with --emission or a network.")
    for line in missing:
        for part in textwrap.wrap(f"stored figures are shown: {line}", 80, subsequent_indent="  "):
            echo(part, err=True)


def _break_even(one: CalendarEntry) -> str:
    if one.break_even is None:
        return "–"
    return "never" if one.break_even > 1 else f"{100 * one.break_even:.2g} %"


def calendar_data(found: Sequence[CalendarEntry], missing: Sequence[str]) -> dict[str, Any]:
    return {
        "kinds": [
            {
                "kind": str(one.kind),
                "starts_at": one.starts_at.timestamp(),
                "register_by": rfc3339(one.register_by.timestamp()),
                "fee_tao": one.fee.value,
                "fee_source": one.fee.source,
                "emission_weight": one.weight.value,
                "emission_source": one.weight.source,
                "earlier_wins_bonus": one.bonus,
                "prize_tao": one.prize,
                "break_even_p_win": one.break_even,
                "p_win": one.p_win,
                "expected_tao": one.expected,
            }
            for one in found
        ],
        "missing": list(missing),
    }
