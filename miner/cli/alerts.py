"""`god-miner alerts`: list, check, test and silence alerts and their rules."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core.domain.errors import ConfigError, Problem, nearest_name
from core.domain.units import parse_seconds
from miner.cli.options import AsJson, PageLimit, load_settings
from miner.cli.output import echo, echo_json, print_pages

if TYPE_CHECKING:
    from miner.alerts.rules import LoadedAlertRules
    from miner.api.alerts import AlertsPage, TrialNotification
    from miner.settings import Settings

app = typer.Typer(no_args_is_help=True, help="List, check, test and silence alerts and their rules.")


@app.command("list")
def list_alerts(
    every: Annotated[bool, typer.Option("--all", help="Include alerts that are over.")] = False,
    limit: PageLimit = 50,
    as_json: AsJson = False,
) -> None:
    """List open alerts, the rules with what they measure now, and silences."""
    from miner.api.alerts import AlertsPage
    from miner.cli.render.alerts import alert_pages
    from miner.daemon_client import NoDaemon, get

    settings = load_settings()
    try:
        page = get(settings, f"/alerts?limit={limit}" + ("" if every else "&open=true"), AlertsPage)
    except NoDaemon:
        page = _from_store(settings, limit, only_open=not every)
    if as_json:
        echo_json(page)
        return
    print_pages(alert_pages(page))


@app.command()
def check(
    file: Annotated[
        Path | None, typer.Argument(help="File of rules. Default: ALERTS_FILE.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a file of rules: every mistake with its line, and what it changes. Exit code 1 if wrong."""
    from miner.alerts.rules import load_alert_rules
    from miner.cli.options import problem_findings

    path = file or load_settings().alerts_file
    if file is not None and not file.is_file():
        raise ConfigError(str(file), [Problem(str(file), "", "there is no such file")])
    try:
        rules = load_alert_rules(path)
    except ConfigError as error:
        findings = problem_findings(error)
        if as_json:
            echo_json({"file": str(path), "findings": [one._asdict() for one in findings], "rules": {}})
        for one in () if as_json else findings:
            echo(f"{one.level.value}: {one.where}: {one.message}")
        raise typer.Exit(1) from None
    changes = _changes(rules)
    if as_json:
        echo_json({"file": str(path), "findings": [], "rules": changes})
        return
    echo(f"{path}: fine" if path.exists() else f"{path} does not exist: the shipped rules are in force")
    for name, change in changes.items():
        echo(f"  {name}: {change}")


def _changes(rules: LoadedAlertRules) -> dict[str, str]:
    """Describe each rule that differs from the shipped ones."""
    from miner.alerts.rules import load_alert_rules
    from miner.alerts.state import condition_text

    shipped, changes = load_alert_rules().rules, {}
    for name in dict.fromkeys((*shipped, *rules.rules)):
        rule, before = rules.rules.get(name), shipped.get(name)
        if rule is None:
            changes[name] = "off"
        elif before is None or condition_text(rule) != condition_text(before):
            was = f" (shipped: {condition_text(before)})" if before else " (your own)"
            changes[name] = f"{rule.when.metric} {condition_text(rule)}{was}"
        elif rule != before:
            changes[name] = "the same condition, another answer to it"
    return changes


