"""`god-miner policy`: what acceptance policies there are, what they say, and what they would have done."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from miner.commands import completion
from miner.commands.backtest import backtest
from miner.commands.chosen import chosen_or_why_not, policy_places, profile_places, tell_where_not_in_force
from miner.commands.generate import generate
from miner.commands.output import terminal

if TYPE_CHECKING:
    from core.profile.explain import Finding
    from miner.offers.policies.check import Tally
    from miner.offers.policies.load import LoadedPolicy

app = typer.Typer(help="Acceptance policies: list, show, check, compare, backtest.", no_args_is_help=True)
app.command()(backtest)
app.command()(generate)

Name = Annotated[
    str, typer.Argument(help="A policy's name, or the path of a file.", autocompletion=completion.policies)
]
Dirs = Annotated[
    list[Path] | None,
    typer.Option(
        "--dir", help="Look here first, then in POLICY_DIR, then at the shipped ones; may be repeated."
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a value, like hours.instruct=12; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


@app.command("list")
def list_policies(directories: Dirs = None, as_json: AsJson = False) -> None:
    """Every policy that can be called by name, and which one is in force."""
    from core.errors import ConfigError
    from miner.offers.policies.load import load_policy, policy_files

    rows, places = [], policy_places(directories)
    for name, file in policy_files(places).items():
        try:
            policy = load_policy(str(file), places)
            made_for = (policy.hardware or "", policy.profile or "")
            rows.append((name, *made_for, policy.description, str(file)))
        except ConfigError as error:
            rows.append((name, "", "", f"broken: {error.problems[0]}", str(file)))
    keys = ("name", "hardware", "profile", "description", "file")
    found = chosen_or_why_not()
    if as_json:
        used = found and str(found.policy.file)
        _print_json([{**dict(zip(keys, row, strict=True)), "in_force": row[-1] == used} for row in rows])
        return
    _print_table(keys[:4], [row[:4] for row in rows])
    if found is not None:
        typer.echo(f"in force: {found.policy.name}, because {found.why_policy}")


@app.command()
def show(name: Name, changes: Set = None, directories: Dirs = None, as_json: AsJson = False) -> None:
    """Every value that a policy sets, and the line it comes from."""
    policy = _load(name, directories, changes)
    if not as_json:
        tell_where_not_in_force("policy", name)
    written = policy.written().values()
    notes = [note for layer in policy.layers for note in layer.content.notes]
    if as_json:
        _print_json(
            {
                "policy": policy.name,
                "digest": policy.digest,
                "settings": [one._asdict() for one in written],
                "notes": notes,
            }
        )
        return
    typer.echo(f"{policy.name} ({policy.digest[:16]}): {policy.description}")
    _print_table(("key", "value", "from"), [(one.path, _shown(one.value), one.origin) for one in written])
    for note in notes:
        typer.echo(f"not set: {note}")


@app.command()
def check(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Names or paths; none: all by name.", autocompletion=completion.policies),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Plan by this profile.", autocompletion=completion.profiles)
    ] = None,
    fleet: Annotated[str | None, typer.Option(help="On these GPUs, like 8xH100.")] = None,
    directories: Dirs = None,
    as_json: AsJson = False,
) -> None:
    """Mistakes with their lines, contradictions, and what it takes of representative offers; 1 if wrong."""
    from miner.offers.policies.load import policy_files

    found = {
        name: _checked(name, profile, fleet, directories)
        for name in names or policy_files(policy_places(directories))
    }
    wrong = any(finding.level.value == "error" for findings, _ in found.values() for finding in findings)
    if as_json:
        _print_json(
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
            typer.echo(f"{name}: {_verdict(findings)}")
            for finding in findings:
                typer.echo(f"  {finding.level.value}: {finding.where}: {finding.message}")
            if tallies:
                typer.echo(f"  takes {', '.join(_tally(one) for one in tallies)}")
            if names and not any(one.level.value == "error" for one in findings):
                tell_where_not_in_force("policy", name)
    raise typer.Exit(1 if wrong else 0)


@app.command()
def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="The reference page instead.")] = False,
) -> None:
    """JSON Schema of a policy file, for editors."""
    from miner.offers.policies.docs import json_schema
    from miner.offers.policies.docs import markdown as reference

    typer.echo(reference() if markdown else json.dumps(json_schema(), indent=2, ensure_ascii=False))


@app.command()
def diff(left: Name, right: Name, directories: Dirs = None, as_json: AsJson = False) -> None:
    """Where two policies differ."""
    there, here = (_load(name, directories).written() for name in (left, right))
    rows = []
    for path in dict.fromkeys((*there, *here)):
        one, other = there.get(path), here.get(path)
        if (one and one.value) != (other and other.value):
            rows.append((path, one, other))
    if as_json:
        _print_json(
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
            _shown(one.value) if one else "–",
            _shown(other.value) if other else "–",
            f"{one.origin if one else 'default'} | {other.origin if other else 'default'}",
        )
        for path, one, other in rows
    ]
    _print_table(("key", left, right, "from"), shown)


def _load(name: str, directories: list[Path] | None, changes: Sequence[str] | None = None) -> LoadedPolicy:
    from miner.offers.policies.load import load_policy, read_settings

    return load_policy(name, policy_places(directories), read_settings(changes or ()))


def _checked(
    name: str, profile: str | None, fleet: str | None, directories: list[Path] | None
) -> tuple[list[Finding], list[Tally]]:
    from core.errors import ConfigError
    from core.hardware import Hardware, parse_gpus
    from core.profile.explain import Finding, Level
    from core.profile.load import load_profile
    from miner.offers.policies.check import findings, tallies
    from miner.offers.policies.choice import profile_by_gpus

    try:
        policy = _load(name, directories)
        hardware = Hardware(gpus=parse_gpus(fleet or policy.hardware or DEFAULT_FLEET))
        loaded = load_profile(profile or profile_by_gpus(policy, hardware).name, profile_places(None))
    except ConfigError as error:
        wrong = [
            Finding(Level.ERROR, problem.where, f"{problem.value} {problem.rule}".strip())
            for problem in error.problems
        ]
        return wrong, []
    return findings(policy), tallies(policy, loaded, hardware)


#: Where the policy does not say.
DEFAULT_FLEET = "4xH100"


def _verdict(findings: list[Finding]) -> str:
    errors = sum(finding.level.value == "error" for finding in findings)
    return f"{errors} errors, {len(findings) - errors} warnings" if findings else "fine"


def _tally(one: Tally) -> str:
    rest = f" ({one.mostly})" if one.accepted < one.asked else ""
    return f"{one.task} {one.accepted}/{one.asked}{rest}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _print_table(keys: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for key in keys:
        table.add_column(key, overflow="fold")
    for row in rows:
        table.add_row(*row)
    terminal().print(table)


def _print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
