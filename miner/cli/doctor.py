"""`god-miner doctor`: find what would keep this miner from working, and how to fix it."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from core.domain.errors import ConfigError
from miner.cli.options import AsJson, load_settings
from miner.cli.output import echo_json, terminal

if TYPE_CHECKING:
    from miner.doctor import Finding
    from miner.settings import Settings

app = typer.Typer(invoke_without_command=True)

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


@app.callback()
def doctor(
    as_json: AsJson = False,
) -> None:
    """Check for what would keep this miner from working. Exit code 1 if anything would."""
    from miner.doctor import is_healthy

    findings = _findings()
    if as_json:
        shown = [finding.as_dict() for finding in findings]
        echo_json({"healthy": is_healthy(findings), "findings": shown})
    else:
        _print(findings)
    if not is_healthy(findings):
        raise typer.Exit(1)


def _findings() -> list[Finding]:
    """Run all checks, or only those of the settings if these are wrong: the others need them."""
    from miner.doctor import CheckContext, Finding, FindingStatus, all_checks, examine
    from miner.observe.redact import Redactor

    try:
        settings = load_settings()
    except ConfigError as error:
        fix = "correct it in the environment or in .env; see docs/settings.md"
        wrong = [Finding(FindingStatus.FAIL, "settings", str(problem), fix) for problem in error.problems]
        return [*wrong, Finding(FindingStatus.SKIP, "all else", "needs good settings first")]
    _quiet_logs(settings)
    redact = Redactor(settings.secrets())
    return [
        Finding(found.status, redact(found.what), redact(found.detail), redact(found.fix))
        for found in examine(CheckContext(settings, Path(".env")), all_checks(settings))
    ]


def _quiet_logs(settings: Settings) -> None:
    """Silence logs: the checks report the same. LOG_LEVEL=DEBUG shows them."""
    from miner.observe import logs

    logs.configure(settings)
    if settings.log_level != "DEBUG":
        logging.getLogger().setLevel(logging.CRITICAL)


def _print(findings: list[Finding]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from miner.doctor.checks.subnet import WHAT_EARNS

    console = terminal()
    for line in WHAT_EARNS:
        console.print(line, style="dim")
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    table.add_column("Looked at", overflow="fold")
    table.add_column("Found", overflow="fold")
    for finding in findings:
        found = Text(finding.detail)
        if finding.fix:
            found.append(f"\n→ {finding.fix}", "cyan")
        table.add_row(Text(finding.status, _STYLES[finding.status]), Text(finding.what), found)
    console.print(table)
    counts = Counter(finding.status.value for finding in findings)
    console.print(Text(", ".join(f"{counts[name]} {name}" for name in _STYLES if counts[name])))
