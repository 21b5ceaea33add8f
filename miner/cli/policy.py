"""`god-miner policy`: list, show, check, compare and backtest acceptance policies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core.domain.errors import ConfigError
from miner.cli import options
from miner.cli.options import (
    DEFAULT_GPUS,
    AsJson,
    local_policy_and_profile_or_warn,
    policy_directories,
    problem_findings,
    profile_directories,
    warn_if_not_in_force,
)
from miner.cli.output import echo_json, findings_line, print_table

if TYPE_CHECKING:
    from core.profile.explain import ProfileFinding
    from miner.offers.backtest.policy_check import AcceptanceCount
    from miner.offers.policies.load import LoadedPolicy

app = typer.Typer(help="List, show, check, compare and backtest acceptance policies.", no_args_is_help=True)

Name = Annotated[
    str,
    typer.Argument(help="Name or path of a policy.", autocompletion=options.complete_policies),
]
Dirs = Annotated[
    list[Path] | None,
    typer.Option("--dir", help="Directory to search before POLICY_DIR (repeatable)."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a value, e.g. hours.instruct=12 (repeatable)."),
]


@app.command("list")
def list_policies(directories: Dirs = None, as_json: AsJson = False) -> None:
    """List every policy that can be named, and which one is in force."""
    from miner.offers.policies.load import load_policy, policy_files

    rows, places = [], policy_directories(directories)
    for name, file in policy_files(places).items():
        try:
            policy = load_policy(str(file), places)
            made_for = (policy.hardware or "", policy.profile or "")
            rows.append((name, *made_for, policy.description, str(file)))
        except ConfigError as error:
            rows.append((name, "", "", f"broken: {error.problems[0]}", str(file)))
    keys = ("name", "hardware", "profile", "description", "file")
    found = local_policy_and_profile_or_warn()
    if as_json:
        used = found and str(found.policy.file)
        echo_json([{**dict(zip(keys, row, strict=True)), "in_force": row[-1] == used} for row in rows])
        return
    print_table(keys[:4], [row[:4] for row in rows])
    if found is not None:
        typer.echo(f"in force: {found.policy.name}, because {found.why_policy}")


@app.command()
def show(name: Name, changes: Set = None, directories: Dirs = None, as_json: AsJson = False) -> None:
    """Show every value that a policy sets, and the line it comes from."""
    policy = _load_policy(name, directories, changes)
    if not as_json:
        warn_if_not_in_force("policy", name)
    written = policy.written().values()
    notes = [note for layer in policy.layers for note in layer.content.notes]
    if as_json:
        echo_json(
            {
                "policy": policy.name,
                "digest": policy.digest,
                "settings": [one._asdict() for one in written],
                "notes": notes,
            }
        )
        return
    typer.echo(f"{policy.name} ({policy.digest[:16]}): {policy.description}")
    print_table(("key", "value", "from"), [(one.path, _show_value(one.value), one.origin) for one in written])
    for note in notes:
        typer.echo(f"not set: {note}")


@app.command()
def check(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names or paths. Default: all that have a name.", autocompletion=options.complete_policies
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(help="Tuning profile to plan with.", autocompletion=options.complete_profiles),
    ] = None,
    fleet: Annotated[str | None, typer.Option(help="GPUs, e.g. 8xH100.")] = None,
    directories: Dirs = None,
    as_json: AsJson = False,
) -> None:
    """Check policies: mistakes with lines, contradictions, typical offers accepted. Exit code 1 if wrong."""
    from miner.offers.policies.load import policy_files

    found = {
        name: _checked(name, profile, fleet, directories)
        for name in names or policy_files(policy_directories(directories))
    }
    wrong = any(finding.level.value == "error" for findings, _ in found.values() for finding in findings)
    if as_json:
        echo_json(
            {
                name: {
                    "findings": [one._asdict() for one in findings],
                    "accepts": [one._asdict() for one in tallies],
                }
                for name, (findings, tallies) in found.items()
            }
        )
    else:
        for name, (findings, tallies) in found.items():
            typer.echo(f"{name}: {findings_line(findings)}")
            for finding in findings:
                typer.echo(f"  {finding.level.value}: {finding.where}: {finding.message}")
            if tallies:
                typer.echo(f"  takes {', '.join(_tally_line(one) for one in tallies)}")
            if names and not any(one.level.value == "error" for one in findings):
                warn_if_not_in_force("policy", name)
    raise typer.Exit(1 if wrong else 0)


@app.command()
def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the reference page instead.")] = False,
) -> None:
    """Print the JSON Schema of a policy file, for editors."""
    from miner.offers.policies.docs import json_schema
    from miner.offers.policies.docs import markdown as reference

    typer.echo(reference() if markdown else json.dumps(json_schema(), indent=2, ensure_ascii=False))


@app.command()
def diff(left: Name, right: Name, directories: Dirs = None, as_json: AsJson = False) -> None:
    """Show where two policies differ."""
    there, here = (_load_policy(name, directories).written() for name in (left, right))
    rows = []
    for path in dict.fromkeys((*there, *here)):
        one, other = there.get(path), here.get(path)
        if (one and one.value) != (other and other.value):
            rows.append((path, one, other))
    if as_json:
        echo_json(
            [
                {"key": path, "left": one and one._asdict(), "right": other and other._asdict()}
                for path, one, other in rows
            ]
        )
        return
    typer.echo(f"{left} and {right}: {len(rows)} values differ")
    shown = [
        (
            path,
            _show_value(one.value) if one else "–",
            _show_value(other.value) if other else "–",
            f"{one.origin if one else 'default'} | {other.origin if other else 'default'}",
        )
        for path, one, other in rows
    ]
    print_table(("key", left, right, "from"), shown)


def _load_policy(
    name: str, directories: list[Path] | None, changes: Sequence[str] | None = None
) -> LoadedPolicy:
    from miner.offers.policies.load import load_policy, parse_overrides

    return load_policy(name, policy_directories(directories), parse_overrides(changes or ()))


def _checked(
    name: str, profile: str | None, fleet: str | None, directories: list[Path] | None
) -> tuple[list[ProfileFinding], list[AcceptanceCount]]:
    from core.domain.hardware import Hardware, parse_gpus
    from core.profile.resolve import load_profile
    from miner.offers.backtest.policy_check import acceptance_counts, policy_findings
    from miner.offers.policies.load import default_profile_name

    try:
        policy = _load_policy(name, directories)
        hardware = Hardware(gpus=parse_gpus(fleet or policy.hardware or DEFAULT_GPUS))
        loaded = load_profile(
            profile or default_profile_name(policy, hardware).name, profile_directories(None)
        )
    except ConfigError as error:
        return problem_findings(error), []
    return policy_findings(policy), acceptance_counts(policy, loaded, hardware)


def _tally_line(one: AcceptanceCount) -> str:
    rest = f" ({one.mostly})" if one.accepted < one.asked else ""
    return f"{one.task} {one.accepted}/{one.asked}{rest}"


def _show_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
