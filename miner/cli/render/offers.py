"""Offers on the terminal: a decision with its rules and factors, and a backtest of several policies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from core.domain.decisions import Decision
from core.domain.units import show_params, show_seconds, show_shares
from core.domain.wire import MinerTaskOffer
from miner.cli.output import show_time
from miner.cli.render.terminal import plain_table
from miner.offers.backtest.replay import BacktestRun, DecisionChange, ReplaySummary
from miner.offers.views import settings_to_accept

Page = Text | Table


def decision_pages(offer: MinerTaskOffer, decision: Decision) -> Iterator[Page]:
    """Yield verdict, rules, factors, plan and value; then what would have to change."""
    yield _decision_heading(decision)
    yield _rule_table(decision)
    if decision.factors:
        yield _score_table(decision)
    yield from _fit_table(decision)
    if decision.failed:
        yield _needed_changes(offer, decision)


def offer_heading(offer: MinerTaskOffer) -> str:
    """Describe an offer in one line."""
    params = offer.model_params_count
    size = "no parameter count" if params is None else f"{show_params(params)} parameters"
    return f"{offer.task_type.value}, {offer.model}, {size}, {offer.hours_to_complete:g} h"


def _decision_heading(decision: Decision) -> Text:
    text = Text("accepted", style="green bold") if decision.accepted else Text("refused", style="red bold")
    profile = f", profile {decision.profile} ({decision.profile_hash})" if decision.profile else ""
    text.append(f" by policy {decision.policy} ({decision.policy_hash}){profile}\n", "")
    text.append(f"answer to the validator: {decision.message}\n", "dim")
    return text


def _rule_table(decision: Decision) -> Table:
    table = plain_table("rule", "", "why")
    for reason in decision.reasons:
        passed = Text("ok", style="green") if reason.passed else Text("NO", style="red bold")
        table.add_row(reason.rule, passed, reason.text)
    return table


def _score_table(decision: Decision) -> Table:
    numbers = ("\nvalue", "\nweight", "\nadds")
    table = plain_table("\nfactor", *numbers, "\nfrom", right=numbers)
    for name, factor in decision.factors.items():
        table.add_row(
            name, f"{factor.value:.3f}", f"{factor.weight:.2f}", f"{factor.contribution:.3f}", factor.text
        )
    needed = "no threshold" if decision.threshold is None else f"needed: more than {decision.threshold:g}"
    table.add_row("score", "", "", "" if decision.score is None else f"{decision.score:.3f}", needed)
    return table


def _fit_table(decision: Decision) -> Iterator[Page]:
    table = Table(box=None, pad_edge=False, show_header=False)
    plan, placement, value = decision.plan, decision.placement, decision.value
    if plan is not None:
        wait = f" after {show_seconds(plan.wait_s)} of waiting" if plan.wait_s > 0 else ""
        table.add_row(
            "\nplan",
            f"\n{plan.gpus} GPUs for {show_seconds(plan.busy_s)}{wait}, {plan.epochs:.2g} epochs, "
            f"{plan.share:.0%} of the wished training",
        )
    if placement is not None:
        window = " to ".join(
            show_time(at, seconds=False, year=True) for at in (placement.starts_at, placement.ends_at)
        )
        table.add_row("place", f"{', '.join(placement.gpus)}, {window} UTC ({placement.why})")
    if value is not None:
        table.add_row("worth", _value_line(decision))
    if table.row_count:
        yield table


def _value_line(decision: Decision) -> str:
    value = decision.value
    assert value is not None
    return (
        f"{value.points:.2f} points: work {value.work:.2f}, success {value.success:.0%}, "
        f"win {value.win:.1%}, among the worst {value.punished:.0%}; "
        f"{value.per_gpu_hour:.3f} for each of {value.gpu_hours:.1f} GPU-hours"
    )


def _needed_changes(offer: MinerTaskOffer, decision: Decision) -> Text:
    enough = (
        "It would be accepted with all of these" if decision.plan else "This would have to change at least"
    )
    text = Text(f"\n{enough}:\n", style="bold")
    for reason in decision.failed:
        text.append(f"  {reason.rule}: {reason.way or 'otherwise'}\n", "")
    text.append(_backtest_command(offer, decision), "dim")
    return text


def _backtest_command(offer: MinerTaskOffer, decision: Decision) -> str:
    """Return the backtest command that answers "what if?" for this offer."""
    changes = [f"--set {key}={value}" for key, value in settings_to_accept(decision).items()]
    return f"Try: god-miner policy backtest {' '.join([*changes, f'--offer {offer.task_id}'])}\n"


#: Offers answered differently that are listed; all of them are in the JSON.
LISTED_CHANGES = 20


def backtest_pages(runs: Sequence[BacktestRun], changes: Sequence[DecisionChange]) -> Iterator[Page]:
    yield _summary_table([run.summary for run in runs])
    yield Text("\nGPUs held, from the first offer to the last", style="bold")
    for run in runs:
        yield Text(f"  {occupancy_bars(run.summary.occupancy)}  {run.summary.name}")
    if changes:
        yield Text(f"\nAnswered differently by {runs[-1].summary.name}: {len(changes)}", style="bold")
        yield _change_table(changes[:LISTED_CHANGES])
        if len(changes) > LISTED_CHANGES:
            yield Text(f"  and {len(changes) - LISTED_CHANGES} more; --json has all", style="dim")


def occupancy_bars(shares: Sequence[float]) -> str:
    """Return one cell per period; blank where nothing is held."""
    return "".join(" " if share <= 0.005 else show_shares([share]) for share in shares)


def _summary_table(summaries: Sequence[ReplaySummary]) -> Table:
    names = [summary.name for summary in summaries]
    rows = [(label, *cells) for label, cells in _summary_rows(summaries)]
    return plain_table("", *names, rows=rows, right=names)


def _summary_rows(summaries: Sequence[ReplaySummary]) -> Iterator[tuple[str, list[str]]]:
    yield "offers", [str(one.offers) for one in summaries]
    yield "accepted", [f"{one.accepted} ({_percentage(one.accepted, one.offers)})" for one in summaries]
    for rule in dict.fromkeys(rule for one in summaries for rule in one.refused):
        yield f"  refused by {rule}", [str(one.refused.get(rule, 0)) for one in summaries]
    yield "GPU-hours held", [f"{one.held_hours:.1f} of {one.fleet_hours:.1f}" for one in summaries]
    yield "occupancy", [f"{one.mean_occupancy:.0%}" for one in summaries]
    yield "expected points", [f"{one.points:.1f}" for one in summaries]
    yield "  per GPU-hour of the fleet", [f"{one.per_fleet_hour:.3f}" for one in summaries]
    yield "  per GPU-hour held", [f"{one.per_held_hour:.3f}" for one in summaries]
    for outcome in dict.fromkeys(outcome for one in summaries for outcome in one.outcomes):
        yield f"{outcome} in fact", [str(one.outcomes.get(outcome, 0)) for one in summaries]
    if any(one.realised is not None for one in summaries):
        yield (
            "points of those published or failed",
            ["–" if one.realised is None else f"{one.realised:.1f}" for one in summaries],
        )


def _change_table(changes: Sequence[DecisionChange]) -> Table:
    table = plain_table("when (UTC)", "task", "model", "hours", "now", "refused because")
    for one in changes:
        offer = one.after.historical.offer
        table.add_row(
            show_time(one.after.historical.at, seconds=False, year=True),
            offer.task_type.value,
            offer.model,
            f"{offer.hours_to_complete:g}",
            "accepted" if one.after.decision.accepted else "refused",
            one.why,
        )
    return table


def _percentage(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "–"