@app.command("test")
def try_rule(
    rule: Annotated[
        str | None, typer.Argument(help="Name of a rule. Default: send a notification to every target.")
    ] = None,
    value: Annotated[
        str | None, typer.Argument(help="Value to test, e.g. 91 or 95%. Default: current values.")
    ] = None,
    send: Annotated[
        bool, typer.Option("--send", help="Send the notification that the rule would send.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a rule does at a value, or at what it measures now; without a rule, send a notification."""
    if rule is None:
        _send_test(None, as_json)
        return
    from miner.alerts.rules import load_alert_rules
    from miner.alerts.state import trial
    from miner.api.alerts import AlertsPage, Severity, TrialNotification
    from miner.daemon_client import get

    settings = load_settings()
    rules = load_alert_rules(settings.alerts_file).rules
    if rule not in rules:
        nearest = nearest_name(rule, rules, cutoff=0.0)
        raise ConfigError("rule", [Problem("RULE", rule, f"no such rule; nearest is {nearest}")])
    values: dict[str, float | None]
    if value is not None:
        values = {"value": _number(value)}
    else:
        states = get(settings, "/alerts?limit=1&open=true", AlertsPage).rules
        values = {state.subject: state.value for state in states if state.name == rule}
    trials = {subject: trial(rules[rule], number) for subject, number in values.items()}
    if as_json and not send:
        echo_json([{"subject": subject, **tried._asdict()} for subject, tried in trials.items()])
    elif not as_json:
        for subject, tried in trials.items():
            echo(f"{subject or rule}: {tried.text}")
    if send:
        text = next((tried.text for tried in trials.values()), rules[rule].description)
        severity = Severity(rules[rule].severity or Severity.WARNING)
        _send_test(TrialNotification(rule=rule, severity=severity, text=f"test: {text}"[:500]), as_json)


#: Each target may take half a minute, and so may the start of the process that sends.
_SEND_SECONDS = 75.0


def _send_test(notification: TrialNotification | None, as_json: bool) -> None:
    """Have the daemon send a notification, and print for each target whether it arrived. Exit with 1 if any
    did not."""
    from miner.api.alerts import TrialNotification, TrialReport
    from miner.daemon_client import post

    reply = post(
        load_settings(),
        "/alerts/test",
        TrialReport,
        notification or TrialNotification(),
        seconds=_SEND_SECONDS,
    )
    if as_json:
        echo_json(reply)
    else:
        for delivery in reply.targets:
            echo(f"{delivery.target}: {delivery.error or 'arrived'}")
    if any(delivery.error for delivery in reply.targets):
        raise typer.Exit(1)


def _number(text: str) -> float:
    from pydantic import TypeAdapter, ValidationError

    from miner.alerts.rules import Limit, Threshold

    written: Any = text
    with contextlib.suppress(ValueError):
        written = float(text)
    try:
        found: Threshold = TypeAdapter(Limit).validate_python(written)
    except ValidationError:
        raise ConfigError(
            "value", [Problem("VALUE", text, "a number like 91, 95%, 8h or 20GB is needed")]
        ) from None
    return found.value


@app.command()
def silence(
    rule: Annotated[str, typer.Argument(help="Rule or kind of alert; * stands for any text.")] = "*",
    subject: Annotated[str, typer.Option(help="Subject of the alerts: gpu:…, job:7, host.")] = "*",
    length: Annotated[str, typer.Option("--for", help="Length of the silence: 30m, 8h, 7d.")] = "8h",
    reason: Annotated[str, typer.Option(help="Reason, for whoever looks later.")] = "",
    end: Annotated[int | None, typer.Option(help="End the silence with this number.")] = None,
    as_json: AsJson = False,
) -> None:
    """Stop notifications of some alerts for a while; they are still listed."""
    from miner.api.alerts import EndedSilence, Silence, SilenceRequest
    from miner.cli.output import show_time
    from miner.daemon_client import delete, post

    settings = load_settings()
    if end is not None:
        ended = delete(settings, f"/alerts/silences/{end}", EndedSilence)
        if as_json:
            echo_json(ended)
        else:
            echo(f"silence {end} is over")
        return
    try:
        seconds = parse_seconds(length)
    except ValueError as error:
        raise ConfigError("silence", [Problem("--for", length, str(error))]) from None
    request = SilenceRequest(rule=rule, subject=subject, seconds=seconds, reason=reason)
    made = post(settings, "/alerts/silences", Silence, request)
    if as_json:
        echo_json(made)
    else:
        echo(f"silence {made.id}: {rule} of {subject}, until {show_time(made.until)} UTC")


def _from_store(settings: Settings, limit: int, *, only_open: bool) -> AlertsPage:
    """Read stored alerts and silences; without a daemon no rule is measured."""
    from miner.api.alerts import Alert, AlertsPage
    from miner.store.alerts import newest_alerts, silences_in_force
    from miner.store.database import open_store

    with open_store(settings.store_dir) as connection:
        return AlertsPage(
            alerts=Alert.of_each(newest_alerts(connection, limit, only_open=only_open)),
            silences=silences_in_force(connection, time.time()),
            rules=[],
            problem=None,
        )
