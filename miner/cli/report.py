"""`god-miner report`: a day's, a week's or a month's work against the goals."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from core.domain.errors import ConfigError, Problem
from miner.api.reports import PolicyOutcome
from miner.cli.options import AsJson, load_settings, local_hardware
from miner.cli.output import echo_json

if TYPE_CHECKING:
    from core.domain.hardware import Hardware
    from miner.offers.policies.load import LoadedPolicy
    from miner.reports.report import ReportPeriod
    from miner.settings import Settings

app = typer.Typer(help="Report on jobs, GPUs, points, rank and goals.", no_args_is_help=True)

At = Annotated[
    str | None,
    typer.Option(
        "--at",
        help="Report the calendar period (UTC) that contains this date. Default: the period ending now.",
    ),
]
AsHtml = Annotated[bool, typer.Option("--html", help="Print one HTML file.")]
AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown.")]
WithBacktest = Annotated[
    bool, typer.Option("--backtest", help="Add a backtest of other policies on the newest 500 offers.")
]
_PERIODS = {
    "daily": "The last 24 hours, or a day.",
    "weekly": "The last 7 days, or a week from Monday.",
    "monthly": "The last 30 days, or a month.",
}
#: Shipped policies that a backtest compares with the one in force.
_COMPARED = ("conservative", "everything-feasible")


def _print_report(
    context: typer.Context,
    at: At = None,
    as_html: AsHtml = False,
    as_markdown: AsMarkdown = False,
    backtest: WithBacktest = False,
    as_json: AsJson = False,
) -> None:
    from miner.api.reports import PeriodKind
    from miner.fleet.fleet_file import gpu_prices
    from miner.observe.redact import Redactor
    from miner.reports import text as report_text
    from miner.reports.report import build_report, calendar_period, last_period, redacted_report
    from miner.store.database import open_store

    settings, now = load_settings(), time.time()
    wanted = PeriodKind(str(context.info_name))
    period = last_period(wanted, now) if at is None else calendar_period(wanted, _moment(at))
    here = local_hardware(settings) if backtest or settings.policy == "auto" else None
    policy = policy_in_force(settings, here)
    with open_store(settings.store_dir) as connection:
        built = build_report(connection, period, policy.terms, gpu_prices(settings))
    report = redacted_report(built, Redactor(settings.secrets()))
    if backtest:
        report = report.model_copy(update={"backtest": _backtest(settings, period, policy, here)})
    if as_json:
        echo_json(report)
    elif as_html:
        typer.echo(report_text.as_html(report), nl=False)
    elif as_markdown:
        typer.echo(report_text.as_markdown(report), nl=False)
    else:
        typer.echo(report_text.as_text(report), nl=False)


for _name, _help in _PERIODS.items():
    app.command(_name, help=_help)(_print_report)


def _moment(text: str) -> float:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        rule = "a date like 2026-11-23 is needed"
        raise ConfigError("report", [Problem("--at", text, rule)]) from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def policy_in_force(settings: Settings, here: Hardware | None) -> LoadedPolicy:
    from miner.offers.policies.load import active_policy_name, load_policy, settings_overrides

    name = active_policy_name(settings, here).name
    return load_policy(name, [settings.policy_dir], settings_overrides(settings))


def _backtest(
    settings: Settings, period: ReportPeriod, policy: LoadedPolicy, here: Hardware | None
) -> list[PolicyOutcome]:
    from core.domain.hardware import Hardware, parse_gpus
    from core.profile.resolve import load_profile
    from miner.offers.policies.load import active_profile_name, load_policy
    from miner.reports.report import backtest_policies
    from miner.store.database import open_store

    hardware = here or Hardware(gpus=parse_gpus(policy.hardware or "4xH100"))
    chosen = active_profile_name(settings, policy, hardware)
    profile = load_profile(chosen.name, [settings.profile_dir])
    others = [load_policy(name, [settings.policy_dir]) for name in _COMPARED if name != policy.name]
    with open_store(settings.store_dir) as connection:
        return backtest_policies(connection, period, [policy, *others], profile, hardware)
