"""Earned, spent and kept in a time, in dollars at the prices in force now.

Spent is every GPU-hour in which the daemon knew the GPU, with a job or without: the same hours as in the
rest of a report. Earned is the miner's emission, at the subnet's price of then.
"""

from __future__ import annotations

import sqlite3
import time
from collections import defaultdict

from core.domain.units import show_dollars
from miner.api.reports import Money
from miner.fleet.costs import GpuCosts
from miner.fleet.fleet_file import Prices
from miner.reports.kpis import DAY, rollups_within
from miner.store.ranks import newest_rank, ranks_between
from miner.store.samples import HOUR


def period_money(
    connection: sqlite3.Connection, begins_at: float, ends_at: float, prices: Prices
) -> Money | None:
    """Add up a time, or return None if no GPU has a price."""
    if not prices:
        return None
    watched, idle = defaultdict[str, float](float), defaultdict[str, float](float)
    for row in rollups_within(connection, begins_at, ends_at):
        hours = row.period / HOUR
        watched[row.gpu] += row.watched * hours
        idle[row.gpu] += (row.watched - row.busy) * hours
    costs = GpuCosts.read(connection, prices)
    priced = {gpu: price for gpu in watched if (price := costs.per_hour(gpu)) is not None}
    spent = sum(watched[gpu] * price for gpu, price in priced.items())
    tao = _earned_tao(connection, begins_at, ends_at)
    earned = None if tao is None or prices.tao is None else tao * prices.tao
    return Money(
        spent=spent if priced else None,
        idle=sum(idle[gpu] * price for gpu, price in priced.items()) if priced else None,
        hours_without_price=sum(hours for gpu, hours in watched.items() if gpu not in priced),
        earned_tao=tao,
        earned=earned,
        kept=earned - spent if earned is not None and priced else None,
    )


def _earned_tao(connection: sqlite3.Connection, begins_at: float, ends_at: float) -> float | None:
    """A row holds until the next one, but for a day at most: then the metagraph was not read for long."""
    ends_at = min(ends_at, time.time())  # of the rest of this week nothing is earned yet
    before = newest_rank(connection, begins_at)
    rows = [row for row in ranks_between(connection, begins_at, ends_at) if row.at > begins_at]
    rows = [before, *rows] if before is not None else rows
    ends = [*(row.at for row in rows[1:]), ends_at]
    earned = [
        row.tao_per_day * max(min(end, row.at + DAY) - max(row.at, begins_at), 0.0) / DAY
        for row, end in zip(rows, ends, strict=bool(rows))
        if row.tao_per_day is not None
    ]
    return sum(earned) if earned else None


def money_line(money: Money) -> str:
    """One line: earned, spent, kept."""
    tao = "" if money.earned_tao is None else f"{money.earned_tao:.4f} TAO"
    dollars = "" if money.earned is None else f"{show_dollars(money.earned)} "
    earned = f"{dollars}({tao})" if dollars else tao or "not known"
    spent = "not known" if money.spent is None else show_dollars(money.spent)
    idle = "" if not money.idle else f", {show_dollars(money.idle)} of it on idle GPUs"
    kept = "not known" if money.kept is None else show_dollars(money.kept)
    without = money.hours_without_price
    note = f"; {without:.1f} GPU-hours have no price" if without else ""
    return f"Earned {earned}; spent {spent}{idle}; kept {kept}{note}."
