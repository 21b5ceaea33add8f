"""A decision on the terminal: a table of factors that a person can argue with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from rich.table import Table
from rich.text import Text

from core.units import show_params, show_seconds
from core.wire import MinerTaskOffer
from miner.offers.decision import Decision

Page = Text | Table
#: What a rule says would let an offer pass: `rules.hours.instruct of 12`.
_SETTING = re.compile(r"\b((?:rules|score|fitting)(?:\.[a-z0-9_-]+)+) of (-?\d+(?:\.\d+)?[a-z]?)")


def pages(offer: MinerTaskOffer, decision: Decision) -> Iterator[Page]:
    """Verdict, rules, factors, plan, value; then what would have to change."""
    yield _verdict(decision)
    yield _rules(decision)
    if decision.factors:
        yield _score(decision)
    yield from _fit(decision)
    if decision.failed:
        yield _ways(offer, decision)


def heading(offer: MinerTaskOffer) -> str:
    """What was offered, in one line."""
    params = offer.model_params_count
    size = "no parameter count" if params is None else f"{show_params(params)} parameters"
    return f"{offer.task_type.value}, {offer.model}, {size}, {offer.hours_to_complete:g} h"


def _verdict(decision: Decision) -> Text:
    text = Text("accepted", style="green bold") if decision.accepted else Text("refused", style="red bold")
    profile = f", profile {decision.profile} ({decision.profile_hash})" if decision.profile else ""
    text.append(f" by policy {decision.policy} ({decision.policy_hash}){profile}\n", "")
    text.append(f"the validator was told: {decision.message}\n", "dim")
    return text


def _rules(decision: Decision) -> Table:
    table = _table("rule", "", "why")
    for reason in decision.reasons:
        passed = Text("ok", style="green") if reason.passed else Text("NO", style="red bold")
        table.add_row(reason.rule, passed, reason.text)
    return table


def _score(decision: Decision) -> Table:
    table = _table("\nfactor", "\nvalue", "\nweight", "\nadds", "\nfrom")
    for column in table.columns[1:4]:
        column.justify = "right"
    for name, factor in decision.factors.items():
        table.add_row(
            name, f"{factor.value:.3f}", f"{factor.weight:.2f}", f"{factor.contribution:.3f}", factor.text
        )
    needed = "no threshold" if decision.threshold is None else f"needed: more than {decision.threshold:g}"
    table.add_row("score", "", "", "" if decision.score is None else f"{decision.score:.3f}", needed)
    return table


def _fit(decision: Decision) -> Iterator[Page]:
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
        window = f"{_when(placement.starts_at)} to {_when(placement.ends_at)} UTC"
        table.add_row("place", f"{', '.join(placement.gpus)}, {window} ({placement.why})")
    if value is not None:
        table.add_row("worth", _worth(decision))
    if table.row_count:
        yield table


def _worth(decision: Decision) -> str:
    value = decision.value
    assert value is not None
    return (
        f"{value.points:.2f} points: work {value.work:.2f}, success {value.success:.0%}, "
        f"win {value.win:.1%}, among the worst {value.punished:.0%}; "
        f"{value.per_gpu_hour:.3f} for each of {value.gpu_hours:.1f} GPU-hours"
    )


def _ways(offer: MinerTaskOffer, decision: Decision) -> Text:
    enough = (
        "It would be accepted with all of these" if decision.plan else "This would have to change at least"
    )
    text = Text(f"\n{enough}:\n", style="bold")
    for reason in decision.failed:
        text.append(f"  {reason.rule}: {reason.way or 'otherwise'}\n", "")
    text.append(_try(offer, decision), "dim")
    return text


def _try(offer: MinerTaskOffer, decision: Decision) -> str:
    """The command that answers "what if?" for this one."""
    found = [_SETTING.findall(reason.way) for reason in decision.failed]
    changes = [f"--set {key}={value}" for each in found for key, value in each]
    return f"Try: god-miner policy backtest {' '.join([*changes, f'--offer {offer.task_id}'])}\n"


def _when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def as_data(offer: MinerTaskOffer, decision: Decision) -> dict[str, Any]:
    """For programs."""
    placement, value, plan = decision.placement, decision.value, decision.plan
    return {
        "offer": offer.model_dump(mode="json"),
        "accepted": decision.accepted,
        "message": decision.message,
        "policy": decision.policy,
        "policy_hash": decision.policy_hash,
        "profile": decision.profile,
        "profile_hash": decision.profile_hash,
        "score": decision.score,
        "threshold": decision.threshold,
        "reasons": [reason._asdict() for reason in decision.reasons],
        "factors": {name: factor._asdict() for name, factor in decision.factors.items()},
        "plan": plan._asdict() if plan else None,
        "placement": {
            "gpus": list(placement.gpus),
            "starts_at": placement.starts_at,
            "ends_at": placement.ends_at,
            "why": placement.why,
        }
        if placement
        else None,
        "value": {**value._asdict(), "per_gpu_hour": value.per_gpu_hour} if value else None,
    }
